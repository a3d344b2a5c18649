# SPDX-License-Identifier: Apache-2.0
"""What the GPU backends of feed_forward share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.backend import Recorded
from ..._core.registry import Backend, Op
from ..._core.tensors import as_written, matrix

Tensors = Sequence[torch.Tensor | None]


def why_not_columns(a: Any) -> str | None:
    """Why dropout's mask cannot begin at this column of hidden, or None: lanes draw for groups of 32 columns."""
    if a.dropout_p and a.column_start % 32:
        return f"dropout where column_start is a multiple of 32, got {a.column_start}"
    return None


def backend(
    name: str,
    op: Op,
    run_forward: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], None],
    run_backward: Callable[[Any, torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]], None],
    why_not: Callable[[Any], str | None],
    recorded: Recorded,
) -> Backend:
    """The backend of feed_forward.

    run_forward(a, out, pre, gate): write out, (rows, d_out), and, if they are kept, pre and gate.
    run_backward(a, d_out, saved, wanted): write the gradients that ``wanted`` has, by the names of the op's arguments; d_out and that
    of x are matrices.
    """

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if _empty(a):
            return op.backends["reference"].forward(a)
        out, pre, gate = op.empty_outputs(a)
        with as_written(a.x.device):
            to = _target(out)
            run_forward(a, to, pre, gate)
            _copy_back(to, out)
        return out, pre, gate

    def backward(a: Any, grads: Tensors, saved: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Tensors:
        if _empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        (grad,) = grads
        assert grad is not None  # the only output's: without it nothing calls backward
        results = op.empty_gradients(a, wanted)
        targets = by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
        with as_written(a.x.device):
            if "x" in by_name:
                targets = by_name | {"x": _target(by_name["x"])}
            run_backward(a, matrix(grad.to(a.x.dtype)), saved, targets)
            if "x" in by_name:
                _copy_back(targets["x"], by_name["x"])
        return results

    return Backend(name, forward, backward, why_not, _hidden_bytes, recorded=recorded)


def _empty(a: Any) -> bool:
    """A product over nothing: left to plain PyTorch, which does nothing either."""
    return a.x.numel() == 0 or a.w1.numel() == 0 or a.w2.numel() == 0


def _target(t: torch.Tensor) -> torch.Tensor:
    """t as a matrix if it is contiguous, else one of its own for _copy_back to copy."""
    rows = math.prod(t.shape[:-1])
    return t.view(rows, -1) if t.is_contiguous() else t.new_empty(rows, t.shape[-1])


def _copy_back(matrix: torch.Tensor, t: torch.Tensor) -> None:
    if matrix.data_ptr() != t.data_ptr():
        t.copy_(matrix.view(t.shape))


def _hidden_bytes(a: Any) -> int:
    """Forward: hidden. (Backward: hidden, d_pre, d_gate, and with recompute pre and gate.)"""
    return math.prod(a.x.shape[:-1]) * a.w1.shape[0] * a.x.element_size()
