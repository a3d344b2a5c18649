# SPDX-License-Identifier: Apache-2.0
"""Score modifications: softcap, dense masks and biases, ALiBi, T5's bias.

    s = softcap(scale * q·k) + mask + bias - slope |j - i - offset| + t5[j - i - offset]

in natural units, or in base 2 if nothing is added. Tiles are BM queries x BN keys, or the reverse
with C.KEYS_FIRST.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import FLOAT_MAX, apart_from_products, steps_of, tanh
from .tiles import at_head, column, of_keys, of_queries


@triton.jit
def softcap(s, p, C: tl.constexpr):
    """Return scores within ±softcap."""
    if C.SOFTCAP:
        s = p.softcap * tanh(s / p.softcap)
    return s


@triton.jit
def score_mod(s, m_s, i, j, i_b, i_h, offset, p, C: tl.constexpr):
    """Add mask, bias, ALiBi and T5's bias to a tile of scores; return scores and visible mask.

    m_s is the visible mask so far; in a full tile it may be all true past the rows and columns if
    nothing dense is read. Hidden scores become -inf.
    """
    if p.mask.data is not None and not C.KEY_MASK:
        s, m_s = dense_score_mod(s, m_s, i, j, i_b, i_h, p.mask, C)
    if p.bias.data is not None:
        s, m_s = dense_score_mod(s, m_s, i, j, i_b, i_h, p.bias, C)
    if C.SPLIT_LSE:  # a sum of two -finfo.max stays finite
        s = tl.maximum(s, -FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)
    if p.slopes is not None:
        s -= column(tl.load(p.slopes + i_h), C) * distance(i, j, offset, C)
    if p.diagonals is not None:
        p_row = p.diagonals.bias + column(i_h, C) * p.diagonals.width
        s += tl.load(diagonal_pointers(p_row, i, j, offset, p.diagonals, C))
    return tl.where(m_s, s, float("-inf")), m_s


@triton.jit
def dense_score_mod(s, m_s, i, j, i_b, i_h, dense, C: tl.constexpr):
    """Apply one dense mask or bias; return scores and visible mask. Hidden pairs are not read."""
    p_head = at_head(dense.data, dense, i_b, column(i_h, C))
    p_tile = (
        p_head
        + of_queries(i.to(tl.int64), C) * dense.query
        + steps_of(of_keys(j.to(tl.int64), C), dense.key)
    )
    b_mod = tl.load(p_tile, mask=m_s, other=0)
    if dense.data.dtype.element_ty == tl.uint8:
        return s, m_s & (apart_from_products(b_mod, C) != 0)
    b_mod = b_mod.to(tl.float32)
    return s + b_mod, m_s & (b_mod != float("-inf"))


@triton.jit
def distance(i, j, offset, C: tl.constexpr):
    """Return float32 |j - i - offset| of the tile's pairs."""
    return tl.abs(of_keys(j - offset, C) - of_queries(i, C)).to(tl.float32)


@triton.jit
def first_diagonal(i, j, offset, diagonals):
    """Return j - i - offset of the tile's first element, clamped so that the bias row covers the
    tile.
    """
    return tl.minimum(
        tl.maximum(tl.min(j, 0) - tl.min(i, 0) - offset, diagonals.d_min), diagonals.d_max
    )


@triton.jit
def diagonal_pointers(P, i, j, offset, diagonals, C: tl.constexpr):
    """Return pointers to the bias of each pair's diagonal: one address and constant offsets if rows
    are consecutive.
    """
    if C.PACK_GQA:
        d = of_keys(j - offset, C) - of_queries(i, C)
        P = P + diagonals.zero + tl.minimum(tl.maximum(d, diagonals.d_min), diagonals.d_max)
    else:
        step = of_keys(tl.arange(0, C.BN), C) - of_queries(tl.arange(0, C.BM), C)
        P = P + diagonals.zero + first_diagonal(i, j, offset, diagonals) + step
    return P
