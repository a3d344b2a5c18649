# SPDX-License-Identifier: Apache-2.0
"""Visibility by position: a sequence's location, the key range of a query, the query range of a
key, and their tiles.

Positions are local to the sequence: query i is on the diagonal of key i + offset. A row's bounds
are the keys lo <= j < hi visible by causality, window, lengths and prefix; a column's bounds
likewise. A sequence's first KV tile starts at or before key 0, at an absolute multiple of 32, the
size of the dropout mask's groups.

With global keys and a window that ends on the left (C.GAP) a query also sees the keys before
``near``, and a program iterates over two runs of tiles, [0, ahead) and [bend, last). They form one
range of steps, [jump, last) with jump = bend - ahead: a step below ``bend`` is the tile ``jump``
before it. So loops are the same as for one range, and tiles in the gap are neither loaded nor
computed. If the runs touch, jump is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(1 << 29)


@triton.jit
def sequence(p, i_b, C: tl.constexpr):
    """Return (first query row, first key row, queries, keys, offset, prefix) of one sequence;
    lengths are clamped to the tensors.
    """
    row_q = tl.zeros([], tl.int64)
    row_k = tl.zeros([], tl.int64)
    end_q = tl.cast(p.query_start + p.num_queries, tl.int64)  # absolute
    end_k = tl.cast(p.key_start + p.num_keys, tl.int64)
    prefix = 0
    if p.cu_queries is not None:
        row_q = tl.minimum(tl.maximum(tl.load(p.cu_queries + i_b), 0), p.total_queries)
        if p.cu_keys is not None:  # None with pages, where key_lengths end the keys
            row_k = tl.minimum(tl.maximum(tl.load(p.cu_keys + i_b), 0), p.total_keys)
        end_q = tl.minimum(
            tl.minimum(tl.load(p.cu_queries + i_b + 1), p.total_queries) - row_q, end_q
        )
        if p.cu_keys is not None:
            after_k = tl.minimum(tl.load(p.cu_keys + i_b + 1), p.total_keys)
            end_k = tl.minimum(after_k - row_k, end_k)
    if p.query_lengths is not None:
        end_q = tl.minimum(tl.maximum(tl.load(p.query_lengths + i_b), 0), end_q)
    if p.key_lengths is not None:
        end_k = tl.minimum(tl.maximum(tl.load(p.key_lengths + i_b), 0), end_k)
    if p.prefix_lengths is not None:
        prefix = (tl.load(p.prefix_lengths + i_b) - p.key_start).to(tl.int32)
    offset = tl.cast(p.query_start - p.key_start, tl.int32)
    if C.BOTTOM_RIGHT:
        offset += (end_k - end_q).to(tl.int32)
    num_q = tl.maximum(end_q - p.query_start, 0).to(tl.int32)
    num_k = tl.maximum(end_k - p.key_start, 0).to(tl.int32)
    return row_q, row_k, num_q, num_k, offset, prefix


@triton.jit
def key_bounds(i, num_q, num_k, offset, prefix, p, C: tl.constexpr):
    """Return ((lo, hi, near), mask of non-empty) of the key range of each query of i: lo <= j < hi,
    and with C.GAP j < near.
    """
    lo = tl.zeros_like(i)
    hi = lo + num_k
    if C.CAUSAL:
        below = i + offset + 1
        if p.prefix_lengths is not None:
            below = tl.maximum(below, prefix)
        hi = tl.minimum(hi, below)
    near = hi
    if C.GLOBAL:
        near = tl.minimum(near, p.global_keys - p.key_start)
    if C.RIGHT:
        hi = tl.minimum(hi, i + offset + p.right + 1)
    if C.LEFT:
        lo = tl.maximum(lo, i + offset - p.left)
    elif C.GLOBAL:
        hi = tl.maximum(hi, near)
    m_i = lo < hi
    if C.GAP:
        m_i = m_i | (near > 0)
    return (lo, hi, near), (i < num_q) & m_i


@triton.jit
def query_bounds(j, num_q, num_k, offset, prefix, p, C: tl.constexpr):
    """Return ((lo, hi), mask of non-empty) of the query range of each key of j; the inverse of
    key_bounds.

    The queries that see a global key are one interval too, so there is no gap.
    """
    lo = tl.zeros_like(j)
    hi = lo + num_q
    if C.CAUSAL:
        above = j - offset
        if p.prefix_lengths is not None:
            above = tl.where(j < prefix, 0, above)
        lo = tl.maximum(lo, above)
    from_query = lo
    to_query = hi
    if C.RIGHT:
        lo = tl.maximum(lo, j - offset - p.right)
    if C.LEFT:
        hi = tl.minimum(hi, j - offset + p.left + 1)
    if C.GLOBAL:  # no window hides global keys
        m_global = j < p.global_keys - p.key_start
        lo = tl.where(m_global, from_query, lo)
        hi = tl.where(m_global, to_query, hi)
    return (lo, hi), (j >= 0) & (j < num_k) & (lo < hi)


@triton.jit
def tile_range(lo, hi, live, origin, SIZE: tl.constexpr):
    """Return tiles of SIZE from origin on: first, first full, end of full, end; and the first and
    end position any row sees.
    """
    start = tl.min(tl.where(live, lo, NOWHERE), 0)
    end = tl.max(tl.where(live, hi, 0), 0)
    inner = tl.max(tl.where(live, lo, 0), 0)
    outer = tl.min(tl.where(live, hi, NOWHERE), 0)
    first = (tl.minimum(start, end) - origin) // SIZE
    last = tl.maximum((end - origin + SIZE - 1) // SIZE, first)
    whole = tl.minimum((inner - origin + SIZE - 1) // SIZE, last)
    whole_end = tl.minimum(tl.maximum((outer - origin) // SIZE, whole), last)
    return first, whole, whole_end, last, start, end


@triton.jit
def key_steps(bounds, m_i, origin, C: tl.constexpr):
    """Return the steps over KV tiles of a Q tile: first, first full, end of full, end.

    Also returns the keys that any query sees, for ``seen_keys``; and the gap, for ``tile_of_step``.
    """
    lo, hi, near = bounds
    # If the windows of some queries have ended, another query's window may contain one key, the
    # last; no tile is full then.
    if C.GAP:
        bend, whole, whole_end, last, start, end = tile_range(lo, hi, m_i & (lo < hi), origin, C.BN)
        near_end = tl.max(tl.where(m_i, near, 0), 0)
        ahead = tl.where(near_end > 0, (near_end - origin + C.BN - 1) // C.BN, 0)
        jump = tl.maximum(bend - ahead, 0)
        return jump, whole, whole_end, tl.maximum(last, ahead), (start, end, near_end), (bend, jump)
    else:
        first, whole, whole_end, last, start, end = tile_range(lo, hi, m_i, origin, C.BN)
        return first, whole, whole_end, last, (start, end), (0, 0)


@triton.jit
def seen_keys(j, seen, C: tl.constexpr):
    """Return the mask of the keys of j that any query of the tile may see."""
    m_j = (j >= seen[0]) & (j < seen[1])
    if C.GAP:
        m_j = m_j | ((j >= 0) & (j < seen[2]))
    return m_j


@triton.jit
def tile_of_step(n, gap, C: tl.constexpr):
    """Return the KV tile of step n: n, or n - ``jump`` before the gap's end."""
    if C.GAP:
        n = tl.where(n < gap[0], n - gap[1], n)
    return n


@triton.jit
def step_of_tile(t, gap, C: tl.constexpr):
    """Return the first step whose tile is t or later."""
    if C.GAP:
        t = tl.maximum(t, tl.minimum(t + gap[1], gap[0]))
    return t


@triton.jit
def key_origin(p, C: tl.constexpr):
    """Return the start of the first KV tile: 0, or before it at an absolute multiple of 32."""
    if C.ALIGNED:
        return 0
    return -tl.cast(p.key_start % 32, tl.int32)
