# SPDX-License-Identifier: Apache-2.0
"""Lowering that the backends of layer_norm, rms_norm and add_norm share.

The three ops lower to one. Every tensor of rows is (outer, inner, columns) with contiguous columns.
Two row strides describe a (B, L, C) view of (L, B, C) memory, so it needs no copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from .._core.op import Op

Maybe = TypeVar("Maybe", torch.Tensor, torch.Tensor | None)


class NormSpec(NamedTuple):
    """One of the three ops in terms of the general one, add_norm."""

    # residual, bias, dropout_seed, row_start, dropout_p, rms
    optional: Callable[[Any], tuple[Any, Any, Any, int, float, bool]]
    outputs: Callable[..., tuple[Any, ...]]  # outputs as (out, residual_out, mean, rstd)
    # arguments and saved tensors as (normalized tensor, mean, rstd)
    saved: Callable[..., tuple[Any, ...]]
    # gradients of the differentiable arguments as (x, residual, weight, bias)
    gradients: Callable[..., tuple[Any, ...]]


NORM_SPECS = {
    "layer_norm": NormSpec(
        lambda a: (None, a.bias, None, 0, 0.0, False),
        lambda out, mean, rstd: (out, None, mean, rstd),
        lambda a, mean, rstd: (a.x, mean, rstd),
        lambda x, weight, bias: (x, None, weight, bias),
    ),
    "rms_norm": NormSpec(
        lambda a: (None, None, None, 0, 0.0, True),
        lambda out, rstd: (out, None, None, rstd),
        lambda a, rstd: (a.x, None, rstd),
        lambda x, weight: (x, None, weight, None),
    ),
    "add_norm": NormSpec(
        lambda a: (a.residual, a.bias, a.dropout_seed, a.row_start, a.dropout_p, a.rms),
        lambda out, residual_out, mean, rstd: (out, residual_out, mean, rstd),
        lambda a, residual_out, mean, rstd: (residual_out, mean, rstd),
        lambda x, residual, weight, bias: (x, residual, weight, bias),
    ),
}


class Grid:
    """The (outer, inner, columns) view of a problem's tensors.

    The leading dimensions are split at a break in x's strides.
    """

    def __init__(self, x: torch.Tensor, dims: int) -> None:
        shape, lead, cut = x.shape, x.dim() - dims, 0
        if not x.is_contiguous():
            cut = next((d for d in range(1, lead) if x.stride(d - 1) != x.stride(d) * shape[d]), 0)
        self.outer, self.columns = math.prod(shape[:cut]), math.prod(shape[lead:])
        self.inner = shape[cut:lead]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.outer, math.prod(self.inner), self.columns

    def rows(self, t: Maybe) -> Maybe:
        """Return a view if the strides permit one, else a copy."""
        if t is None or t.is_contiguous():
            return t
        t = t.reshape(self.shape)
        return t if t.stride(2) == 1 or self.columns <= 1 else t.contiguous()

    def target(self, t: Maybe) -> Maybe:
        """Return a view to write t through, or a new tensor that copy_back reads."""
        if t is None or t.is_contiguous():
            return t
        try:
            view = t.view(self.shape)
        except RuntimeError:
            return t.new_empty(self.shape)
        return view if view.stride(2) == 1 or self.columns <= 1 else t.new_empty(self.shape)


def copy_back(source: torch.Tensor | None, t: torch.Tensor | None) -> None:
    """Copy ``source`` into ``t`` if it is another tensor."""
    if source is t or source is None or t is None:
        return
    if source.data_ptr() != t.data_ptr():
        t.copy_(source.view(t.shape))


def ready(t: torch.Tensor | None, dtype: torch.dtype | None) -> bool:
    """Return true if kernels accept t, a vector or its gradient, without a copy.

    Kernels require ``dtype``, or accept any dtype if it is None.
    """
    return t is None or (dtype in (None, t.dtype) and t.is_contiguous())


def _vector(t: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return t if t is None or ready(t, dtype) else t.to(dtype or t.dtype).contiguous()


def _sums(t: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Return t, or a new tensor that copy_back reads, as the target of a vector's gradient."""
    return t if t is None or ready(t, dtype) else t.new_empty(t.shape, dtype=dtype)


# ---- lowered calls


class NormForward(NamedTuple):
    """h = residual + dropout(x); out = norm(h). The tensors are (outer, inner, columns)."""

    grid: Grid
    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    seed: torch.Tensor | None
    out: torch.Tensor
    residual_out: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    row_start: int
    eps: float
    dropout_p: float
    rms: bool


class NormBackward(NamedTuple):
    """Gradients of NormForward, None if not needed; h is residual_out, or x in a plain norm."""

    grid: Grid
    d_out: torch.Tensor
    d_residual_out: torch.Tensor | None
    h: torch.Tensor
    weight: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    seed: torch.Tensor | None
    dx: torch.Tensor | None
    d_residual: torch.Tensor | None
    d_weight: torch.Tensor | None
    d_bias: torch.Tensor | None
    row_start: int
    dropout_p: float
    rms: bool


def any_dtype(x: torch.Tensor) -> None:
    """Return None, for kernels that accept vectors of any dtype."""


def lowered_forward(
    op: Op,
    run: Callable[[NormForward], None],
    vector_dtype: Callable[[torch.Tensor], torch.dtype | None] = any_dtype,
) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """Return a backend's forward from the function that launches its kernel.

    ``vector_dtype`` returns the dtype of weight and bias for x, or None for any.
    """
    spec = NORM_SPECS[op.name]

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        out, residual_out, mean, rstd = spec.outputs(*outputs)
        residual, bias, seed, start, p, rms = spec.optional(a)
        grid, dtype = Grid(a.x, a.dims), vector_dtype(a.x)
        targets = (grid.target(out), grid.target(residual_out))
        run(
            NormForward(
                grid, grid.rows(a.x), grid.rows(residual), _vector(a.weight, dtype),
                _vector(bias, dtype), seed, *targets,
                None if rms else mean, rstd, start, a.eps, p, rms,
            )
        )  # fmt: skip
        for target, result in zip(targets, (out, residual_out)):
            copy_back(target, result)
        return outputs

    return forward


def lowered_backward(
    op: Op,
    run: Callable[[NormBackward], None],
    vector_dtype: Callable[[torch.Tensor], torch.dtype | None] = any_dtype,
) -> Callable[..., list[torch.Tensor | None]]:
    """Return a backend's backward from the function that launches its kernel.

    The kernel writes the gradients of weight and bias in ``vector_dtype``.
    """
    spec, plain = NORM_SPECS[op.name], op.name != "add_norm"

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        h, mean, rstd = spec.saved(a, *saved)
        dx, d_residual, d_weight, d_bias = spec.gradients(*results)
        _, _, seed, start, p, rms = spec.optional(a)
        grid, dtype = Grid(h, a.dims), vector_dtype(a.x)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0].to(a.x.dtype)
        d_residual_out = None if plain or grads[1] is None else grads[1].to(h.dtype)
        rows = (grid.target(dx), grid.target(d_residual))
        sums = (_sums(d_weight, dtype), _sums(d_bias, dtype))
        run(
            NormBackward(
                grid, grid.rows(d_out), grid.rows(d_residual_out), grid.rows(h),
                _vector(a.weight, dtype),
                None if rms else _vector(mean, None), rstd.contiguous(), seed, *rows, *sums, start,
                p, rms,
            )
        )  # fmt: skip
        for target, result in zip((*rows, *sums), (dx, d_residual, d_weight, d_bias)):
            copy_back(target, result)
        return results

    return backward
