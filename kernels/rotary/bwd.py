# SPDX-License-Identifier: Apache-2.0
"""Rotary positions backward, deterministic and without atomics.

    dy1 = d_out1 cos1 + d_out2 sin2,  dy2 = d_out2 cos2 - d_out1 sin1
    dx  = dy  or, with g = dy (weight + offset) and xhat = x rstd,  rstd (g - xhat mean(g xhat))
    d_weight = sum over rows of dy xhat

For d_weight a fixed number of programs share the rows, each with partial sums in registers, and the
norms' kernel adds the partials.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import kernel, launch, narrow
from .._launch import replayed
from ..layer_norm.bwd import layer_norm_backward_sums
from ..layer_norm.configs import SUMS
from .configs import MOST_REGISTERS, WARPS, kind_of, programs
from .rows import (
    Problem,
    Rows,
    at,
    load_pairs,
    load_row,
    load_weight,
    pairs_of,
    place,
    rows_of,
    store_row,
    strides,
    sum_of_row,
    table_strides,
)


class BackwardStrides(NamedTuple):
    LAYOUT = True
    d_out: Rows
    x: Rows
    dx: Rows | None
    table: Rows | None


class Tables(NamedTuple):
    cos: torch.Tensor | None
    sin: torch.Tensor | None


@triton.jit
def turned_back(DOUT, t, b, h, l, m_r, half, dim, s, C: tl.constexpr):
    b_1, b_2, b_rest = load_row(DOUT, at(s.d_out, b, h, l), m_r, half, dim, C.ROWS, C)
    if t.cos is not None:
        p_table = at(s.table, b, h, l)
        c_1, c_2 = load_pairs(t.cos, p_table, m_r, half, C.ROWS, C)
        s_1, s_2 = load_pairs(t.sin, p_table, m_r, half, C.ROWS, C)
        g_1 = b_1
        b_1 = g_1 * c_1 + b_2 * s_2
        b_2 = b_2 * c_2 - g_1 * s_1
    return b_1, b_2, b_rest


@kernel
def rotary_backward(DOUT, X, tables, WEIGHT, RSTD, DX, DWEIGHT, half, dim, s, p, C: tl.constexpr):
    """Write dx, and this program's partial sums (programs, dim) of d_weight."""
    dw_1 = tl.full([C.ROWS, C.BH], 0.0, tl.float32)
    dw_2 = tl.full([C.ROWS, C.BH], 0.0, tl.float32)
    dw_rest = tl.full([C.ROWS, C.BR if C.BR else C.BH], 0.0, tl.float32)
    for t in range(tl.program_id(0), tl.cdiv(p.rows, C.ROWS), tl.num_programs(0)):
        r = rows_of(t, C)
        m_r = r < p.rows
        b, h, l = place(r, p.heads, p.length)
        b_1, b_2, b_rest = turned_back(DOUT, tables, b, h, l, m_r, half, dim, s, C)
        if WEIGHT is not None:
            b_rstd = tl.load(RSTD + r, mask=m_r, other=0.0)
            x_1, x_2, x_rest = load_row(X, at(s.x, b, h, l), m_r, half, dim, C.ROWS, C)
            x_1, x_2, x_rest = (
                x_1 * b_rstd[:, None],
                x_2 * b_rstd[:, None],
                x_rest * b_rstd[:, None],
            )
            if DWEIGHT is not None:
                dw_1 += b_1 * x_1
                dw_2 += b_2 * x_2
                if C.BR:
                    dw_rest += b_rest * x_rest
            w_1, w_2, w_rest = load_weight(WEIGHT, half, dim, p, C)
            b_1, b_2, b_rest = b_1 * w_1, b_2 * w_2, b_rest * w_rest
            b_mean = sum_of_row(b_1 * x_1, b_2 * x_2, b_rest * x_rest, C) / dim
            b_1 = (b_1 - x_1 * b_mean[:, None]) * b_rstd[:, None]
            b_2 = (b_2 - x_2 * b_mean[:, None]) * b_rstd[:, None]
            b_rest = (b_rest - x_rest * b_mean[:, None]) * b_rstd[:, None]
        if DX is not None:
            dtype: tl.constexpr = DX.dtype.element_ty
            b_1, b_2, b_rest = narrow(b_1, dtype), narrow(b_2, dtype), narrow(b_rest, dtype)
            store_row(DX, at(s.dx, b, h, l), m_r, half, dim, b_1, b_2, b_rest, C.ROWS, C)
    if DWEIGHT is not None:
        p_part = tl.zeros([1], tl.int64) + tl.program_id(0).to(tl.int64) * dim
        dw_1, dw_2, dw_rest = (
            tl.sum(dw_1, 0)[None, :],
            tl.sum(dw_2, 0)[None, :],
            tl.sum(dw_rest, 0)[None, :],
        )
        store_row(DWEIGHT, p_part, tl.full([1], 1, tl.int1), half, dim, dw_1, dw_2, dw_rest, 1, C)


@replayed
def backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    weight: torch.Tensor | None,
    rstd: torch.Tensor | None,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    *,
    interleaved: bool,
    weight_offset: float,
) -> None:
    """Write dx and d_weight, if given. Tensors have the op's shapes, with a contiguous last
    dimension.
    """
    batch, heads, length, dim = x.shape
    half, device = pairs_of(x, cos), x.device
    kind, p = (
        kind_of(half, dim, interleaved, x.element_size()),
        Problem(batch * heads * length, heads, length, 0.0, weight_offset),
    )
    s = BackwardStrides(strides(d_out), strides(x), strides(dx), table_strides(cos))  # type: ignore[arg-type]
    tiles = -(-p.rows // kind.ROWS)
    count = tiles if d_weight is None else min(programs(device), tiles)
    parts = None if d_weight is None else torch.empty(count, dim, device=device)
    launch(  # without a bound, ptxas targets 56 registers and spills (float32, sm_120)
        rotary_backward, count, device, d_out, x, Tables(cos, sin), weight, rstd, dx, parts, half,
        dim, s, p, kind, warps=WARPS, stages=1,
        maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    if d_weight is not None:
        launch(
            layer_norm_backward_sums, -(-dim // SUMS.BN), device, parts, None, d_weight, None, dim,
            count, SUMS.ROWS, SUMS.BN,
            warps=SUMS.warps, stages=1,
        )  # fmt: skip
