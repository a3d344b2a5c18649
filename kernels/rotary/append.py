# SPDX-License-Identifier: Apache-2.0
"""append_kv in one launch: the first programs rotate queries, the next rotate keys into the cache,
the last copy values.

Positions outside the cache and pages outside the pool are not written. An eight-bit cache stores
``x / s`` rounded to nearest, ``s = max(amax |x| / limit, 2^-126)``, of a row first rounded to
query's dtype: bit for bit quantize_kv.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import kernel, launch, narrow
from .._launch import numbers, replayed
from .configs import WARPS, kind_of
from .fwd import turned_row
from .rows import (
    Problem,
    Rows,
    at,
    load_row,
    pairs_of,
    place,
    rows_of,
    store_row,
    strides,
    table_strides,
)


class AppendStrides(NamedTuple):
    LAYOUT = True
    query: Rows
    key: Rows
    value: Rows
    out: Rows
    key_cache: Rows
    value_cache: Rows
    key_scale: Rows | None
    value_scale: Rows | None
    table: Rows | None


class Cache(NamedTuple):
    """Cache sizes. Without a page table a sequence is one page."""

    limit: int  # positions per sequence
    page_size: int
    pages: int  # per sequence, in the table
    num_pages: int


class Operands(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    pages: torch.Tensor | None
    positions: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor


class Columns(NamedTuple):
    """Pairs and columns of a row: arguments, because their divisors decide the width of loads."""

    LAYOUT = True
    half: int
    dim: int
    value_half: int
    value_dim: int


@triton.jit
def cache_rows(POSITIONS, PAGES, b, l, m_r, cache, length):
    """Return (sequence or page, row in it, mask of existing rows) for rows at these positions."""
    position = tl.load(POSITIONS + b * length + l, mask=m_r, other=-1)
    m = m_r & (position >= 0) & (position < cache.limit)
    first = b
    position = tl.where(m, position, 0).to(tl.int32)
    if PAGES is not None:
        first = tl.load(PAGES + b * cache.pages + position // cache.page_size, mask=m, other=-1).to(
            tl.int64
        )
        m = m & (first >= 0) & (first < cache.num_pages)
        position = position % cache.page_size
    return first, position.to(tl.int64), m


@triton.jit
def sizes(b):
    """Return |b| as integers, which are ordered: finite values, Inf, NaN."""
    return b.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def eight_bits(b, b_scale, dtype: tl.constexpr):
    """Return b / b_scale in int8, or float8_e4m3fn as uint8, rounded to nearest even; zeros where
    the scale is NaN.

    Adding 1.5 * 2^23 rounds a float32 to an integer; adding 2^14 rounds it to a multiple of 2^-9,
    the smallest float8_e4m3fn.
    """
    b = tl.div_rn(b, tl.broadcast_to(b_scale[:, None], b.shape))
    if dtype == tl.int8:
        bits = (b + 12582912.0).to(tl.int32, bitcast=True)
    else:
        size = sizes(b)
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        bits = tl.where(size < 0x3C800000, small, normal) | (
            (b.to(tl.int32, bitcast=True) >> 24) & 0x80
        )
    return tl.where((b_scale == b_scale)[:, None], bits, 0).to(dtype)


@triton.jit
def as_stored(
    b_1,
    b_2,
    b_rest,
    SCALE,
    p_scale,
    m_r,
    row_dtype: tl.constexpr,
    dtype: tl.constexpr,
    C: tl.constexpr,
):
    """Return a row in the cache's dtype; for eight bits, store its scale."""
    b_1, b_2, b_rest = narrow(b_1, row_dtype), narrow(b_2, row_dtype), narrow(b_rest, row_dtype)
    if SCALE is not None:
        b_1, b_2, b_rest = b_1.to(tl.float32), b_2.to(tl.float32), b_rest.to(tl.float32)
        largest = tl.max(tl.maximum(sizes(b_1), sizes(b_2)), 1)
        if C.BR:
            largest = tl.maximum(largest, tl.max(sizes(b_rest), 1))
        limit = tl.full(largest.shape, 127.0 if dtype == tl.int8 else 448.0, tl.float32)
        b_scale = tl.maximum(
            tl.div_rn(largest.to(tl.float32, bitcast=True), limit), 1.1754943508222875e-38
        )
        b_scale = tl.where(largest < 0x7F800000, b_scale, float("nan"))
        tl.store(SCALE + p_scale, b_scale, mask=m_r)
        b_1, b_2, b_rest = (
            eight_bits(b_1, b_scale, dtype),
            eight_bits(b_2, b_scale, dtype),
            eight_bits(b_rest, b_scale, dtype),
        )
    return b_1, b_2, b_rest


@triton.jit
def append_queries(i_tile, o, n, s, p, C: tl.constexpr):
    r = rows_of(i_tile, C)
    m_r = r < p.rows
    b, h, l = place(r, p.heads, p.length)
    p_table = at(s.table, b, h, l) if o.cos is not None else r
    p_x = at(s.query, b, h, l)
    b_1, b_2, b_rest = turned_row(
        o.query, o.cos, o.sin, o.q_norm, None, p_x, p_table, r, m_r, n.half, n.dim, p, C
    )
    dtype: tl.constexpr = o.out.dtype.element_ty
    b_1, b_2, b_rest = narrow(b_1, dtype), narrow(b_2, dtype), narrow(b_rest, dtype)
    store_row(o.out, at(s.out, b, h, l), m_r, n.half, n.dim, b_1, b_2, b_rest, C.ROWS, C)


@triton.jit
def append_keys(i_tile, o, n, s, p, cache, C: tl.constexpr):
    r = rows_of(i_tile, C)
    m_r = r < p.rows
    b, h, l = place(r, p.heads, p.length)
    p_table = at(s.table, b, h, l) if o.cos is not None else r
    first, row, m_r = cache_rows(o.positions, o.pages, b, l, m_r, cache, p.length)
    p_x = at(s.key, b, h, l)
    b_1, b_2, b_rest = turned_row(
        o.key, o.cos, o.sin, o.k_norm, None, p_x, p_table, r, m_r, n.half, n.dim, p, C
    )
    dtype: tl.constexpr = o.key_cache.dtype.element_ty
    p_scale = at(s.key_scale, first, h, row) if o.key_scale is not None else r
    b_1, b_2, b_rest = as_stored(
        b_1, b_2, b_rest, o.key_scale, p_scale, m_r, o.key.dtype.element_ty, dtype, C
    )
    store_row(
        o.key_cache, at(s.key_cache, first, h, row), m_r, n.half, n.dim, b_1, b_2, b_rest, C.ROWS, C
    )


@triton.jit
def append_values(i_tile, o, n, s, p, cache, C: tl.constexpr):
    r = rows_of(i_tile, C)
    m_r = r < p.rows
    b, h, l = place(r, p.heads, p.length)
    first, row, m_r = cache_rows(o.positions, o.pages, b, l, m_r, cache, p.length)
    b_1, b_2, b_rest = load_row(
        o.value, at(s.value, b, h, l), m_r, n.value_half, n.value_dim, C.ROWS, C
    )
    dtype: tl.constexpr = o.value_cache.dtype.element_ty  # exact through float32 and back
    p_scale = at(s.value_scale, first, h, row) if o.value_scale is not None else r
    b_1, b_2, b_rest = as_stored(
        b_1, b_2, b_rest, o.value_scale, p_scale, m_r, o.value.dtype.element_ty, dtype, C
    )
    p_out = at(s.value_cache, first, h, row)
    store_row(o.value_cache, p_out, m_r, n.value_half, n.value_dim, b_1, b_2, b_rest, C.ROWS, C)


@kernel(do_not_specialize=["q_tiles", "k_tiles"])
def rotary_append(q_tiles, k_tiles, o, n, s, q, k, cache, C: tl.constexpr, VALUE: tl.constexpr):
    # Separate constants for rows of queries and keys, and of values: Triton 3.6 cannot pass on a
    # part of a combined object.
    i_tile = tl.program_id(0)
    if i_tile < q_tiles:
        append_queries(i_tile, o, n, s, q, C)
    elif i_tile < q_tiles + k_tiles:
        append_keys(i_tile - q_tiles, o, n, s, k, cache, C)
    else:
        append_values(i_tile - q_tiles - k_tiles, o, n, s, k, cache, VALUE)


@replayed
def append(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    page_table: torch.Tensor | None,
    positions: torch.Tensor,
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    *,
    interleaved: bool,
    eps: float,
    weight_offset: float,
) -> None:
    """Write out, the caches, and in eight bits their ``scales``. ``rows`` are query, key and value.

    The last dimension of each tensor of rows is contiguous; the page table and the positions are
    contiguous.
    """
    (query, key, value), (key_cache, value_cache) = rows, (numbers(t) for t in caches)
    batch, _, length, dim = query.shape
    half, value_dim = pairs_of(query, tables[0]), value.shape[3]
    size = query.element_size()
    kind, value_kind = (
        kind_of(half, dim, interleaved, size),
        kind_of(value_dim // 2, value_dim, False, size),
    )
    q, k = (
        Problem(batch * t.shape[1] * length, t.shape[1], length, eps, weight_offset)
        for t in (query, key)
    )
    q_tiles, k_tiles, v_tiles = (
        -(-p.rows // rows_kind.ROWS) for p, rows_kind in ((q, kind), (k, kind), (k, value_kind))
    )
    page_size, pages = key_cache.shape[2], 1 if page_table is None else page_table.shape[1]
    cache = Cache(pages * page_size, page_size, pages, key_cache.shape[0])
    s = AppendStrides(
        *map(strides, (query, key, value, out, key_cache, value_cache, *scales)),
        table_strides(tables[0]),
    )  # type: ignore[arg-type]
    o = Operands(
        *rows, key_cache, value_cache, *scales, page_table, positions, *tables, *norms, out
    )
    n = Columns(half, dim, value_dim // 2, value_dim)
    tiles = q_tiles + k_tiles + v_tiles
    launch(
        rotary_append,
        tiles,
        query.device,
        q_tiles,
        k_tiles,
        o,
        n,
        s,
        q,
        k,
        cache,
        kind,
        value_kind,
        warps=WARPS,
        stages=1,
    )
