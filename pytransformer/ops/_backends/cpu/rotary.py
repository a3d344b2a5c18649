# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of rotary and append_kv.

It allocates tensors and calls csrc/cpu/rotary/rotary.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....reference._rotary import write_rows
from ..._core import native
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend
from ..._core.tensors import looks_at_values
from ..._problem.rotary import check_positions, plain, rows, work_dtype


def _why_not(raw: str, x: torch.Tensor, name: str) -> str | None:
    if x.device.type != "cpu":
        return f"{WRONG_DEVICE}the CPU, and {name} is on {x.device}"
    return native.why_not(raw)


def backend(op: Op) -> Backend:
    """Return the backend of rotary."""

    def forward(a: Any, save: bool = True) -> tuple[torch.Tensor, ...]:
        out, rstd = op.empty_outputs(a)
        if a.x.numel():
            work = work_dtype(a.x)
            cos, sin, weight = (plain(t, work) for t in (a.cos, a.sin, a.weight))
            saved = rstd if save and weight is not None else None
            torch.ops.pytransformer_C.rotary_fwd.default(
                rows(a.x), cos, sin, weight, out, saved, a.interleaved, a.eps, a.weight_offset
            )
        return out, rstd

    def infer(a: Any) -> tuple[torch.Tensor, ...]:
        return forward(a, save=False)[:1]

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
        if a.weight is None and d_x is None:
            return results
        work = work_dtype(a.x)
        cos, sin, weight = (plain(t, work) for t in (a.cos, a.sin, a.weight))
        sums = None if d_weight is None else d_weight.new_empty(d_weight.shape, dtype=work)
        torch.ops.pytransformer_C.rotary_bwd.default(
            rows(d_out.to(a.x.dtype)), rows(a.x), cos, sin, weight,
            None if weight is None else saved[0].contiguous(), d_x, sums,
            a.interleaved, a.weight_offset,
        )  # fmt: skip
        if d_weight is not None and sums is not None:
            d_weight.copy_(sums)
        return results

    return Backend(
        "cpu", forward, backward, lambda a: _why_not("rotary_fwd", a.x, "x"), _extra_bytes, infer
    )


def append_backend(op: Op) -> Backend:
    """Return the backend of append_kv."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if looks_at_values(a.query.device):
            check_positions(a)
        outputs = op.empty_outputs(a)
        if not a.key.numel():  # a query without heads is valid: the caches of nn write that way
            return tuple(e.copy_(r) for e, r in zip(outputs, op.reference(a)))
        if a.key_scale is not None:
            _append_eight_bits(a, outputs[0])
            return outputs
        work = work_dtype(a.query)
        torch.ops.pytransformer_C.append_kv.default(
            rows(a.query), rows(a.key), rows(a.value), a.key_cache, a.value_cache,
            plain(a.page_table, torch.int64),
            plain(a.positions, torch.int64),
            *(plain(t, work) for t in (a.cos, a.sin, a.q_norm, a.k_norm)), outputs[0],
            a.interleaved,
            a.eps, a.weight_offset,
        )  # fmt: skip
        return outputs

    return Backend("cpu", forward, lambda *_: [], lambda a: _why_not("append_kv", a.query, "query"))


def _append_eight_bits(a: Any, out: torch.Tensor) -> None:
    """Rotate query and key with the kernel; PyTorch quantizes and stores the rows."""
    key = torch.empty_like(a.key)
    for x, weight, to in ((a.query, a.q_norm, out), (a.key, a.k_norm, key)):
        if (a.cos is None and weight is None) or not x.numel():
            to.copy_(x)
            continue
        cos, sin, scaled = (plain(t, torch.float32) for t in (a.cos, a.sin, weight))
        torch.ops.pytransformer_C.rotary_fwd.default(
            rows(x), cos, sin, scaled, to, None, a.interleaved, a.eps, a.weight_offset
        )
    write_rows(a, key)


def _extra_bytes(a: Any) -> int:
    """Return backward's bytes: a row per thread and partial sums of the weight's gradient."""
    per_row = a.x.shape[3] * (8 if a.x.dtype == torch.float64 else 4)
    return 0 if a.weight is None else per_row * (256 + torch.get_num_threads())
