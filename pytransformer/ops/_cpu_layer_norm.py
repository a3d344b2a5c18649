"""The backend ``cpu`` of layer_norm, rms_norm and add_norm: csrc/cpu/layer_norm.cpp called with tensors allocated here.

The kernels see every tensor of rows as (outer, inner, columns) with contiguous columns. Two strides for the rows are enough
for a (B, L, C) view of (L, B, C) memory, so that is not copied. A contiguous tensor goes there as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import _native
from ._registry import WRONG_DEVICE, Backend, Op

BLOCK_BYTES = 32 << 20  # partial sums of dweight and dbias are kept below about this


class Form(NamedTuple):
    """What one of the three ops is in terms of the most general, add_norm."""

    optional: Callable[[Any], tuple[Any, Any, Any, float, bool]]  # residual, bias, dropout_seed, dropout_p, rms
    outputs: Callable[..., tuple[Any, ...]]  # its outputs as (out, residual_out, mean, rstd)
    saved: Callable[..., tuple[Any, ...]]  # arguments and what backward gets back as (what was normalized, mean, rstd)
    gradients: Callable[..., tuple[Any, ...]]  # one thing for each differentiable argument as (x, residual, weight, bias)


FORMS = {
    "layer_norm": Form(
        lambda a: (None, a.bias, None, 0.0, False),
        lambda out, mean, rstd: (out, None, mean, rstd),
        lambda a, mean, rstd: (a.x, mean, rstd),
        lambda x, weight, bias: (x, None, weight, bias),
    ),
    "rms_norm": Form(
        lambda a: (None, None, None, 0.0, True),
        lambda out, rstd: (out, None, None, rstd),
        lambda a, rstd: (a.x, None, rstd),
        lambda x, weight: (x, None, weight, None),
    ),
    "add_norm": Form(
        lambda a: (a.residual, a.bias, a.dropout_seed, a.dropout_p, a.rms),
        lambda out, residual_out, mean, rstd: (out, residual_out, mean, rstd),
        lambda a, residual_out, mean, rstd: (residual_out, mean, rstd),
        lambda x, residual, weight, bias: (x, residual, weight, bias),
    ),
}


def backend(op: Op) -> Backend:
    """The backend of one of the ops in FORMS."""
    form, plain = FORMS[op.name], op.name != "add_norm"

    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        if (reason := _native.why_not("norm_fwd")) is not None:
            return reason
        residual = None if plain else a.residual
        if residual is not None and (residual.dtype == torch.float64) != (a.x.dtype == torch.float64):
            return f"x and residual both float64 or neither, got {a.x.dtype} and {residual.dtype}"
        return None

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        out, residual_out, mean, rstd = form.outputs(*outputs)
        residual, bias, seed, p, rms = form.optional(a)
        grid, work = Grid(a.x, a.dims), work_dtype(a.x)
        to, stream = grid.target(out), grid.target(residual_out)
        torch.ops.pytransformer_C.norm_fwd.default(
            grid.rows(a.x), grid.rows(residual), vector(a.weight, work), vector(bias, work), seed,
            to, stream, None if rms else mean, rstd, grid.outer, grid.columns, a.eps, p, rms,
        )  # fmt: skip
        deliver(to, out)
        deliver(stream, residual_out)
        return outputs

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        h, mean, rstd = form.saved(a, *saved)
        dx, dresidual, dweight, dbias = form.gradients(*results)
        _, _, seed, p, rms = form.optional(a)
        grid, work = Grid(h, a.dims), work_dtype(a.x)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0].to(a.x.dtype)
        d_stream = None if plain or grads[1] is None else grads[1].to(h.dtype)
        rows = [grid.target(t) for t in (dx, dresidual)]
        sums = [None if t is None else t if ready(t, work) else t.new_empty(t.shape, dtype=work) for t in (dweight, dbias)]
        torch.ops.pytransformer_C.norm_bwd.default(
            grid.rows(d_out), grid.rows(d_stream), grid.rows(h), vector(a.weight, work), None if rms else mean, rstd, seed,
            *rows, *sums, grid.outer, grid.columns, p, rms,
        )  # fmt: skip
        for source, result in zip((*rows, *sums), (dx, dresidual, dweight, dbias)):
            deliver(source, result)
        return results

    return Backend("cpu", forward, backward, why_not, _extra_bytes)


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def ready(t: torch.Tensor, work: torch.dtype) -> bool:
    return t.dtype == work and t.is_contiguous()


def vector(t: torch.Tensor | None, work: torch.dtype) -> torch.Tensor | None:
    return t if t is None or ready(t, work) else t.to(work).contiguous()


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
        """The view to write t through, or where its strides allow none, a new tensor to be delivered."""
        if t is None or t.is_contiguous():
            return t
        try:
            view = t.view(self.shape)
        except RuntimeError:
            return t.new_empty(self.shape)
        return view if view.stride(2) == 1 or self.columns <= 1 else t.new_empty(self.shape)


def deliver(source: torch.Tensor | None, t: torch.Tensor | None) -> None:
    """Copy what was computed elsewhere, or in another dtype, to where it is wanted."""
    if source is not t and source.data_ptr() != t.data_ptr():
        t.copy_(source.view(t.shape))


def _extra_bytes(a: Any) -> int:
    """A cached row for each thread; in backward the partial sums of the parameters' gradients."""
    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    rows = a.x.numel() // max(1, columns)
    size = 8 if a.x.dtype == torch.float64 else 4
    blocks = max(1, min(-(-rows // 64), 256, max(8, (BLOCK_BYTES >> 3) // max(1, columns))))
    return size * columns * (torch.get_num_threads() + 2 * blocks)
