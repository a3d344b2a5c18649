# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of rotary and append_kv: kernels/rotary called with tensors allocated here. Tables and weights go in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core.registry import Backend, Op
from ..._core.tensors import last_contiguous, looks_at_values
from ..._problem.rotary import check_positions, rows
from . import availability


def backend(op: Op) -> Backend:
    """The backend of rotary."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.rotary.fwd import forward as launch

        out, rstd = op.empty_outputs(a)
        if a.x.numel():
            launch(
                rows(a.x), *_tables(a), _flat(a.weight), out, None if a.weight is None else rstd, interleaved=a.interleaved, eps=a.eps,
                weight_offset=a.weight_offset,
            )  # fmt: skip
        return out, rstd

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        from pytransformer.kernels.rotary.bwd import backward as launch

        results = op.empty_gradients(a, wanted)
        (d_out,) = grads
        if d_out is None or not a.x.numel():
            return [None if r is None else r.zero_() for r in results]
        d_x, d_weight = results
        if d_x is None and (a.weight is None or d_weight is None):
            return results
        sums = None if d_weight is None or d_weight.is_contiguous() else d_weight.new_empty(d_weight.shape)
        launch(
            rows(d_out.to(a.x.dtype)), rows(a.x), *_tables(a), _flat(a.weight), None if a.weight is None else saved[0].contiguous(), d_x,
            d_weight if sums is None else sums, interleaved=a.interleaved, weight_offset=a.weight_offset,
        )  # fmt: skip
        if d_weight is not None and sums is not None:
            d_weight.copy_(sums)
        return results

    def why_not(a: Any) -> str | None:
        return availability.why_not(x=a.x, weight=a.weight) or _too_large(x=a.x)

    def extra_bytes(a: Any) -> int:
        """In backward, the parts of the weight's gradient: a row of float32 for each program."""
        from pytransformer.kernels.rotary.configs import programs

        return 0 if a.weight is None else 4 * a.x.shape[3] * programs(a.x.device)

    return Backend("triton", forward, backward, why_not, extra_bytes)


def append_backend(op: Op) -> Backend:
    """The backend of append_kv."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.rotary.append import append

        if looks_at_values(a.query.device):
            check_positions(a)
        outputs = op.empty_outputs(a)
        if not a.key.numel():  # a query without heads is one: the caches of nn write so
            return tuple(e.copy_(r) for e, r in zip(outputs, op.reference(a)))
        append(
            (rows(a.query), rows(a.key), rows(a.value)), (a.key_cache, a.value_cache), _flat(a.page_table), a.positions.contiguous(),
            _tables(a), (_flat(a.q_norm), _flat(a.k_norm)), outputs[0], interleaved=a.interleaved, eps=a.eps,
            weight_offset=a.weight_offset,
        )  # fmt: skip
        return outputs

    def why_not(a: Any) -> str | None:
        named = availability.why_not(query=a.query, q_norm=a.q_norm, k_norm=a.k_norm)
        from pytransformer.kernels.rotary.configs import MOST_ROWS

        if a.page_table is not None and a.page_table.shape[1] * a.key_cache.shape[2] > MOST_ROWS:
            return f"at most {MOST_ROWS:,} positions of a sequence, and page_table has room for more"
        return named or _too_large(query=a.query, value=a.value, key_cache=a.key_cache)

    return Backend("triton", forward, lambda *_: [], why_not)


def _tables(a: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """cos and sin with the same strides: the kernels have one set."""
    if a.cos is None:
        return None, None
    cos, sin = last_contiguous(a.cos), last_contiguous(a.sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def _too_large(**tensors: torch.Tensor) -> str | None:
    from pytransformer.kernels.rotary.configs import MOST_COLUMNS, MOST_ROWS

    for name, t in tensors.items():
        if t.shape[3] > MOST_COLUMNS:
            return f"last dimensions of at most {MOST_COLUMNS:,}, and {name} has {t.shape[3]:,}"
        if t.shape[:3].numel() > MOST_ROWS:
            return f"at most {MOST_ROWS:,} rows, and {name} has {t.shape[:3].numel():,}"
    return None
