"""The backend ``cuda`` of layer_norm, rms_norm and add_norm: csrc/cuda/layer_norm called with tensors allocated here.

The kernels see tensors of rows as those of the backend ``cpu`` do; weights and their gradients they take in any of their dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..._core.registry import Backend, Op
from ..._problem.layer_norm import NORM_SPECS, Grid, copy_back
from . import library as cuda_library

MOST_COLUMNS = 2**31 - 1
MOST_BLOCKS = 132 * 4  # of a persistent backward kernel, about; csrc/cuda/layer_norm/plan.h


def backend(op: Op) -> Backend:
    """The backend of one of the ops in NORM_SPECS."""
    spec, plain = NORM_SPECS[op.name], op.name != "add_norm"

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        out, residual_out, mean, rstd = spec.outputs(*outputs)
        residual, bias, seed, p, rms = spec.optional(a)
        grid = Grid(a.x, a.dims)
        to, stream = grid.target(out), grid.target(residual_out)
        cuda_library.call(
            "layer_norm_fwd", a.x.device, grid.rows(a.x), grid.rows(residual), _flat(a.weight), _flat(bias), seed,
            to, stream, None if rms else mean, rstd, grid.outer, grid.columns, a.eps, p, rms,
        )  # fmt: skip
        copy_back(to, out)
        copy_back(stream, residual_out)
        return outputs

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        h, mean, rstd = spec.saved(a, *saved)
        dx, dresidual, dweight, dbias = spec.gradients(*results)
        _, _, seed, p, rms = spec.optional(a)
        grid = Grid(h, a.dims)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0].to(a.x.dtype)
        d_stream = None if plain or grads[1] is None else grads[1].to(h.dtype)
        rows = [grid.target(t) for t in (dx, dresidual)]
        sums = [t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in (dweight, dbias)]
        cuda_library.call(
            "layer_norm_bwd", a.x.device, grid.rows(d_out), grid.rows(d_stream), grid.rows(h), _flat(a.weight),
            None if rms else _flat(mean), _flat(rstd), seed, *rows, *sums, grid.outer, grid.columns, p, rms,
        )  # fmt: skip
        for source, result in zip((*rows, *sums), (dx, dresidual, dweight, dbias)):
            copy_back(source, result)
        return results

    return Backend("cuda", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := cuda_library.why_not("layer_norm_fwd", a.x.device)) is not None:
        return reason
    for name in ("x", "residual", "weight", "bias"):
        t = getattr(a, name, None)
        if t is not None and t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"float32, bfloat16 or float16, got {name} in {str(t.dtype).removeprefix('torch.')}; the backend reference has it"
    if (columns := math.prod(a.x.shape[a.x.dim() - a.dims :])) > MOST_COLUMNS:
        return f"rows of at most {MOST_COLUMNS:,} numbers, got {columns:,}"
    return None


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def _extra_bytes(a: Any) -> int:
    """The partial sums of dweight and dbias."""
    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    return 2 * 4 * columns * min(a.x.numel() // max(1, columns), MOST_BLOCKS)
