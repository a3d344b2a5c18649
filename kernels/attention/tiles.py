# SPDX-License-Identifier: Apache-2.0
"""Tiles of the attention kernels in memory and in registers: which tile a program has, its loads
and stores, pages and eight-bit values.

Names: i_ index of a program or loop, p_ pointers, b_ tile of values, m_ mask. Shapes in comments
are BM queries x BN keys, or the reverse with C.KEYS_FIRST; only of_queries, of_keys and tile_dot
(bwd.py) depend on the orientation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import narrow


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
def load_queries(Q, strides, i_b, i_h, row, i, m_i, C: tl.constexpr):
    """Load [BM, BD] rows of query; a row may have a head of its own."""
    return load_rows(
        at_head(Q, strides, i_b, column(i_h, C)), strides, row, i, m_i, True, C.D, C.BD
    )


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
    """Return the pointers of load_keys."""
    if C.PAGE_SIZE:
        row = page.to(tl.int64) * strides.batch + (j % C.PAGE_SIZE).to(tl.int64) * strides.row
        pointers = P + row[:, None] + tl.arange(0, WIDTH)[None, :]
    else:
        pointers = row_pointers(P, strides, row, j, WIDTH)
    return pointers


@triton.jit
def load_keys(
    P,
    strides,
    row,
    j,
    m_j,
    page,
    MASKED: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    C: tl.constexpr,
):
    """Load rows of keys or values j of a head, in their pages; P is the head's address in the
    sequence or pool.
    """
    pointers = key_pointers(P, strides, row, j, page, PADDED, C)
    return load_at(pointers, m_j, MASKED or C.KEY_MASK, WIDTH, PADDED)


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
def load_scales(VALUES: tl.constexpr, i_b, i_h, j, page, m_j, p, C: tl.constexpr):
    """Load [BN] scales of eight-bit keys or VALUES j of a head, 0 where m_j is false; else None."""
    b_scale = None
    if C.EIGHT_BITS:
        P = p.scales.value if VALUES else p.scales.key
        strides = p.scales.of_value if VALUES else p.scales.of_key
        P = at_key_head(P, strides, i_b, i_h, C)
        if C.PAGE_SIZE:
            P += page.to(tl.int64) * strides.batch + (j % C.PAGE_SIZE).to(tl.int64) * strides.row
        else:
            P += j.to(tl.int64) * strides.row
        b_scale = tl.load(P, mask=m_j, other=0.0)
    return b_scale


@triton.jit
def store_rows(P, strides, row, x, m_x, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    m = m_x[:, None] & (tl.arange(0, PADDED) < WIDTH)[None, :]
    tl.store(row_pointers(P, strides, row, x, PADDED), narrow(values, P.dtype.element_ty), mask=m)


@triton.jit
def query_tile(p, C: tl.constexpr):
    """Return (row tile, split of the keys, batch, first query head) of this program.

    With causality, tiles with the most keys come first.
    """
    if C.PACK_GQA:
        i_split = tl.program_id(0) % p.split_kv.splits
        i_tile = tl.program_id(0) // p.split_kv.splits
        tiles = (p.split_kv.rows + C.BM - 1) // C.BM
        i_bh = i_tile // tiles
        heads = p.heads // p.group
        return i_tile % tiles, i_split, i_bh // heads, i_bh % heads * p.group
    else:
        tiles = (p.num_queries + C.BM - 1) // C.BM
        i_bh = tl.program_id(0) // tiles
        i_tile = tl.program_id(0) % tiles
        if C.CAUSAL:
            i_tile = tiles - 1 - i_tile
        return i_tile, 0, i_bh // p.heads, i_bh % p.heads


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
