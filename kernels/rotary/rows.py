# SPDX-License-Identifier: Apache-2.0
"""Shared by the rotary kernels: the problem, addresses of rows, pairs and unrotated columns.

Names: b_ tile of values, m_ mask, p_ offset of a row's first column; r are rows [ROWS], indexed by
(batch, head, position). A row is (b_1, b_2, b_rest): the first and second values of its pairs
[ROWS, BH], and the columns after them [ROWS, BR].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rows(NamedTuple):
    """Strides of a (B, H, L, columns) tensor, or of a table (B or 1, 1, L, turned). Columns are
    contiguous.
    """

    b: int
    h: int
    l: int


class Problem(NamedTuple):
    """One call. The numbers of columns and pairs are separate arguments, because their divisors
    decide the width of loads.
    """

    rows: int
    heads: int
    length: int
    eps: float
    offset: float  # added to the weight


def strides(t: torch.Tensor | None) -> Rows | None:
    """Return the strides; 0 for dimensions of size 1."""
    return (
        None if t is None else Rows(*(0 if n == 1 else s for n, s in zip(t.shape[:3], t.stride())))
    )


def table_strides(t: torch.Tensor | None) -> Rows | None:
    return None if t is None else strides(t[:, None])


def pairs_of(x: torch.Tensor, cos: torch.Tensor | None) -> int:
    """Return the number of pairs per row; without tables, of the full row."""
    return (x.shape[3] if cos is None else cos.shape[-1]) // 2


@triton.jit
def rows_of(i_tile, C: tl.constexpr):
    """Return row indices in 32 bits: 64-bit divisions are calls, around which registers spilled
    (sm_100).
    """
    return i_tile * C.ROWS + tl.arange(0, C.ROWS)


@triton.jit
def place(r, heads, length):
    """Return batch, head and position of rows, in 64 bits for addresses."""
    t = r // length
    return (t // heads).to(tl.int64), (t % heads).to(tl.int64), (r % length).to(tl.int64)


@triton.jit
def at(s, b, h, l):
    return b * s.b + h * s.h + l * s.l


@triton.jit
def load_pairs(P, p_row, m_r, half, ROWS: tl.constexpr, C: tl.constexpr):
    """Return b_1 and b_2 in float32, 0 where absent. Interleaved pairs are loaded in memory order
    and split in registers.
    """
    if C.INTERLEAVED:
        j = tl.arange(0, 2 * C.BH)
        m = m_r[:, None] & (j < 2 * half)[None, :]
        b = tl.load(P + p_row[:, None] + j[None, :], mask=m, other=0.0).to(tl.float32)
        b_1, b_2 = tl.split(tl.reshape(b, [ROWS, C.BH, 2]))
    else:
        j = tl.arange(0, C.BH)
        m = m_r[:, None] & (j < half)[None, :]
        b_1 = tl.load(P + p_row[:, None] + j[None, :], mask=m, other=0.0).to(tl.float32)
        b_2 = tl.load(P + p_row[:, None] + half + j[None, :], mask=m, other=0.0).to(tl.float32)
    return b_1, b_2


@triton.jit
def store_pairs(P, p_row, m_r, half, b_1, b_2, ROWS: tl.constexpr, C: tl.constexpr):
    if C.INTERLEAVED:
        j = tl.arange(0, 2 * C.BH)
        m = m_r[:, None] & (j < 2 * half)[None, :]
        tl.store(
            P + p_row[:, None] + j[None, :], tl.reshape(tl.join(b_1, b_2), [ROWS, 2 * C.BH]), mask=m
        )
    else:
        j = tl.arange(0, C.BH)
        m = m_r[:, None] & (j < half)[None, :]
        tl.store(P + p_row[:, None] + j[None, :], b_1, mask=m)
        tl.store(P + p_row[:, None] + half + j[None, :], b_2, mask=m)


@triton.jit
def rest_columns(half, C: tl.constexpr):
    return 2 * half + tl.arange(0, C.BR)


@triton.jit
def load_row(P, p_row, m_r, half, dim, ROWS: tl.constexpr, C: tl.constexpr):
    """Return (b_1, b_2, b_rest) in float32. Without unrotated columns b_rest is b_1 and unused."""
    b_1, b_2 = load_pairs(P, p_row, m_r, half, ROWS, C)
    b_rest = b_1
    if C.BR:
        j = rest_columns(half, C)
        b_rest = tl.load(
            P + p_row[:, None] + j[None, :], mask=m_r[:, None] & (j < dim)[None, :], other=0.0
        ).to(tl.float32)
    return b_1, b_2, b_rest


@triton.jit
def store_row(P, p_row, m_r, half, dim, b_1, b_2, b_rest, ROWS: tl.constexpr, C: tl.constexpr):
    store_pairs(P, p_row, m_r, half, b_1, b_2, ROWS, C)
    if C.BR:
        j = rest_columns(half, C)
        tl.store(P + p_row[:, None] + j[None, :], b_rest, mask=m_r[:, None] & (j < dim)[None, :])


@triton.jit
def load_weight(WEIGHT, half, dim, p, C: tl.constexpr):
    """Return the weight plus its offset as one row."""
    b_1, b_2, b_rest = load_row(
        WEIGHT, tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1), half, dim, 1, C
    )
    return b_1 + p.offset, b_2 + p.offset, b_rest + p.offset


@triton.jit
def sum_of_row(b_1, b_2, b_rest, C: tl.constexpr):
    """Return the row sums [ROWS]."""
    b_sum = tl.sum(b_1 + b_2, 1)
    if C.BR:
        b_sum += tl.sum(b_rest, 1)
    return b_sum


@triton.jit
def sum_of_squares(b_1, b_2, b_rest, C: tl.constexpr):
    """Return the sum of squares, float32 [ROWS], accumulated in float64, in which squares are
    exact.

    So neither contraction nor the order of the sum, which depends on the layout of the stored
    values, changes a bit, and a row is the same in a cache of any dtype.
    """
    b_1, b_2, b_rest = b_1.to(tl.float64), b_2.to(tl.float64), b_rest.to(tl.float64)
    return sum_of_row(b_1 * b_1, b_2 * b_2, b_rest * b_rest, C).to(tl.float32)
