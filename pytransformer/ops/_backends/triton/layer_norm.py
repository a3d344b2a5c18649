"""The backend ``triton`` of layer_norm, rms_norm and add_norm: kernels/layer_norm called with tensors allocated here.

How the kernels see tensors of rows is in ops/_problem/layer_norm.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..._core.registry import Backend, Op
from ..._problem.layer_norm import NORM_SPECS, Grid, copy_back
from . import availability


def backend(op: Op) -> Backend:
    """The backend of one of the ops in NORM_SPECS."""
    spec, plain = NORM_SPECS[op.name], op.name != "add_norm"

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.layer_norm.fwd import forward as run

        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        out, residual_out, mean, rstd = spec.outputs(*outputs)
        residual, bias, seed, p, rms = spec.optional(a)
        grid = Grid(a.x, a.dims)
        targets = [grid.target(t) for t in (out, residual_out)]
        run(
            _rows(grid, a.x), _rows(grid, residual), _flat(a.weight), _flat(bias), *(_view(grid, t) for t in targets),
            None if rms else mean, rstd, eps=a.eps, rms=rms, seed=seed, dropout_p=p,
        )  # fmt: skip
        for target, result in zip(targets, (out, residual_out)):
            copy_back(target, result)
        return outputs

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        from pytransformer.kernels.layer_norm.bwd import backward as run

        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        h, mean, rstd = spec.saved(a, *saved)
        dx, d_residual, d_weight, d_bias = spec.gradients(*results)
        _, _, seed, p, rms = spec.optional(a)
        grid = Grid(h, a.dims)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0]
        d_residual_out = None if plain else grads[1]
        rows = [grid.target(t) for t in (dx, d_residual)]
        sums = [t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in (d_weight, d_bias)]
        run(
            _rows(grid, d_out), _rows(grid, d_residual_out), _rows(grid, h), _flat(a.weight), None if rms else _flat(mean), _flat(rstd),
            *(_view(grid, t) for t in rows), *map(_flat, sums), rms=rms, seed=seed, dropout_p=p,
        )  # fmt: skip
        for target, result in zip((*rows, *sums), (dx, d_residual, d_weight, d_bias)):
            copy_back(target, result)
        return results

    return Backend("triton", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := availability.why_not(x=a.x, residual=getattr(a, "residual", None))) is not None:
        return reason
    if (columns := math.prod(a.x.shape[a.x.dim() - a.dims :])) >= 1 << 30:
        return f"rows of fewer than {1 << 30:,} numbers, got {columns:,}"
    return None


def _rows(grid: Grid, t: torch.Tensor | None) -> torch.Tensor | None:
    return _view(grid, grid.rows(t))


def _view(grid: Grid, t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.view(grid.shape)


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    """In one dimension and contiguous: the tensor's own memory if it is that already."""
    return None if t is None else t.reshape(-1).contiguous()


def _extra_bytes(a: Any) -> int:
    """In backward, the parts of the parameters' gradients: two rows of float32 for each program."""
    from pytransformer.kernels.layer_norm.configs import BLOCKS, programs, tile

    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    config, wide = tile(columns, a.x.element_size(), a.x.device, backward=True)
    rows = a.x.numel() // max(1, columns)
    return 8 * columns * min(BLOCKS if wide else programs(a.x.device, config.warps), -(-rows // config.ROWS))
