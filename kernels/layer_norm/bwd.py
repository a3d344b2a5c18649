# SPDX-License-Identifier: Apache-2.0
"""The norms backward, deterministic and without atomics.

    g = d_out weight
    d_h = rstd (g - mean(g) - xhat mean(g xhat)) + d_residual_out   (RMS norm: without mean(g))
    d_residual = d_h;  d_x = d_h after dropout
    d_weight = sum over rows of d_out xhat;  d_bias = sum over rows of d_out

A fixed number of programs share the rows: program k processes rows k, k + programs, … and
accumulates its parameter gradients in registers; a second kernel adds the partials in order. Rows
wider than 32 KB of float32 leave no registers for that: they are processed in blocks of columns,
and a separate kernel, which reads h and d_out again, computes the partials.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import kernel, launch, narrow
from .._launch import replayed
from .configs import BLOCKS, PARAMETERS, SUMS, programs, tile
from .rows import (
    Dropout,
    Rows,
    at,
    columns_of,
    describe,
    dropped,
    inside,
    load_vector,
    mean_of,
    rows_of,
    strides,
)


class BackwardStrides(NamedTuple):
    LAYOUT = True
    d_out: Rows
    d_residual_out: Rows | None
    h: Rows
    dx: Rows | None
    d_residual: Rows | None


@triton.jit
def load_statistics(MEAN, RSTD, r, m_r, C: tl.constexpr):
    b_mean = tl.full([C.ROWS], 0.0, tl.float32)
    if MEAN is not None:
        b_mean = tl.load(MEAN + r, mask=m_r, other=0.0)
    return b_mean, tl.load(RSTD + r, mask=m_r, other=0.0)


@triton.jit
def load_pair(DOUT, H, s, b_mean, b_rstd, r, j0, m, p, C: tl.constexpr):
    """Return d_out and xhat [ROWS, BN] in float32; 0 where m is false."""
    b_dy = tl.load(at(DOUT, s.d_out, r, j0, p, C), mask=m, other=0.0).to(tl.float32)
    b_h = tl.load(at(H, s.h, r, j0, p, C), mask=m, other=0.0).to(tl.float32)
    return b_dy, tl.where(m, (b_h - b_mean[:, None]) * b_rstd[:, None], 0.0)


@triton.jit
def weighted(b_dy, WEIGHT, j0, columns, C: tl.constexpr):
    if WEIGHT is not None:
        b_dy *= load_vector(WEIGHT, j0, columns, C)
    return b_dy


@triton.jit
def store_rows(
    DRESIDUAL_OUT, DX, DRESIDUAL, b_g, b_xhat, b_gm, b_gx, b_rstd, s, r, j0, m, p, C: tl.constexpr
):
    """Compute d_h from g, xhat and the means of g and g xhat; store d_residual and, after dropout,
    d_x.
    """
    b_dh = b_g - b_xhat * b_gx[:, None]
    if not C.RMS:
        b_dh -= b_gm[:, None]
    b_dh *= b_rstd[:, None]
    if DRESIDUAL_OUT is not None:
        b_dh += tl.load(at(DRESIDUAL_OUT, s.d_residual_out, r, j0, p, C), mask=m, other=0.0).to(
            tl.float32
        )
    if DRESIDUAL is not None:
        tl.store(
            at(DRESIDUAL, s.d_residual, r, j0, p, C),
            narrow(b_dh, DRESIDUAL.dtype.element_ty),
            mask=m,
        )
    if DX is not None:
        tl.store(
            at(DX, s.dx, r, j0, p, C),
            narrow(dropped(b_dh, r, j0, p, C), DX.dtype.element_ty),
            mask=m,
        )


@kernel
def layer_norm_backward(
    DOUT,
    DRESIDUAL_OUT,
    H,
    WEIGHT,
    MEAN,
    RSTD,
    DX,
    DRESIDUAL,
    DWEIGHT,
    DBIAS,
    columns,
    s,
    p,
    C: tl.constexpr,
):
    """Write d_x and d_residual and, for rows that fit, this program's partials (programs, columns)
    of d_weight and d_bias.
    """
    b_dw = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    b_db = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    for t in range(tl.program_id(0), tl.cdiv(p.rows, C.ROWS), tl.num_programs(0)):
        r = rows_of(t, C)
        m_r = r < p.rows
        b_mean, b_rstd = load_statistics(MEAN, RSTD, r, m_r, C)
        if C.WIDE:
            b_gm = tl.full([C.ROWS], 0.0, tl.float32)
            b_gx = tl.full([C.ROWS], 0.0, tl.float32)
            for u in range(tl.cdiv(columns, C.BN)):
                j0 = u * C.BN
                m = inside(m_r, j0, columns, C)
                b_dy, b_xhat = load_pair(DOUT, H, s, b_mean, b_rstd, r, j0, m, p, C)
                b_g = weighted(b_dy, WEIGHT, j0, columns, C)
                b_gm += mean_of(b_g, columns)
                b_gx += mean_of(b_g * b_xhat, columns)
            for u in range(tl.cdiv(columns, C.BN)):
                j0 = u * C.BN
                m = inside(m_r, j0, columns, C)
                b_dy, b_xhat = load_pair(DOUT, H, s, b_mean, b_rstd, r, j0, m, p, C)
                b_g = weighted(b_dy, WEIGHT, j0, columns, C)
                store_rows(
                    DRESIDUAL_OUT, DX, DRESIDUAL, b_g, b_xhat, b_gm, b_gx, b_rstd, s, r, j0, m, p, C
                )
        else:
            j0 = 0
            m = inside(m_r, j0, columns, C)
            b_dy, b_xhat = load_pair(DOUT, H, s, b_mean, b_rstd, r, j0, m, p, C)
            b_dw, b_db = add_part(DWEIGHT, DBIAS, b_dw, b_db, b_dy, b_xhat)
            b_g = weighted(b_dy, WEIGHT, j0, columns, C)
            if DX is not None or DRESIDUAL is not None:
                b_gm = mean_of(b_g, columns)
                b_gx = mean_of(b_g * b_xhat, columns)
                store_rows(
                    DRESIDUAL_OUT, DX, DRESIDUAL, b_g, b_xhat, b_gm, b_gx, b_rstd, s, r, j0, m, p, C
                )
    if not C.WIDE:
        store_part(DWEIGHT, DBIAS, b_dw, b_db, tl.program_id(0), 0, columns, C)


@triton.jit
def add_part(DWEIGHT, DBIAS, b_dw, b_db, b_dy, b_xhat):
    if DWEIGHT is not None:
        b_dw += b_dy * b_xhat
    if DBIAS is not None:
        b_db += b_dy
    return b_dw, b_db


@triton.jit
def store_part(DWEIGHT, DBIAS, b_dw, b_db, i_part, j0, columns, C: tl.constexpr):
    j = columns_of(j0, C)
    p_part = i_part.to(tl.int64) * columns + j
    if DWEIGHT is not None:
        tl.store(DWEIGHT + p_part, tl.sum(b_dw, 0), mask=j < columns)
    if DBIAS is not None:
        tl.store(DBIAS + p_part, tl.sum(b_db, 0), mask=j < columns)


@kernel(do_not_specialize=["parts"])
def layer_norm_backward_parameters(
    DOUT, H, MEAN, RSTD, DWEIGHT, DBIAS, columns, parts, s, p, C: tl.constexpr
):
    """Write one row of the partials (partials, columns) of d_weight and d_bias, for BN columns."""
    blocks = tl.cdiv(columns, C.BN)
    i_part = tl.program_id(0) // blocks
    j0 = tl.program_id(0) % blocks * C.BN
    b_dw = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    b_db = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    for t in range(i_part, tl.cdiv(p.rows, C.ROWS), parts):
        r = rows_of(t, C)
        m_r = r < p.rows
        m = inside(m_r, j0, columns, C)
        b_mean, b_rstd = load_statistics(MEAN, RSTD, r, m_r, C)
        b_dy, b_xhat = load_pair(DOUT, H, s, b_mean, b_rstd, r, j0, m, p, C)
        b_dw, b_db = add_part(DWEIGHT, DBIAS, b_dw, b_db, b_dy, b_xhat)
    store_part(DWEIGHT, DBIAS, b_dw, b_db, i_part, j0, columns, C)


@kernel(do_not_specialize=["parts"])
def layer_norm_backward_sums(
    PARTS_W, PARTS_B, DWEIGHT, DBIAS, columns, parts, ROWS: tl.constexpr, BN: tl.constexpr
):
    """Write d_weight and d_bias of BN columns: the partials, added in order."""
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    if DWEIGHT is not None:
        sum_parts(PARTS_W, DWEIGHT, j, columns, parts, ROWS, BN)
    if DBIAS is not None:
        sum_parts(PARTS_B, DBIAS, j, columns, parts, ROWS, BN)


@triton.jit
def sum_parts(PARTS, TOTAL, j, columns, parts, ROWS: tl.constexpr, BN: tl.constexpr):
    b_sum = tl.full([ROWS, BN], 0.0, tl.float32)
    for i0 in range(0, parts, ROWS):
        i = i0 + tl.arange(0, ROWS)
        m = (i < parts)[:, None] & (j < columns)[None, :]
        b_sum += tl.load(PARTS + i.to(tl.int64)[:, None] * columns + j[None, :], mask=m, other=0.0)
    tl.store(TOTAL + j, narrow(tl.sum(b_sum, 0), TOTAL.dtype.element_ty), mask=j < columns)


@replayed
def backward(
    d_out: torch.Tensor,
    d_residual_out: torch.Tensor | None,
    h: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    dx: torch.Tensor | None,
    d_residual: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
    *,
    rms: bool,
    dropout: Dropout,
) -> None:
    """Write dx, d_residual, d_weight and d_bias, if given.

    Tensors of rows are (outer, inner, columns) with contiguous columns; h is forward's input of the
    norm; weight, d_weight, d_bias, mean and rstd are flat.
    """
    columns, device = h.shape[2], h.device
    chosen = tile(columns, h.element_size(), device, backward=True)
    p, kind = describe(h, chosen, 0.0, rms, dropout)
    s = BackwardStrides(*map(strides, (d_out, d_residual_out, h, dx, d_residual)))
    apart = kind.WIDE and not (d_weight is None and d_bias is None)
    count = (
        min(-(-p.rows // PARAMETERS.ROWS), BLOCKS) if apart else programs(device, chosen[0].warps)
    )
    count = min(count, -(-p.rows // kind.ROWS))
    parts = [
        None if t is None else torch.empty(count, columns, device=device)
        for t in (d_weight, d_bias)
    ]
    if not (kind.WIDE and dx is None and d_residual is None):
        launch(
            layer_norm_backward, -(-p.rows // kind.ROWS) if kind.WIDE else count, device, d_out,
            d_residual_out, h, weight, mean, rstd, dx,
            d_residual, *parts, columns, s, p, kind, warps=chosen[0].warps, stages=1,
        )  # fmt: skip
    if apart:
        kind = dataclasses.replace(kind, ROWS=PARAMETERS.ROWS, BN=PARAMETERS.BN, WIDE=False)
        launch(
            layer_norm_backward_parameters, count * -(-columns // kind.BN), device, d_out, h, mean,
            rstd, *parts, columns, count, s,
            p, kind, warps=PARAMETERS.warps, stages=1,
        )  # fmt: skip
    if d_weight is not None or d_bias is not None:
        launch(
            layer_norm_backward_sums, -(-columns // SUMS.BN), device, *parts, d_weight, d_bias,
            columns, count, SUMS.ROWS, SUMS.BN,
            warps=SUMS.warps, stages=1,
        )  # fmt: skip
