# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of layer_norm, rms_norm and add_norm.

It allocates tensors and calls csrc/cpu/layer_norm/layer_norm.cpp. ops/_problem/layer_norm.py
describes the layout of row tensors; contiguous tensors pass unchanged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ..._core import native
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend
from ..._core.tensors import empty_in_order
from ..._problem.layer_norm import (
    NORM_SPECS,
    NormBackward,
    NormForward,
    lowered_backward,
    lowered_forward,
    ready,
)


def backend(op: Op) -> Backend:
    """Return the backend of one of the ops in NORM_SPECS."""
    spec, plain = NORM_SPECS[op.name], op.name != "add_norm"

    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        if (reason := native.why_not("layer_norm_fwd")) is not None:
            return reason
        residual = None if plain else a.residual
        if residual is not None and (residual.dtype == torch.float64) != (
            a.x.dtype == torch.float64
        ):
            return f"x and residual both float64 or neither, got {a.x.dtype} and {residual.dtype}"
        return None

    forward = lowered_forward(op, _launch_forward, work_dtype)

    def infer(a: Any) -> tuple[torch.Tensor, ...]:
        """Compute forward without statistics; skip the layout analysis if nothing needs a copy."""
        x, (residual, bias, seed, start, p, rms) = a.x, spec.optional(a)
        plain_stream = plain or (residual is not None and residual.is_contiguous())
        work = work_dtype(x)
        if not (
            plain_stream
            and x.is_contiguous()
            and ready(a.weight, work)
            and ready(bias, work)
            and x.numel()
        ):
            return forward(a)[: 1 if plain else 2]
        out, stream = empty_in_order(x), None if plain else empty_in_order(residual)
        columns = x.shape[-1] if a.dims == 1 else math.prod(x.shape[-a.dims :])
        raw("layer_norm_fwd")(
            x,
            residual,
            a.weight,
            bias,
            seed,
            out,
            stream,
            None,
            None,
            1,
            columns,
            start,
            a.eps,
            p,
            rms,
        )
        return (out,) if stream is None else (out, stream)

    return Backend(
        "cpu",
        forward,
        lowered_backward(op, _launch_backward, work_dtype),
        why_not,
        _extra_bytes,
        infer,
    )


def _launch_forward(f: NormForward) -> None:
    raw("layer_norm_fwd")(
        f.x, f.residual, f.weight, f.bias, f.seed, f.out, f.residual_out, f.mean, f.rstd,
        f.grid.outer, f.grid.columns,
        f.row_start, f.eps, f.dropout_p, f.rms,
    )  # fmt: skip


def _launch_backward(f: NormBackward) -> None:
    raw("layer_norm_bwd")(
        f.d_out, f.d_residual_out, f.h, f.weight, f.mean, f.rstd, f.seed, f.dx, f.d_residual,
        f.d_weight, f.d_bias, f.grid.outer,
        f.grid.columns, f.row_start, f.dropout_p, f.rms,
    )  # fmt: skip


@functools.cache
def raw(name: str) -> Callable[..., Any]:
    """Return a raw op of the native library, which must be loaded."""
    return getattr(torch.ops.pytransformer_C, name).default


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _extra_bytes(a: Any) -> int:
    """Return the kernels' scratch bytes: a row per thread and backward's partial sums."""
    return (
        raw("layer_norm_scratch")(a.x, math.prod(a.x.shape[a.x.dim() - a.dims :]))
        if a.x.numel()
        else 0
    )
