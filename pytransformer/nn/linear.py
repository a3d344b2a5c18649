# SPDX-License-Identifier: Apache-2.0
"""``x Wᵀ + b`` for few rows of x on the CPU, as in decoding, where reading W dominates the time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..ops._backends.cpu.feed_forward import FEW_ROWS, linear_of_few_rows
from ..ops._core import fast_path
from ..ops._core.autograd import needs_gradient, unwatched

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, as :func:`torch.nn.functional.linear`.

    Up to 8 rows on the CPU without gradient run our kernel, which reads the weights once, in order.
    PyTorch's library reads them at a third to two thirds of that rate (docs/design/numerics.md).
    Each element is one sum along k in float32 (float64 for float64), rounded once. Its order
    depends on k and on the layout of the weights only.

    Args:
        x: (..., k).
        weight: (n, k), contiguous or the transpose of a contiguous (k, n).
        bias: (n,) or None.
    """
    found = of_few_rows(x, weight, bias)
    return F.linear(x, weight, bias) if found is None else found


def of_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, along_k: bool = False
) -> torch.Tensor | None:
    """Return :func:`linear` if the kernel supports the call, else None.

    Args:
        along_k: weight is (k, n), as in ``Conv1D`` of transformers.
    """
    if torch.compiler.is_compiling():
        return None
    found = fast_path.linear(x, weight, bias, along_k)
    if found is not NotImplemented:
        return found
    weight = weight.t() if along_k else weight
    return (
        linear_of_few_rows(x, weight, bias) if _few_rows_of_plain_numbers(x, weight, bias) else None
    )


def _few_rows_of_plain_numbers(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Return whether the kernel supports the call.

    It requires few rows, the CPU, one dtype and layout, and no gradient, tracing or dispatch mode.
    """
    return (
        x.device.type == "cpu"
        and weight.dim() == 2
        and 0 < x.numel() <= FEW_ROWS * weight.shape[1]
        and unwatched(x, (x, weight, bias))
        and x.shape[-1:] == weight.shape[1:]
        and x.dtype == weight.dtype
        and x.dtype in _DTYPES
        and x.layout == weight.layout == torch.strided
        and weight.numel() > 0
        and (bias is None or (bias.dtype == x.dtype and bias.shape == weight.shape[:1]))
        and (weight.is_contiguous() or weight.stride() == (1, weight.shape[0]))
        and not torch.is_autocast_enabled("cpu")
        and not needs_gradient(x, weight, bias)
        and weight.device == x.device
        and (bias is None or bias.device == x.device)
    )


class Linear(nn.Linear):
    """``torch.nn.Linear`` with the same weights and names, computed by :func:`linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)
