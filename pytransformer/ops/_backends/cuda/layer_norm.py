# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of layer_norm, rms_norm and add_norm.

It allocates tensors and calls csrc/cuda/layer_norm. Row tensors have the same layout as for the
backend ``cpu``. Weights and their gradients may have any of the kernels' dtypes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._problem.layer_norm import (
    NORM_SPECS,
    NormBackward,
    NormForward,
    lowered_backward,
    lowered_forward,
)
from . import library as cuda_library

MOST_COLUMNS = 2**31 - 1
# approximate maximum of a persistent backward kernel; csrc/cuda/layer_norm/plan.h
MOST_BLOCKS = 132 * 4


def backend(op: Op) -> Backend:
    """Return the backend of one of the ops in NORM_SPECS."""
    optional = NORM_SPECS[op.name].optional

    def why_not(a: Any) -> str | None:
        if (reason := cuda_library.why_not("layer_norm_fwd", a.x.device)) is not None:
            return reason
        residual, bias, *_ = optional(a)
        for name, t in (("x", a.x), ("residual", residual), ("weight", a.weight), ("bias", bias)):
            if t is not None and t.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return (
                    f"float32, bfloat16 or float16, got {name} in"
                    f" {str(t.dtype).removeprefix('torch.')}; the backend reference has it"
                )
        if (columns := math.prod(a.x.shape[a.x.dim() - a.dims :])) > MOST_COLUMNS:
            return f"rows of at most {MOST_COLUMNS:,} numbers, got {columns:,}"
        return None

    return Backend("cuda", lowered_forward(op, _launch_forward),
        lowered_backward(op, _launch_backward), why_not, _extra_bytes,
        recorded=cuda_library.recorded,
    )  # fmt: skip


def _launch_forward(f: NormForward) -> None:
    cuda_library.call(
        "layer_norm_fwd", f.x.device, f.x, f.residual, f.weight, f.bias, f.seed, f.out,
        f.residual_out, f.mean, f.rstd, f.grid.outer,
        f.grid.columns, f.row_start, f.eps, f.dropout_p, f.rms,
    )  # fmt: skip


def _launch_backward(f: NormBackward) -> None:
    cuda_library.call(
        "layer_norm_bwd", f.h.device, f.d_out, f.d_residual_out, f.h, f.weight, f.mean, f.rstd,
        f.seed, f.dx, f.d_residual,
        f.d_weight, f.d_bias, f.grid.outer, f.grid.columns, f.row_start, f.dropout_p, f.rms,
    )  # fmt: skip


def _extra_bytes(a: Any) -> int:
    """Return the bytes of the partial sums of dweight and dbias."""
    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    return 2 * 4 * columns * min(a.x.numel() // max(1, columns), MOST_BLOCKS)
