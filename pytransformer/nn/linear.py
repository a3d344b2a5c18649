# SPDX-License-Identifier: Apache-2.0
"""``x Wᵀ + b`` on the CPU by our product where it is faster than PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..ops._backends.cpu import linear as cpu
from ..ops._core import fast_path
from ..ops._core.autograd import needs_gradient, untransformed
from . import packed

# Min multiply-adds of a call with a gradient: our autograd Function costs a call 15 us more.
TRAINING_WORK = 1 << 22


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as :func:`torch.nn.functional.linear`.

    Our kernels compute it on the CPU where they are faster (docs/linear.md). With up to 8 rows and
    no gradient they read the weights once on every CPU. Each element is one sum along k in float32
    (float64 for float64), rounded once. Its order depends on k, on the layout of the weights and on
    whether there are more than 8 rows.

    Args:
        x: (..., k).
        weight: (n, k), contiguous or the transpose of a contiguous (k, n).
        bias: (n,) or None.
    """
    found = fast_linear(x, weight, bias)
    return F.linear(x, weight, bias) if found is None else found


def fast_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, along_k: bool = False
) -> torch.Tensor | None:
    """Return :func:`linear` if our kernels compute the call, else None.

    Args:
        along_k: weight is (k, n), as in ``Conv1D`` of transformers.
    """
    if torch.compiler.is_compiling():
        return None
    limits = cpu.faster().get(x.dtype)
    if limits is None:
        return None
    panels, max_rows = None, limits.inference
    if packed.weights and id(weight) in packed.weights:
        panels = _panels(x, weight, bias, limits, along_k)
        max_rows = max_rows if panels is None else limits.packed
    found = fast_path.entries.linear(x, weight, bias, panels, max_rows, along_k)
    if found is not NotImplemented:
        return found
    weight = weight.t() if along_k else weight
    if not _plain_numbers(x, weight, bias, max(limits)):
        return None
    rows = x.numel() // weight.shape[1]
    if not needs_gradient(x, weight, bias):
        return cpu.forward(x, weight, bias, panels) if rows <= max_rows else None
    if rows > limits.training or rows * weight.numel() < TRAINING_WORK:
        return None
    return LinearFunction.apply(x, weight, bias)


def _panels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    limits: cpu.MaxRows,
    along_k: bool,
) -> torch.Tensor | None:
    """Return the packed weight if the call can use it, else None."""
    k = x.shape[-1] if x.dim() else 1
    if not limits.unpacked * k < x.numel() <= limits.packed * k:
        return None
    if not untransformed(x, (x, weight, bias)) or needs_gradient(x, weight, bias):
        return None
    return packed.panels_of(weight, along_k)


def _plain_numbers(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int
) -> bool:
    """Return whether the kernels support the call of up to max_rows rows.

    They require the CPU, one dtype and layout, and no tracing, transform or dispatch mode.
    """
    return (
        x.device.type == "cpu"
        and weight.dim() == 2
        and 0 < x.numel() <= max_rows * weight.shape[1]
        and untransformed(x, (x, weight, bias))
        and x.shape[-1:] == weight.shape[1:]
        and x.dtype == weight.dtype
        and x.layout == weight.layout == torch.strided
        and weight.numel() > 0
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and (weight.is_contiguous() or weight.stride() == (1, weight.shape[0]))
        and not torch.is_autocast_enabled("cpu")
        and weight.device == x.device
        and (bias is None or bias.device == x.device)
    )


class LinearFunction(torch.autograd.Function):
    """Our product, forward and backward. A derivative of the gradients is PyTorch's."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return cpu.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (d_out,) = grads
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if not torch.is_grad_enabled() and untransformed(d_out, (d_out, x, weight)):
            return cpu.backward(d_out, x, weight, needed)
        rows = d_out.reshape(-1, weight.shape[0])
        return (
            d_out @ weight if needed[0] else None,
            rows.t() @ x.reshape(-1, weight.shape[1]) if needed[1] else None,
            rows.sum(0) if needed[2] else None,
        )


class Linear(nn.Linear):
    """``torch.nn.Linear`` with the same weights and names, computed by :func:`linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)
