# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of layer_norm, rms_norm and add_norm, on kernels/layer_norm.

ops/_problem/layer_norm.py describes the layout of row tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._problem.layer_norm import (
    NORM_SPECS,
    Grid,
    NormBackward,
    NormForward,
    lowered_backward,
    lowered_forward,
)
from . import availability


def backend(op: Op) -> Backend:
    """Return the backend of one of the ops in NORM_SPECS."""
    optional = NORM_SPECS[op.name].optional

    def why_not(a: Any) -> str | None:
        if (reason := availability.why_not(x=a.x, residual=optional(a)[0])) is not None:
            return reason
        if (columns := math.prod(a.x.shape[a.x.dim() - a.dims :])) >= 1 << 30:
            return f"rows of fewer than {1 << 30:,} numbers, got {columns:,}"
        return None

    return Backend(
        "triton", lowered_forward(op, _launch_forward), lowered_backward(op, _launch_backward),
        why_not, _extra_bytes,
        recorded=availability.recorded,
    )  # fmt: skip


def _launch_forward(f: NormForward) -> None:
    from pytransformer.kernels.layer_norm.fwd import forward
    from pytransformer.kernels.layer_norm.rows import Dropout

    forward(
        *(_view(f.grid, t) for t in (f.x, f.residual)), _flat(f.weight), _flat(f.bias),
        *(_view(f.grid, t) for t in (f.out, f.residual_out)), f.mean, f.rstd, eps=f.eps, rms=f.rms,
        dropout=Dropout(f.seed, f.row_start, f.dropout_p),
    )  # fmt: skip


def _launch_backward(f: NormBackward) -> None:
    from pytransformer.kernels.layer_norm.bwd import backward
    from pytransformer.kernels.layer_norm.rows import Dropout

    backward(
        *(_view(f.grid, t) for t in (f.d_out, f.d_residual_out, f.h)), _flat(f.weight),
        _flat(f.mean), _flat(f.rstd),
        *(_view(f.grid, t) for t in (f.dx, f.d_residual)), _flat(f.d_weight), _flat(f.d_bias),
        rms=f.rms, dropout=Dropout(f.seed, f.row_start, f.dropout_p),
    )  # fmt: skip


def _view(grid: Grid, t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.view(grid.shape)


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return a one-dimensional view of a contiguous tensor."""
    return None if t is None else t.view(-1)


def _extra_bytes(a: Any) -> int:
    """Return the bytes of the parameters' gradient partials: two float32 rows per program."""
    from pytransformer.kernels.layer_norm.configs import BLOCKS, programs, tile

    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    config, wide = tile(columns, a.x.element_size(), a.x.device, backward=True)
    rows = a.x.numel() // max(1, columns)
    return (
        8
        * columns
        * min(BLOCKS if wide else programs(a.x.device, config.warps), -(-rows // config.ROWS))
    )
