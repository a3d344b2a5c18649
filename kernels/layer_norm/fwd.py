# SPDX-License-Identifier: Apache-2.0
"""The norms forward: one program for a few rows, which stay in registers unless they are wider than
64 KB of float32.

    h = residual + dropout(x), rounded as stored
    out = (h - mean) rstd weight + bias,  rstd = 1 / sqrt(mean((h - mean)^2) + eps)

RMS norm uses mean = 0. Statistics are float32 and about the mean, never E[h^2] - E[h]^2. The mean
is computed in two steps, the second about the first, because a single float32 sum misses a large
mean by an amount that a small deviation reveals. In wide rows, blocks of columns are merged (Chan,
Golub, LeVeque 1979), about the mean of the first block for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import divided, kernel, launch, narrow, rsqrt
from .._launch import replayed
from .configs import tile
from .rows import (
    Dropout,
    Rows,
    at,
    describe,
    dropped,
    inside,
    load_vector,
    mean_of,
    rows_of,
    strides,
)


class ForwardStrides(NamedTuple):
    LAYOUT = True
    x: Rows
    residual: Rows | None
    out: Rows
    residual_out: Rows | None


@triton.jit
def load_residual_out(X, RESIDUAL, RESIDUAL_OUT, s, r, j0, m, p, C: tl.constexpr):
    """Return the norm's input, float32 [ROWS, BN], 0 where m is false; store it to RESIDUAL_OUT."""
    b_h = tl.load(at(X, s.x, r, j0, p, C), mask=m, other=0.0).to(tl.float32)
    b_h = dropped(b_h, r, j0, p, C)
    if RESIDUAL is not None:
        b_h += tl.load(at(RESIDUAL, s.residual, r, j0, p, C), mask=m, other=0.0).to(tl.float32)
    if RESIDUAL_OUT is not None:
        stored = narrow(b_h, RESIDUAL_OUT.dtype.element_ty)
        tl.store(at(RESIDUAL_OUT, s.residual_out, r, j0, p, C), stored, mask=m)
        b_h = stored.to(tl.float32)
    return b_h


@triton.jit
def store_normed(OUT, WEIGHT, BIAS, b_xhat, s, r, j0, m, columns, p, C: tl.constexpr):
    if WEIGHT is not None:
        b_xhat *= load_vector(WEIGHT, j0, columns, C)
    if BIAS is not None:
        b_xhat += load_vector(BIAS, j0, columns, C)
    tl.store(at(OUT, s.out, r, j0, p, C), narrow(b_xhat, OUT.dtype.element_ty), mask=m)


@triton.jit
def merge(b_n, b_mean, b_m2, n, mean, m2):
    """Merge count, mean and sum of squared deviations [ROWS] of two parts."""
    delta = mean - b_mean
    share = tl.div_rn(n, b_n + n)
    return b_n + n, b_mean + delta * share, b_m2 + m2 + delta * delta * (b_n * share)


@triton.jit
def wide_statistics(X, RESIDUAL, RESIDUAL_OUT, s, r, m_r, columns, p, C: tl.constexpr):
    """Return (shift, mean about it, sum of squared deviations) [ROWS] of rows in blocks; for RMS
    only the sum of squares.
    """
    b_shift = tl.full([C.ROWS], 0.0, tl.float32)
    b_mean = tl.full([C.ROWS], 0.0, tl.float32)
    b_m2 = tl.full([C.ROWS], 0.0, tl.float32)
    b_n = 0.0
    for t in range(tl.cdiv(columns, C.BN)):
        j0 = t * C.BN
        m = inside(m_r, j0, columns, C)
        b_h = load_residual_out(X, RESIDUAL, RESIDUAL_OUT, s, r, j0, m, p, C)
        if C.RMS:
            b_m2 += tl.sum(b_h * b_h, 1)
        else:
            n = tl.minimum(columns - t * C.BN, C.BN).to(tl.float32)
            if t == 0:
                b_shift = mean_of(b_h, n)
            b_h = tl.where(m, b_h - b_shift[:, None], 0.0)
            mean = mean_of(b_h, n)
            b_h = tl.where(m, b_h - mean[:, None], 0.0)
            b_n, b_mean, b_m2 = merge(b_n, b_mean, b_m2, n, mean, tl.sum(b_h * b_h, 1))
    return b_shift, b_mean, b_m2


@kernel
def layer_norm_forward(
    X, RESIDUAL, WEIGHT, BIAS, OUT, RESIDUAL_OUT, MEAN, RSTD, columns, s, p, C: tl.constexpr
):
    r = rows_of(tl.program_id(0), C)
    m_r = r < p.rows
    if C.WIDE:
        b_shift, b_mean, b_m2 = wide_statistics(X, RESIDUAL, RESIDUAL_OUT, s, r, m_r, columns, p, C)
    else:
        j0 = 0
        m = inside(m_r, j0, columns, C)
        b_h = load_residual_out(X, RESIDUAL, RESIDUAL_OUT, s, r, j0, m, p, C)
        b_shift = tl.full([C.ROWS], 0.0, tl.float32)
        b_mean = b_shift
        if not C.RMS:
            b_shift = mean_of(b_h, columns)
            b_h = tl.where(m, b_h - b_shift[:, None], 0.0)
            b_mean = mean_of(b_h, columns)
            b_h = tl.where(m, b_h - b_mean[:, None], 0.0)
        b_m2 = tl.sum(b_h * b_h, 1)
    b_rstd = rsqrt(divided(b_m2, columns) + p.eps)
    if MEAN is not None:
        tl.store(MEAN + r, b_shift + b_mean, mask=m_r)
    tl.store(RSTD + r, b_rstd, mask=m_r)
    if C.WIDE:
        tl.debug_barrier()  # another thread may have written residual_out
        for t in range(tl.cdiv(columns, C.BN)):
            j0 = t * C.BN
            m = inside(m_r, j0, columns, C)
            if RESIDUAL_OUT is not None:
                b_h = tl.load(at(RESIDUAL_OUT, s.residual_out, r, j0, p, C), mask=m, other=0.0).to(
                    tl.float32
                )
            else:
                b_h = tl.load(at(X, s.x, r, j0, p, C), mask=m, other=0.0).to(tl.float32)
            b_h = b_h - b_shift[:, None] - b_mean[:, None]
            store_normed(OUT, WEIGHT, BIAS, b_h * b_rstd[:, None], s, r, j0, m, columns, p, C)
    else:
        store_normed(OUT, WEIGHT, BIAS, b_h * b_rstd[:, None], s, r, j0, m, columns, p, C)


@replayed
def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    eps: float,
    rms: bool,
    dropout: Dropout,
) -> None:
    """Write out, residual_out (residual + dropout(x); None: x is normalized), mean and rstd.

    Tensors of rows are (outer, inner, columns) with contiguous columns; weight, bias, mean and rstd
    are flat.
    """
    chosen = tile(x.shape[2], x.element_size(), x.device)
    p, kind = describe(x, chosen, eps, rms, dropout)
    s = ForwardStrides(*map(strides, (x, residual, out, residual_out)))
    launch(
        layer_norm_forward, -(-p.rows // kind.ROWS), x.device, x, residual, weight, bias, out,
        residual_out, mean, rstd, x.shape[2], s, p,
        kind, warps=chosen[0].warps, stages=1,
    )  # fmt: skip
