# SPDX-License-Identifier: Apache-2.0
"""Rotary positions forward: a program holds a few full rows, normalized first if there is a weight.

y = x  or  x rstd (weight + offset),  rstd = 1 / sqrt(mean(x^2) + eps)
out1 = y1 cos1 - y2 sin1,  out2 = y2 cos2 + y1 sin2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import divided, kernel, launch, narrow, rsqrt
from .._launch import replayed
from .configs import WARPS, kind_of
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
    sum_of_squares,
    table_strides,
)


class ForwardStrides(NamedTuple):
    LAYOUT = True
    x: Rows
    out: Rows
    table: Rows | None


@triton.jit
def turned_row(X, COS, SIN, WEIGHT, RSTD, p_x, p_table, r, m_r, half, dim, p, C: tl.constexpr):
    """Return (out_1, out_2, out_rest) of rows in float32; store rstd if RSTD is given."""
    b_1, b_2, b_rest = load_row(X, p_x, m_r, half, dim, C.ROWS, C)
    if WEIGHT is not None:
        b_rstd = rsqrt(divided(sum_of_squares(b_1, b_2, b_rest, C), dim) + p.eps)
        if RSTD is not None:
            tl.store(RSTD + r, b_rstd, mask=m_r)
        w_1, w_2, w_rest = load_weight(WEIGHT, half, dim, p, C)
        b_1 = b_1 * b_rstd[:, None] * w_1
        b_2 = b_2 * b_rstd[:, None] * w_2
        b_rest = b_rest * b_rstd[:, None] * w_rest
    if COS is not None:
        c_1, c_2 = load_pairs(COS, p_table, m_r, half, C.ROWS, C)
        s_1, s_2 = load_pairs(SIN, p_table, m_r, half, C.ROWS, C)
        y_1 = b_1
        b_1 = tl.fma(y_1, c_1, -(b_2 * s_1))
        b_2 = tl.fma(b_2, c_2, y_1 * s_2)
    return b_1, b_2, b_rest


@kernel
def rotary_forward(X, COS, SIN, WEIGHT, OUT, RSTD, half, dim, s, p, C: tl.constexpr):
    r = rows_of(tl.program_id(0), C)
    m_r = r < p.rows
    b, h, l = place(r, p.heads, p.length)
    p_table = at(s.table, b, h, l) if COS is not None else r
    b_1, b_2, b_rest = turned_row(
        X, COS, SIN, WEIGHT, RSTD, at(s.x, b, h, l), p_table, r, m_r, half, dim, p, C
    )
    dtype: tl.constexpr = OUT.dtype.element_ty
    b_1, b_2, b_rest = narrow(b_1, dtype), narrow(b_2, dtype), narrow(b_rest, dtype)
    store_row(OUT, at(s.out, b, h, l), m_r, half, dim, b_1, b_2, b_rest, C.ROWS, C)


@replayed
def forward(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    weight: torch.Tensor | None,
    out: torch.Tensor,
    rstd: torch.Tensor | None,
    *,
    interleaved: bool,
    eps: float,
    weight_offset: float,
) -> None:
    """Write out and, if given, rstd. Tensors have the op's shapes, with a contiguous last
    dimension.
    """
    batch, heads, length, dim = x.shape
    half = pairs_of(x, cos)
    kind, p = (
        kind_of(half, dim, interleaved, x.element_size()),
        Problem(batch * heads * length, heads, length, eps, weight_offset),
    )
    s = ForwardStrides(strides(x), strides(out), table_strides(cos))  # type: ignore[arg-type]
    launch(
        rotary_forward,
        -(-p.rows // kind.ROWS),
        x.device,
        x,
        cos,
        sin,
        weight,
        out,
        rstd,
        half,
        dim,
        s,
        p,
        kind,
        warps=WARPS,
        stages=1,
    )
