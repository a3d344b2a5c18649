# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of feed_forward, on csrc/cuda/feed_forward and csrc/cuda/matmul.

Our kernels compute GEMMs with an epilogue. cuBLAS computes plain GEMMs if ``use_cublas`` selects
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import matrix
from ..gpu import feed_forward as gpu
from . import library as cuda_library
from . import matmul as cuda_matmul
from .matmul import alloc_padded, bias_parts, gemm, operand, padded_bias, result


def backend(op: Op) -> Backend:
    """Return the backend of feed_forward."""
    return gpu.backend("cuda", op, _forward, _backward, why_not, cuda_library.recorded)


def why_not(a: Any) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    return cuda_matmul.why_not("hidden_fwd", a.x, *a.w1.shape, *a.w2.shape) or gpu.why_not_columns(
        a
    )


def _forward(a: Any, out: torch.Tensor, pre: torch.Tensor, gate: torch.Tensor) -> None:
    x = operand(matrix(a.x))
    hidden = alloc_padded(x, a.w1.shape[0])
    with (
        result(pre if a.save else None) as pre_to,
        result(gate if a.save and gate.numel() else None) as gate_to,
    ):
        _first_gemms(a, x, hidden, pre_to, gate_to)
    gemm(hidden[:, : a.w1.shape[0]], operand(matrix(a.w2)).t(), out, bias=a.b2)


def _backward(
    a: Any, d_out: torch.Tensor, saved: Sequence[torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    d_out = operand(d_out)
    if "b2" in wanted:
        wanted["b2"].copy_(d_out.sum(0, dtype=torch.float32))
    if wanted.keys() <= {"b2"}:
        return
    columns, gated = a.w1.shape[0], a.gate_weight is not None
    x = operand(matrix(a.x))

    def wide(needed: bool) -> torch.Tensor | None:
        return alloc_padded(x, columns) if needed else None

    if a.save:
        pre, gate = (operand(matrix(t)) if t.numel() else None for t in saved)
    else:
        pre_to, gate_to = wide(True), wide(gated)
        _first_gemms(a, x, None, pre_to, gate_to)
        pre, gate = (t if t is None else t[:, :columns] for t in (pre_to, gate_to))
    d_pre, hidden = wide(not wanted.keys().isdisjoint(("x", "w1"))), wide("w2" in wanted)
    d_gate = wide(gated and not wanted.keys().isdisjoint(("x", "gate_weight")))
    height = bias_parts(x.shape[0])
    partials: dict[str, torch.Tensor] = {
        n: torch.empty(height, columns, device=x.device) for n in ("b1", "gate_bias") if n in wanted
    }
    cuda_library.call(
        "hidden_bwd", x.device, d_out, operand(matrix(a.w2)), pre, gate, a.dropout_seed, d_pre,
        d_gate, hidden,
        partials.get("b1"), partials.get("gate_bias"), _activation(a), a.row_start, a.column_start,
        a.dropout_p,
    )  # fmt: skip
    for name, part in partials.items():
        wanted[name].copy_(part.sum(0))
    d_pre, d_gate, hidden = (t if t is None else t[:, :columns] for t in (d_pre, d_gate, hidden))
    if "x" in wanted:
        assert d_pre is not None
        gate_weight = operand(matrix(a.gate_weight)) if gated else None
        gemm(d_pre, operand(matrix(a.w1)), wanted["x"], d_gate, gate_weight)
    for name, rows, values in (("w1", d_pre, x), ("gate_weight", d_gate, x), ("w2", d_out, hidden)):
        if name in wanted:
            assert rows is not None and values is not None
            gemm(rows.t(), values, wanted[name])


def _first_gemms(
    a: Any,
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    pre: torch.Tensor | None,
    gate: torch.Tensor | None,
) -> None:
    """Write hidden, pre and gate, if not None."""
    w1, gate_weight = (w if w is None else operand(matrix(w)).t() for w in (a.w1, a.gate_weight))
    cuda_library.call(
        "hidden_fwd", x.device, x, w1, gate_weight, padded_bias(a.b1), padded_bias(a.gate_bias),
        a.dropout_seed, hidden, pre, gate,
        _activation(a), a.row_start, a.column_start, a.dropout_p,
    )  # fmt: skip


def _activation(a: Any) -> int:
    return cuda_library.ask("feed_forward_activations").index(a.activation)
