"""Attention forward: online softmax over tiles of keys, one program for BM queries of one head.

    m' = max(m, max_j s);  l = l e^(m - m') + sum_j e^(s - m');  o = o e^(m - m') + sum_j drop(e^(s - m')) v_j
    out = o / l * keep_scale;  lse = m + ln l

Grid: one flat dimension over batch, query heads and tiles of queries. Scores, sums and o are float32 and stay in registers;
weights are rounded to value's dtype for the product. A row that sees nothing has l = 0 and gives 0 and -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import LN2, dot, launch, narrow
from .problem import Rows, choose, describe, row_values, rows
from .tiles import (
    at_head,
    kept,
    key_bounds,
    key_mask,
    key_origin,
    load_rows,
    power,
    query_tile,
    scores,
    segments_of,
    sequence,
    store_rows,
    tile_range,
    visible,
    zero_of,
)


class ForwardStrides(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    o: Rows
    lse: Rows


@triton.jit(do_not_specialize=["p"])
def attention_forward(Q, K, V, OUT, LSE, strides, p, C: tl.constexpr):
    i_tile, i_b, i_h = query_tile(p, C)
    row_q, row_k, num_q, num_k, shift, prefix = sequence(p, i_b, C)
    Q = at_head(Q, strides.q, i_b, i_h)
    K = at_head(K, strides.k, i_b, i_h // p.group)
    V = at_head(V, strides.v, i_b, i_h // p.group)
    OUT = at_head(OUT, strides.o, i_b, i_h)
    LSE = at_head(LSE, strides.lse, i_b, i_h)

    i = i_tile * C.BM + tl.arange(0, C.BM)
    lo, hi, m_i = key_bounds(i, num_q, num_k, shift, prefix, p, C)
    origin = key_origin(p, C)
    first, whole, whole_end, last, start, end = tile_range(lo, hi, m_i, origin, C.BN)
    b_q = load_rows(Q, strides.q, row_q, i, m_i, True, C.D, C.BD)  # [BM, BD]
    segment_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)

    b_m = tl.full([C.BM], float("-inf"), tl.float32)
    b_l = tl.full([C.BM], 0.0, tl.float32)
    b_o = tl.full([C.BM, C.BDV], 0.0, tl.float32)
    for PART in tl.static_range(3):  # tiles cut by the lower bounds, whole ones, tiles cut by the upper bounds
        if PART != 0 or C.LEFT or not C.ALIGNED:
            from_tile = first if PART == 0 else (whole if PART == 1 else whole_end)
            to_tile = whole if PART == 0 else (whole_end if PART == 1 else last)
            for t in range(from_tile, to_tile):
                j = origin + t * C.BN + tl.arange(0, C.BN)
                m_j = key_mask(j, i_b, i_h, (j >= start) & (j < end), p, C)
                b_k = load_rows(K, strides.k, row_k, j, m_j, PART != 1 or C.KEY_MASK, C.D, C.BD)  # [BN, BD]
                m_s = visible(i, j, lo, hi, m_i, m_j, PART != 1, p, C)
                segment_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
                b_s, _capped, m_s = scores(b_q, b_k, m_s, i, j, i_b, i_h, shift, segment_q, segment_k, p, C)

                b_top = tl.maximum(b_m, tl.max(b_s, 1))
                safe = tl.where(b_top == float("-inf"), 0.0, b_top)
                b_p = power(b_s - safe[:, None], C)  # [BM, BN]
                decay = power(b_m - safe, C)
                b_m = b_top
                b_l = b_l * decay + tl.sum(b_p, 1)
                b_v = load_rows(V, strides.v, row_k, j, m_j, PART != 1 or C.KEY_MASK, C.DV, C.BDV)  # [BN, BDV]
                if C.DROPOUT:
                    b_p = tl.where(kept(i, j, i_b, i_h, p, C), b_p, zero_of(p))
                b_o = dot(narrow(b_p, b_v.dtype), b_v, b_o * decay[:, None], C)

    dead = (b_l == 0.0) | ~m_i
    b_l = tl.where(dead, 1.0, b_l)
    b_lse = tl.where(dead, float("-inf"), (b_m * LN2 if C.BASE2 else b_m) + tl.log2(b_l) * LN2)
    b_o = tl.where(dead[:, None], 0.0, b_o * (p.keep_scale / b_l)[:, None])
    m_i = i < (num_q if p.cu_queries is not None else p.num_queries)
    store_rows(OUT, strides.o, row_q, i, m_i, b_o, C.DV, C.BDV)
    tl.store(LSE + (row_q + i) * strides.lse.row, b_lse, mask=m_i)


def forward(a: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out and lse of the op's arguments; last dimensions contiguous."""
    tile = choose("forward", a)
    p, kind = describe(a, tile)
    strides = ForwardStrides(rows(a.query), rows(a.key), rows(a.value), rows(out), row_values(lse))
    launch(
        attention_forward, programs(a, p, tile.BM), a.query.device, a.query, a.key, a.value, out, lse, strides, p, kind,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def programs(a: Any, p: Any, block: int) -> int:
    """Tiles of queries in all sequences and heads."""
    batch = a.cu_seqlens_q.shape[0] - 1 if p.cu_queries is not None else a.query.shape[0]
    return batch * p.heads * -(-p.num_queries // block)
