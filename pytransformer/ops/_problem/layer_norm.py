"""What the backends of layer_norm, rms_norm and add_norm share: the three ops as one, and tensors of rows as kernels see them.

Every tensor of rows is (outer, inner, columns) with contiguous columns. Two strides for the rows are enough for a (B, L, C) view
of (L, B, C) memory, so that is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class NormSpec(NamedTuple):
    """What one of the three ops is in terms of the most general, add_norm."""

    optional: Callable[[Any], tuple[Any, Any, Any, float, bool]]  # residual, bias, dropout_seed, dropout_p, rms
    outputs: Callable[..., tuple[Any, ...]]  # its outputs as (out, residual_out, mean, rstd)
    saved: Callable[..., tuple[Any, ...]]  # arguments and what backward gets back as (what was normalized, mean, rstd)
    gradients: Callable[..., tuple[Any, ...]]  # one thing for each differentiable argument as (x, residual, weight, bias)


NORM_SPECS = {
    "layer_norm": NormSpec(
        lambda a: (None, a.bias, None, 0.0, False),
        lambda out, mean, rstd: (out, None, mean, rstd),
        lambda a, mean, rstd: (a.x, mean, rstd),
        lambda x, weight, bias: (x, None, weight, bias),
    ),
    "rms_norm": NormSpec(
        lambda a: (None, None, None, 0.0, True),
        lambda out, rstd: (out, None, None, rstd),
        lambda a, rstd: (a.x, None, rstd),
        lambda x, weight: (x, None, weight, None),
    ),
    "add_norm": NormSpec(
        lambda a: (a.residual, a.bias, a.dropout_seed, a.dropout_p, a.rms),
        lambda out, residual_out, mean, rstd: (out, residual_out, mean, rstd),
        lambda a, residual_out, mean, rstd: (residual_out, mean, rstd),
        lambda x, residual, weight, bias: (x, residual, weight, bias),
    ),
}


class Grid:
    """How a problem's tensors are seen as (outer, inner, columns): the leading dimensions are cut where x's strides break."""

    def __init__(self, x: torch.Tensor, dims: int) -> None:
        shape, lead, cut = x.shape, x.dim() - dims, 0
        if not x.is_contiguous():
            cut = next((d for d in range(1, lead) if x.stride(d - 1) != x.stride(d) * shape[d]), 0)
        self.outer, self.columns = math.prod(shape[:cut]), math.prod(shape[lead:])
        self.inner = shape[cut:lead]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer, math.prod(self.inner), self.columns

    def rows(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """A view where the strides allow it, else a copy."""
        if t is None or t.is_contiguous():
            return t
        t = t.reshape(self.shape)
        return t if t.stride(2) == 1 or self.columns <= 1 else t.contiguous()

    def target(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """The view to write t through, or where its strides allow none, a new tensor for copy_back to read."""
        if t is None or t.is_contiguous():
            return t
        try:
            view = t.view(self.shape)
        except RuntimeError:
            return t.new_empty(self.shape)
        return view if view.stride(2) == 1 or self.columns <= 1 else t.new_empty(self.shape)


def copy_back(source: torch.Tensor | None, t: torch.Tensor | None) -> None:
    """Copy what was computed elsewhere, or in another dtype, to where it is wanted."""
    if source is t or source is None or t is None:
        return
    if source.data_ptr() != t.data_ptr():
        t.copy_(source.view(t.shape))
