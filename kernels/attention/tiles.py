# SPDX-License-Identifier: Apache-2.0
"""Shared by the attention kernels: loads, a tile's scores and visible mask, and the end of a row.

Bounds (bounds.py) decide visibility by position; other hidden pairs (segments, dense masks) are
read per element.

Names: i_ index of a program or loop, p_ pointers, b_ tile of values, m_ mask. Shapes in comments
are BM queries x BN keys, or the reverse with C.KEYS_FIRST; only of_queries, of_keys and tile_dot
depend on the orientation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import (
    FLOAT_MAX,
    LN2,
    LOG2E,
    apart_from_products,
    dot,
    from_start,
    keep_tile,
    narrow,
    steps_of,
    tanh,
)
from .blocks import block_pairs


@triton.jit
def of_queries(x, C: tl.constexpr):
    """Expand x [BM], one value per query, along the tile."""
    return tl.expand_dims(x, 0 if C.KEYS_FIRST else 1)


@triton.jit
def of_keys(x, C: tl.constexpr):
    """Expand x [BN], one value per key, along the tile."""
    return tl.expand_dims(x, 1 if C.KEYS_FIRST else 0)


@triton.jit
def tile_of(value, dtype: tl.constexpr, C: tl.constexpr):
    """Return a tile filled with one value."""
    return tl.full([C.BN if C.KEYS_FIRST else C.BM, C.BM if C.KEYS_FIRST else C.BN], value, dtype)


@triton.jit
def tile_dot(b_queries, b_keys, C: tl.constexpr):
    """Return the tile of dot products of each query's row with each key's."""
    if C.KEYS_FIRST:
        b = dot(b_keys, tl.trans(b_queries), tile_of(0.0, tl.float32, C), C)
    else:
        b = dot(b_queries, tl.trans(b_keys), tile_of(0.0, tl.float32, C), C)
    return b


@triton.jit
def row_pointers(P, strides, row, x, WIDTH: tl.constexpr):
    """Return pointers [rows of x, WIDTH] with 64-bit row offsets."""
    return P + (row + x).to(tl.int64)[:, None] * strides.row + tl.arange(0, WIDTH)[None, :]


@triton.jit
def load_rows(
    P, strides, row, x, m_x, MASKED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Load [rows of x, PADDED]; zero past WIDTH and, if MASKED, where m_x is false."""
    return load_at(row_pointers(P, strides, row, x, PADDED), m_x, MASKED, WIDTH, PADDED)


@triton.jit
def load_at(pointers, m_x, MASKED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows like load_rows, from these pointers."""
    if WIDTH == PADDED:
        if MASKED:
            return tl.load(pointers, mask=m_x[:, None], other=0.0)
        return tl.load(pointers)
    m_column = (tl.arange(0, PADDED) < WIDTH)[None, :]
    if MASKED:
        return tl.load(pointers, mask=m_x[:, None] & m_column, other=0.0)
    return tl.load(pointers, mask=m_column, other=0.0)


@triton.jit
def pages_of(j, m_j, i_b, p, C: tl.constexpr):
    """Return the page of each key of j; without pages j.

    Entries are read only for keys in m_j; one outside the pool is clamped to the nearest page.
    """
    if C.PAGE_SIZE:
        p_entry = p.pages.table + i_b.to(tl.int64) * p.pages.width + j // C.PAGE_SIZE
        entry = tl.load(p_entry, mask=m_j, other=0)
        j = tl.minimum(tl.maximum(entry, 0), p.pages.count - 1).to(tl.int32)
    return j


@triton.jit
def key_pointers(P, strides, row, j, page, WIDTH: tl.constexpr, C: tl.constexpr):
    """Return row_pointers of keys j of a head, in their pages; P is the head's address in the
    sequence or pool.
    """
    if C.PAGE_SIZE:
        row = page.to(tl.int64) * strides.batch + (j % C.PAGE_SIZE).to(tl.int64) * strides.row
        pointers = P + row[:, None] + tl.arange(0, WIDTH)[None, :]
    else:
        pointers = row_pointers(P, strides, row, j, WIDTH)
    return pointers


@triton.jit
def widened(b_rows, dtype: tl.constexpr, C: tl.constexpr):
    """Convert rows of keys or values to a dtype that tl.dot accepts; eight-bit values exactly.

    float8_e4m3fn uses integer operations, because sm_80 has no instruction for it: shifted to
    float16 positions, the bits are 2^-8 of the value, including subnormals, which float16 can
    represent.
    """
    if C.EIGHT_BITS == 2:
        bits = b_rows.to(tl.int16)
        half = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
        b_rows = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
    if C.EIGHT_BITS:
        # the interpreter cannot convert an integer to bfloat16
        b_rows = narrow(b_rows.to(tl.float32), dtype)
    return b_rows


@triton.jit
def scales_at(P, strides, i_b, i_h, j, page, m_j, C: tl.constexpr):
    """Load [BN] scales of keys j of a head; 0 where m_j is false."""
    P = at_key_head(P, strides, i_b, i_h, C)
    if C.PAGE_SIZE:
        P += page.to(tl.int64) * strides.batch + (j % C.PAGE_SIZE).to(tl.int64) * strides.row
    else:
        P += j.to(tl.int64) * strides.row
    return tl.load(P, mask=m_j, other=0.0)


@triton.jit
def weighted_sum(b_p, b_v, acc, dtype: tl.constexpr, C: tl.constexpr):
    """Return acc + b_p @ b_v for float32 weights.

    A weight times an eight-bit scale may be too small for float16, so it is split into two
    bfloat16, which hold 16 of its bits.
    """
    if C.EIGHT_BITS and dtype == tl.float16:
        b_v = widened(b_v, tl.bfloat16, C)
        high = narrow(b_p, tl.bfloat16)
        acc = dot(high, b_v, acc, C)
        acc = dot(narrow(b_p - high.to(tl.float32), tl.bfloat16), b_v, acc, C)
    else:
        b_v = widened(b_v, dtype, C)
        acc = dot(narrow(b_p, b_v.dtype), b_v, acc, C)
    return acc


@triton.jit
def store_rows(P, strides, row, x, m_x, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    m = m_x[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
    tl.store(row_pointers(P, strides, row, x, PADDED), narrow(values, P.dtype.element_ty), mask=m)


@triton.jit
def key_mask(j, i_b, i_h, m_j, p, C: tl.constexpr):
    """Return m_j without keys that the mask hides from every query."""
    if C.KEY_MASK:
        p_mask = at_head(p.mask.data, p.mask, i_b, i_h)
        b_mask = tl.load(p_mask + steps_of(j.to(tl.int64), p.mask.key), mask=m_j, other=0)
        return m_j & (apart_from_products(b_mask, C) != 0)
    return m_j


@triton.jit
def segments_of(P, i_b, num, x, m_x):
    """Load segment ids of rows or columns x; P is None or (B, L)."""
    if P is not None:  # a single return, because two would need one dtype
        x = tl.load(P + i_b.to(tl.int64) * num + x, mask=m_x, other=0)
    return x


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
def scores(b_q, b_k, m_s, i, j, i_b, i_h, offset, seg_q, seg_k, p, C: tl.constexpr, k_scale=None):
    """Return (tile of scores, capped scores before any bias, visible mask).

    ``s = scale * q·k``, softcap, + mask + bias + ALiBi + T5, in natural units, or in base 2 if
    nothing is added. m_s is the visible mask by bounds; in a full tile it may be all true past the
    rows and columns if nothing dense is read. k_scale: [BN], scales of eight-bit keys.
    """
    s = tile_dot(b_q, b_k, C) * p.score_scale
    if C.EIGHT_BITS:
        s = s * of_keys(k_scale, C)
    if C.SOFTCAP:
        s = p.softcap * tanh(s / p.softcap)
    capped = s
    if p.query_segments is not None:
        m_s = m_s & (of_queries(seg_q, C) == of_keys(seg_k, C))
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
    return tl.where(m_s, s, float("-inf")), capped, m_s


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


@triton.jit
def power(x, C: tl.constexpr):
    """Return e^x of score differences."""
    if C.BASE2:
        return tl.exp2(x)
    return tl.exp2(x * LOG2E)


@triton.jit
def keep_mask(i, j, i_b, i_h, p, C: tl.constexpr):
    """Return the keep mask [BM, BN]. With keys as rows it would need a transposition."""
    tl.static_assert(not C.KEYS_FIRST)
    j0 = tl.min(j, 0) + p.key_start
    seed, row, head = (
        tl.load(p.seed),
        (i + p.query_start)[:, None],
        from_start(column(i_h, C), p.head_start),
    )
    return keep_tile(seed, row, head, from_start(i_b, p.batch_start), j0, p.threshold, C.BM, C.BN)


@triton.jit
def zero_of(p):
    """Return 0.0, computed at run time: LLVM sinks the rounding to 16 bits below the select of a
    literal zero.
    """
    return tl.cast(p.threshold >> 30, tl.float32)


@triton.jit
def visible(
    i, j, bounds, m_i, m_j, word, MASKED: tl.constexpr, BY_KEYS: tl.constexpr, p, C: tl.constexpr
):
    """Return a tile's visible mask by bounds (of the queries, or BY_KEYS of the keys) and block
    mask.

    In a full tile everything is visible, but values that are read per element need existing queries
    and keys.
    """
    m_s = tile_of(True, tl.int1, C)
    if MASKED:
        if BY_KEYS:
            m_s = (
                m_s
                & (of_queries(i, C) >= of_keys(bounds[0], C))
                & (of_queries(i, C) < of_keys(bounds[1], C))
            )
        else:
            m_s = (
                m_s
                & (of_keys(j, C) >= of_queries(bounds[0], C))
                & (of_keys(j, C) < of_queries(bounds[1], C))
            )
            if C.GAP:
                m_s = m_s | (of_keys(j, C) < of_queries(bounds[2], C))
        m_s = m_s & of_queries(m_i, C)
    if MASKED or C.KEY_MASK:
        m_s = m_s & of_keys(m_j, C)
    if p.mask.data is not None or p.bias.data is not None or p.query_segments is not None:
        m_s = m_s & of_queries(m_i, C) & of_keys(m_j, C)
    if C.BLOCK_KEYS and p.blocks.bits is not None:
        m_s = m_s & block_pairs(i, word, p, C)
    return m_s


@triton.jit
def visible_rows(b_rows, m_s, p, C: tl.constexpr):
    """Return rows [BN, ...] of keys or values, zero where no query sees the key, because NaN times
    weight 0 is NaN.

    Rows hidden by bounds or key masks are not loaded at all.
    """
    if (
        (p.mask.data is not None and not C.KEY_MASK)
        or p.bias.data is not None
        or p.query_segments is not None
        or C.BLOCK_KEYS
    ):
        m_j = tl.max(m_s.to(tl.int32), 0) != 0
        b_rows = tl.where(m_j[:, None], b_rows, 0.0).to(b_rows.dtype)
    return b_rows


@triton.jit
def query_tile(p, C: tl.constexpr):
    """Return (Q tile, batch, head) of this program; with causality, tiles with the most keys come
    first.
    """
    tiles = (p.num_queries + C.BM - 1) // C.BM
    i_bh = tl.program_id(0) // tiles
    i_tile = tl.program_id(0) % tiles
    if C.CAUSAL:
        i_tile = tiles - 1 - i_tile
    return i_tile, i_bh // p.heads, i_bh % p.heads


@triton.jit
def tile_rows(i_tile, i_head, p, C: tl.constexpr):
    """Return [BM] queries of a tile's rows, and their heads, or one head for all."""
    i = i_tile * C.BM + tl.arange(0, C.BM)
    i_h = i_head
    if C.PACK_GQA:
        i_h = i_head + i % p.group
        i = i // p.group
    return i, i_h


@triton.jit
def finish(OUT, LSE, strides, row_q, num_q, i, i_b, i_h, b_m, b_l, b_o, p, C: tl.constexpr):
    """Write out and lse from each row's maximum, sum (0 without visible keys) and unnormalized
    output.
    """
    dead = b_l == 0.0
    b_scale = p.keep_scale
    if p.sinks is not None:
        b_m, b_l, alpha = with_sink(b_m, b_l, i_h, p, C)
        b_scale = alpha * p.keep_scale
    b_l = tl.where(dead, 1.0, b_l)
    b_lse = (b_m * LN2 if C.BASE2 else b_m) + tl.log2(b_l) * LN2
    if p.sinks is None:
        b_lse = tl.where(dead, float("-inf"), b_lse)
    else:
        b_sink = sink_of(i_h, p)
        b_lse = tl.maximum(b_lse, above_sink(b_sink), propagate_nan=tl.PropagateNan.ALL)
        b_lse = tl.where(dead, tl.where(i < num_q, b_sink, float("-inf")), b_lse)
    b_o = tl.where(dead[:, None], 0.0, b_o * (b_scale / b_l)[:, None])
    m_i = i < (
        num_q if p.cu_queries is not None or (C.PACK_GQA and C.DECODE_APART) else p.num_queries
    )
    store_rows(
        at_head(OUT, strides.o, i_b, column(i_h, C)), strides.o, row_q, i, m_i, b_o, C.DV, C.BDV
    )
    tl.store(at_row_stats(LSE, i_b, i_h, p) + row_q + i, b_lse, mask=m_i)


@triton.jit
def sink_of(i_h, p):
    """Return the sink of a row's head, -inf without one: a scalar, or [BM] if a tile's rows have
    different heads.

    +inf becomes half of the largest float, which is finite in base 2 too.
    """
    return tl.minimum(tl.load(p.sinks + i_h), 0.5 * FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def above_sink(b_sink):
    """Return the minimum lse of a query that sees a key, one or two ulp above its sink, so lse
    shows which queries see none.
    """
    ulp = tl.maximum(tl.abs(b_sink) * 1.1920929e-07, 1.17549435e-38)
    return tl.where(b_sink == float("-inf"), b_sink, b_sink + ulp)


@triton.jit
def with_sink(b_m, b_l, i_h, p, C: tl.constexpr):
    """Return maximum and sum of each row including its sink, in the units of scores, and the
    rescale of older sums.
    """
    b_sink = sink_of(i_h, p) * LOG2E if C.BASE2 else sink_of(i_h, p)
    top = tl.maximum(b_m, b_sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    alpha = power(b_m - safe, C)
    return top, b_l * alpha + power(b_sink - safe, C), alpha


@triton.jit
def column(x, C: tl.constexpr):
    """Return a per-head value: a scalar, or [BM] reshaped to [BM, 1] if a tile's rows have
    different heads.
    """
    if C.PACK_GQA:
        x = x[:, None]
    return x


@triton.jit
def at_head(P, strides, i_b, i_h):
    """Return P moved to one sequence and head."""
    return P + i_b.to(tl.int64) * strides.batch + i_h.to(tl.int64) * strides.head


@triton.jit
def at_key_head(P, strides, i_b, i_h, C: tl.constexpr):
    """Return at_head of keys or values; with pages, of the pool."""
    if C.PAGE_SIZE:
        P += i_h.to(tl.int64) * strides.head
    else:
        P = at_head(P, strides, i_b, i_h)
    return P


@triton.jit
def at_row_stats(P, i_b, i_h, p):
    """Return P, with one value per query, moved to a sequence and head: contiguous (B, Hq, Lq), or
    (Hq, total) if packed.
    """
    if p.cu_queries is not None:
        P += i_h.to(tl.int64) * p.total_queries
    else:
        P += (i_b.to(tl.int64) * p.heads + i_h) * p.num_queries
    return P
