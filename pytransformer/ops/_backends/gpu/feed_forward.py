# SPDX-License-Identifier: Apache-2.0
"""Code of feed_forward that the GPU backends share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend, Recorded
from ..._core.tensors import as_written, matrix

Tensors = Sequence[torch.Tensor | None]


def why_not_columns(a: Any) -> str | None:
    """Return why dropout's mask cannot start at this column of hidden, or None.

    Threads draw for groups of 32 columns.
    """
    if a.dropout_p and a.column_start % 32:
        return f"dropout where column_start is a multiple of 32, got {a.column_start}"
    return None


def backend(
    name: str,
    op: Op,
    run_forward: Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], None],
    run_backward: Callable[
        [Any, torch.Tensor, Sequence[torch.Tensor], dict[str, torch.Tensor]], None
    ],
    why_not: Callable[[Any], str | None],
    recorded: Recorded,
) -> Backend:
    """Return the backend of feed_forward.

    - ``run_forward(a, out, pre, gate)`` writes out, (rows, d_out), and pre and gate if they are
      saved.
    - ``run_backward(a, d_out, saved, wanted)`` writes the gradients in ``wanted``, keyed by
      argument name; d_out and x's gradient are matrices.
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

    def backward(
        a: Any, grads: Tensors, saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Tensors:
        if _empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        (grad,) = grads
        assert grad is not None  # the gradient of the only output, always present
        results = op.empty_gradients(a, wanted)
        targets = by_name = {
            name: r for name, r in zip(op.differentiable, results) if r is not None
        }
        with as_written(a.x.device):
            if "x" in by_name:
                targets = by_name | {"x": _target(by_name["x"])}
            run_backward(a, matrix(grad.to(a.x.dtype)), saved, targets)
            if "x" in by_name:
                _copy_back(targets["x"], by_name["x"])
        return results

    return Backend(name, forward, backward, why_not, _hidden_bytes, recorded=recorded)


def _empty(a: Any) -> bool:
    """Return true if a product has no elements; plain PyTorch computes such a call."""
    return a.x.numel() == 0 or a.w1.numel() == 0 or a.w2.numel() == 0


def _target(t: torch.Tensor) -> torch.Tensor:
    """Return t as a matrix if it is contiguous, else a new matrix for _copy_back."""
    rows = math.prod(t.shape[:-1])
    return t.view(rows, -1) if t.is_contiguous() else t.new_empty(rows, t.shape[-1])


def _copy_back(matrix: torch.Tensor, t: torch.Tensor) -> None:
    if matrix.data_ptr() != t.data_ptr():
        t.copy_(matrix.view(t.shape))


def _hidden_bytes(a: Any) -> int:
    """Return the bytes of forward's hidden.

    Backward needs hidden, d_pre, d_gate, and with recompute pre and gate.
    """
    return math.prod(a.x.shape[:-1]) * a.w1.shape[0] * a.x.element_size()
