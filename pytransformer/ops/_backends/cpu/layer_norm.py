"""The backend ``cpu`` of layer_norm, rms_norm and add_norm: csrc/cpu/layer_norm.cpp called with tensors allocated here.

How the kernels see tensors of rows is in ops/_problem/layer_norm.py; a contiguous tensor goes there as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.registry import WRONG_DEVICE, Backend, Op
from ..._core.tensors import empty_in_order
from ..._problem.layer_norm import NORM_SPECS, Grid, copy_back

BLOCK_BYTES = 32 << 20  # partial sums of dweight and dbias are kept below about this


def backend(op: Op) -> Backend:
    """The backend of one of the ops in NORM_SPECS."""
    spec, plain = NORM_SPECS[op.name], op.name != "add_norm"

    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        if (reason := native.why_not("layer_norm_fwd")) is not None:
            return reason
        residual = None if plain else a.residual
        if residual is not None and (residual.dtype == torch.float64) != (a.x.dtype == torch.float64):
            return f"x and residual both float64 or neither, got {a.x.dtype} and {residual.dtype}"
        return None

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        out, residual_out, mean, rstd = spec.outputs(*outputs)
        residual, bias, seed, p, rms = spec.optional(a)
        grid, work = Grid(a.x, a.dims), work_dtype(a.x)
        to, stream = grid.target(out), grid.target(residual_out)
        raw("layer_norm_fwd")(
            grid.rows(a.x), grid.rows(residual), vector(a.weight, work), vector(bias, work), seed,
            to, stream, None if rms else mean, rstd, grid.outer, grid.columns, a.eps, p, rms,
        )  # fmt: skip
        copy_back(to, out)
        copy_back(stream, residual_out)
        return outputs

    def infer(a: Any) -> tuple[torch.Tensor, ...]:
        """Without statistics and, where nothing has to be rearranged or converted, without looking for how."""
        x, (residual, bias, seed, p, rms) = a.x, spec.optional(a)
        plain_stream = plain or (residual is not None and residual.is_contiguous())
        work = work_dtype(x)
        if not (plain_stream and x.is_contiguous() and ready(a.weight, work) and ready(bias, work) and x.numel()):
            return forward(a)[: 1 if plain else 2]
        out, stream = empty_in_order(x), None if plain else empty_in_order(residual)
        columns = x.shape[-1] if a.dims == 1 else math.prod(x.shape[-a.dims :])
        raw("layer_norm_fwd")(x, residual, a.weight, bias, seed, out, stream, None, None, 1, columns, a.eps, p, rms)
        return (out,) if stream is None else (out, stream)

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        h, mean, rstd = spec.saved(a, *saved)
        dx, dresidual, dweight, dbias = spec.gradients(*results)
        _, _, seed, p, rms = spec.optional(a)
        grid, work = Grid(h, a.dims), work_dtype(a.x)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0].to(a.x.dtype)
        d_stream = None if plain or grads[1] is None else grads[1].to(h.dtype)
        rows = [grid.target(t) for t in (dx, dresidual)]
        sums = [t if ready(t, work) else t.new_empty(t.shape, dtype=work) for t in (dweight, dbias)]
        raw("layer_norm_bwd")(
            grid.rows(d_out), grid.rows(d_stream), grid.rows(h), vector(a.weight, work), None if rms else mean, rstd, seed,
            *rows, *sums, grid.outer, grid.columns, p, rms,
        )  # fmt: skip
        for source, result in zip((*rows, *sums), (dx, dresidual, dweight, dbias)):
            copy_back(source, result)
        return results

    return Backend("cpu", forward, backward, why_not, _extra_bytes, infer)


@functools.cache
def raw(name: str) -> Callable[..., None]:
    """A raw op of the native library, which is loaded by now."""
    return getattr(torch.ops.pytransformer_C, name).default


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def ready(t: torch.Tensor | None, work: torch.dtype) -> bool:
    """Whether the kernels can take t, a vector or a vector's gradient, as it is."""
    return t is None or (t.dtype == work and t.is_contiguous())


def vector(t: torch.Tensor | None, work: torch.dtype) -> torch.Tensor | None:
    return t if t is None or ready(t, work) else t.to(work).contiguous()


def _extra_bytes(a: Any) -> int:
    """A cached row for each thread; in backward the partial sums of the parameters' gradients."""
    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    rows = a.x.numel() // max(1, columns)
    size = 8 if a.x.dtype == torch.float64 else 4
    blocks = max(1, min(-(-rows // 64), 256, max(8, (BLOCK_BYTES >> 3) // max(1, columns))))
    return size * columns * (torch.get_num_threads() + 2 * blocks)
