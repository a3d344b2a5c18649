# SPDX-License-Identifier: Apache-2.0
"""Row stats for attention's backward: delta, each row's maximum, and log2 of its sum if lse would
lose it.

Also computes the gradient of sinks, which needs nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import LOG2E, kernel
from .blocks import tile_at, walk
from .bounds import key_bounds, key_origin, key_steps, seen_keys, sequence
from .tiles import (
    at_head,
    at_row_stats,
    key_mask,
    load_rows,
    power,
    query_tile,
    scores,
    segments_of,
    sink_of,
    visible,
    with_sink,
)

LARGE = tl.constexpr(1024.0)  # above this, a rounded lse loses digits of the log of the sum


@kernel
def attention_backward_preprocess(Q, K, OUT, LSE, DLSE, DSINKS, saved, strides, p, C: tl.constexpr):
    """Write the row stats of BM queries (delta, row_max and log2_sum) and their part of the sink's
    gradient.
    """
    i_tile, i_b, i_h = query_tile(p, C)
    row_q, row_k, num_q, num_k, offset, prefix = sequence(p, i_b, C)
    i = i_tile * C.BM + tl.arange(0, C.BM)
    m_i = i < num_q
    p_row = at_row_stats(row_q + i, i_b, i_h, p)
    b_lse = tl.load(LSE + p_row, mask=m_i, other=float("-inf"))
    m_q = m_i  # includes queries without visible keys
    b_sink = float("-inf") if p.sinks is None else sink_of(i_h, p)
    m_i = m_i & ((b_lse <= b_sink) == 0)
    b_o = load_rows(at_head(OUT, strides.o, i_b, i_h), strides.o, row_q, i, m_i, True, C.DV, C.BDV)
    b_do = load_rows(
        at_head(saved.do, strides.do, i_b, i_h), strides.do, row_q, i, m_i, True, C.DV, C.BDV
    )
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if DLSE is not None:
        b_delta -= tl.load(DLSE + p_row, mask=m_i, other=0.0)
    b_row_max = b_lse * LOG2E if C.BASE2 else b_lse
    if C.SPLIT_LSE:
        b_log2_sum = tl.full([C.BM], 0.0, tl.float32)
        if tl.max(tl.where(m_i, tl.abs(b_lse), 0.0), 0) > LARGE:
            b_row_max, b_log2_sum = row_max_and_log2_sum(
                Q, K, i_tile, i_b, i_h, row_q, row_k, num_q, num_k, offset, prefix, strides, p, C
            )
        tl.store(saved.log2_sum + p_row, b_log2_sum, mask=i < num_q)
    if DSINKS is not None:
        unit = b_sink * LOG2E if C.BASE2 else b_sink
        b_ds = -b_delta * power(unit - b_row_max, C)
        if C.SPLIT_LSE:
            b_ds *= tl.exp2(-b_log2_sum)
        b_ds = tl.where(m_i, b_ds, 0.0)
        if DLSE is not None:  # without visible keys the sink has weight 1
            b_ds += tl.load(DLSE + p_row, mask=m_q & (b_lse == b_sink), other=0.0)
        i_program = (i_b * p.heads + i_h).to(tl.int64) * (
            (p.num_queries + C.BM - 1) // C.BM
        ) + i_tile
        tl.store(DSINKS + i_program, tl.where(b_sink == float("-inf"), 0.0, tl.sum(b_ds, 0)))
    tl.store(saved.delta + p_row, b_delta, mask=i < num_q)
    tl.store(saved.row_max + p_row, tl.where(m_i, b_row_max, float("inf")), mask=i < num_q)


@triton.jit
def row_max_and_log2_sum(
    Q, K, i_tile, i_b, i_h, row_q, row_k, num_q, num_k, offset, prefix, strides, p, C: tl.constexpr
):
    """Return each row's maximum score, and log2 of the sum: forward's loop without the values."""
    i = i_tile * C.BM + tl.arange(0, C.BM)
    bounds, m_i = key_bounds(i, num_q, num_k, offset, prefix, p, C)
    origin = key_origin(p, C)
    first, _whole, _whole_end, last, seen, gap = key_steps(bounds, m_i, origin, C)
    b_q = load_rows(at_head(Q, strides.q, i_b, i_h), strides.q, row_q, i, m_i, True, C.D, C.BD)
    seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)
    K = at_head(K, strides.k, i_b, i_h // p.group)
    b_m = tl.full([C.BM], float("-inf"), tl.float32)
    b_l = tl.full([C.BM], 0.0, tl.float32)
    entry, first, last, gap = walk(i_b, i_h, i_tile, first, first, last, gap, False, p, C)
    for n in range(first, last):
        t, word = tile_at(n, entry, gap, 0, False, p, C)
        j = origin + t * C.BN + tl.arange(0, C.BN)
        m_j = key_mask(j, i_b, i_h, seen_keys(j, seen, C), p, C)
        b_k = load_rows(K, strides.k, row_k, j, m_j, True, C.D, C.BD)
        seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
        m_s = visible(i, j, bounds, m_i, m_j, word, True, False, p, C)
        b_s, _capped, m_s = scores(b_q, b_k, m_s, i, j, i_b, i_h, offset, seg_q, seg_k, p, C)
        b_row_max = tl.maximum(b_m, tl.max(b_s, 1))
        safe = tl.where(b_row_max == float("-inf"), 0.0, b_row_max)
        b_l = b_l * power(b_m - safe, C) + tl.sum(power(b_s - safe[:, None], C), 1)
        b_m = b_row_max
    if p.sinks is not None:
        b_m, b_l, _alpha = with_sink(b_m, b_l, i_h, p, C)
    return b_m, tl.log2(tl.where(b_l == 0.0, 1.0, b_l))
