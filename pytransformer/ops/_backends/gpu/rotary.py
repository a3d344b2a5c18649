# SPDX-License-Identifier: Apache-2.0
"""Code of rotary and append_kv that the backends ``triton`` and ``cuda`` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend, Recorded
from ..._core.tensors import looks_at_values
from ..._problem.rotary import check_positions, rows

Reason = Callable[[Any], str | None]
# (op's arguments, x, out, rstd or None): write out and rstd.
Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
# (op's arguments, d_out, x, rstd or None, d_x or None, d_weight or None): write d_x and d_weight if
# not None.
Backward = Callable[..., None]
# (op's arguments, (query, key, value), out): write out and the caches.
Append = Callable[[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], None]


def backend(
    name: str,
    op: Op,
    launch: tuple[Forward, Backward],
    why_not: Reason,
    extra_bytes: Callable[[Any], int],
    recorded: Recorded | None = None,
) -> Backend:
    """Return the backend of rotary.

    Kernels get rows with a contiguous last dimension and a contiguous d_weight.
    """

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        out, rstd = op.empty_outputs(a)
        if a.x.numel():
            launch[0](a, rows(a.x), out, None if a.weight is None else rstd)
        return out, rstd

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        results = op.empty_gradients(a, wanted)
        (d_out,) = grads
        if d_out is None or not a.x.numel():
            return [None if r is None else r.zero_() for r in results]
        d_x, d_weight = results
        if d_x is None and (a.weight is None or d_weight is None):
            return results
        sums = (
            None
            if d_weight is None or d_weight.is_contiguous()
            else d_weight.new_empty(d_weight.shape)
        )
        rstd = None if a.weight is None else saved[0].contiguous()
        launch[1](
            a, rows(d_out.to(a.x.dtype)), rows(a.x), rstd, d_x, d_weight if sums is None else sums
        )
        if d_weight is not None and sums is not None:
            d_weight.copy_(sums)
        return results

    return Backend(name, forward, backward, why_not, extra_bytes, recorded=recorded)


def append_backend(
    name: str, op: Op, launch: Append, why_not: Reason, recorded: Recorded | None = None
) -> Backend:
    """Return the backend of append_kv."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if looks_at_values(a.query.device):
            check_positions(a)
        outputs = op.empty_outputs(a)
        if not a.key.numel():  # a query without heads is valid: the caches of nn write that way
            return tuple(e.copy_(r) for e, r in zip(outputs, op.reference(a)))
        launch(a, (rows(a.query), rows(a.key), rows(a.value)), outputs[0])
        return outputs

    return Backend(name, forward, lambda *_: [], why_not, recorded=recorded)


def flat(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return a weight or page table as a contiguous tensor."""
    return None if t is None else t.contiguous()


def too_large(columns: int, most_rows: int, **tensors: torch.Tensor) -> str | None:
    """Return why a tensor has too many columns or rows, or None."""
    for name, t in tensors.items():
        if t.shape[3] > columns:
            return f"last dimensions of at most {columns:,}, and {name} has {t.shape[3]:,}"
        if t.shape[:3].numel() > most_rows:
            return f"at most {most_rows:,} rows, and {name} has {t.shape[:3].numel():,}"
    return None


def too_much_room(a: Any, most_rows: int) -> str | None:
    """Return why append_kv's kernels cannot index the positions of a sequence's pages, or None."""
    if a.page_table is not None and a.page_table.shape[1] * a.key_cache.shape[2] > most_rows:
        return f"at most {most_rows:,} positions of a sequence, and page_table has room for more"
    return None
