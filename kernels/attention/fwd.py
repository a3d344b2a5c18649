# SPDX-License-Identifier: Apache-2.0
"""Attention forward: online softmax over KV tiles, one program for BM queries of one head.

    m' = max(m, max_j s);  l = l e^(m - m') + sum_j e^(s - m')
    o = o e^(m - m') + sum_j drop(e^(s - m')) v_j
    out = o / l * keep_scale;  lse = m + ln l

Grid: one flat dimension over batch, query heads and Q tiles. Scores, sums and o are float32 and
stay in registers; weights are rounded to value's dtype for the gemm. A row without visible keys has
l = 0 and gives 0 and -inf.

Decode uses this kernel with C.PACK_GQA: a tile's rows are the queries of all heads that share a key
head, so keys and values are read once. Long keys are split over programs, which write partial m, l
and o; ``attention_combine`` merges them. See decode.py.
"""

from __future__ import annotations

import torch
import triton.language as tl

from pytransformer.ops._problem.attention import AttentionProblem

from .._lang import kernel, launch
from .._launch import numbers, replayed
from .blocks import tile_at, walk
from .bounds import key_bounds, key_origin, key_steps, seen_keys, sequence
from .decode import (
    alloc_partials,
    attention_combine,
    kv_range,
    owned_queries,
    packed_tile,
    partial_row,
)
from .mask_lists import lists_of
from .plan import plan_forward
from .problem import ForwardStrides, at_tile, lower, rows
from .tiles import (
    at_head,
    at_key_head,
    column,
    finish,
    keep_mask,
    key_mask,
    key_pointers,
    load_at,
    load_rows,
    pages_of,
    power,
    query_tile,
    scales_at,
    scores,
    segments_of,
    tile_rows,
    visible,
    visible_rows,
    weighted_sum,
    widened,
    zero_of,
)


@kernel
def attention_forward(Q, K, V, OUT, LSE, partials, strides, p, C: tl.constexpr):
    if C.PACK_GQA:
        i_tile, i_split, i_b, i_head = packed_tile(p, C)
    else:
        i_tile, i_b, i_head = query_tile(p, C)
    row_q, row_k, num_q, num_k, offset, prefix = sequence(p, i_b, C)
    num_q = owned_queries(num_q, p, C)
    i, i_h = tile_rows(i_tile, i_head, p, C)
    bounds, m_i = key_bounds(i, num_q, num_k, offset, prefix, p, C)
    origin = key_origin(p, C)
    first, whole, whole_end, last, seen, gap = key_steps(bounds, m_i, origin, C)
    if C.SPLIT_KV:
        first, last = kv_range(first, last, i_split, num_q, num_k, p, C)
        whole = tl.minimum(tl.maximum(whole, first), last)
        whole_end = tl.minimum(tl.maximum(whole_end, whole), last)
    entry, rest, end_of_steps, gap = walk(
        i_b, i_head, i_tile, first, whole_end, last, gap, False, p, C
    )
    K = at_key_head(K, strides.k, i_b, i_head // p.group, C)
    V = at_key_head(V, strides.v, i_b, i_head // p.group, C)
    # b_q: [BM, BD]
    b_q = load_rows(
        at_head(Q, strides.q, i_b, column(i_h, C)), strides.q, row_q, i, m_i, True, C.D, C.BD
    )
    seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)

    b_m = tl.full([C.BM], float("-inf"), tl.float32)
    b_l = tl.full([C.BM], 0.0, tl.float32)
    b_o = tl.full([C.BM, C.BDV], 0.0, tl.float32)
    # partial tiles at the lower bounds, full tiles, partial tiles at the upper bounds
    for PART in tl.static_range(3):
        if PART == 2 or (not C.BLOCK_KEYS and (PART == 1 or C.LEFT or not C.ALIGNED)):
            from_step = first if PART == 0 else (whole if PART == 1 else rest)
            to_step = whole if PART == 0 else (whole_end if PART == 1 else end_of_steps)
            for n in range(from_step, to_step):
                t, word = tile_at(n, entry, gap, 0, False, p, C)
                j = origin + t * C.BN + tl.arange(0, C.BN)
                m_j = key_mask(j, i_b, i_head, seen_keys(j, seen, C), p, C)
                page = pages_of(j, m_j, i_b, p, C)
                p_k = key_pointers(K, strides.k, row_k, j, page, C.BD, C)
                b_k = load_at(p_k, m_j, PART != 1 or C.KEY_MASK, C.D, C.BD)  # [BN, BD]
                m_s = visible(i, j, bounds, m_i, m_j, word, PART != 1, False, p, C)
                seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
                k_scale = None
                if C.EIGHT_BITS:
                    k_scale = scales_at(
                        p.scales.key, p.scales.of_key, i_b, i_head // p.group, j, page, m_j, C
                    )
                b_k = widened(b_k, b_q.dtype, C)
                b_s, _capped, m_s = scores(
                    b_q, b_k, m_s, i, j, i_b, i_h, offset, seg_q, seg_k, p, C, k_scale
                )

                b_row_max = tl.maximum(b_m, tl.max(b_s, 1))
                safe = tl.where(b_row_max == float("-inf"), 0.0, b_row_max)
                b_p = power(b_s - safe[:, None], C)  # [BM, BN]
                alpha = power(b_m - safe, C)
                b_m = b_row_max
                b_l = b_l * alpha + tl.sum(b_p, 1)
                p_v = key_pointers(V, strides.v, row_k, j, page, C.BDV, C)
                b_v = load_at(p_v, m_j, PART != 1 or C.KEY_MASK, C.DV, C.BDV)  # [BN, BDV]
                if C.DROPOUT:
                    b_p = tl.where(keep_mask(i, j, i_b, i_h, p, C), b_p, zero_of(p))
                if C.EIGHT_BITS:
                    v_scale = scales_at(
                        p.scales.value, p.scales.of_value, i_b, i_head // p.group, j, page, m_j, C
                    )
                    b_p = b_p * tl.trans(visible_rows(v_scale[:, None], m_s, p, C))
                b_v = visible_rows(b_v, m_s, p, C)
                b_o = weighted_sum(b_p, b_v, b_o * alpha[:, None], b_q.dtype, C)

    b_l = tl.where(m_i, b_l, 0.0)
    if C.SPLIT_KV:
        row = partial_row(i_b, i_head, i_split, p, C.BM) + i_tile * C.BM + tl.arange(0, C.BM)
        tl.store(partials.m + row, b_m)
        tl.store(partials.l + row, b_l)
        tl.store(partials.o + row[:, None] * C.BDV + tl.arange(0, C.BDV)[None, :], b_o)
    else:
        finish(OUT, LSE, strides, row_q, num_q, i, i_b, i_h, b_m, b_l, b_o, p, C)


@replayed
def forward(a: AttentionProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out and lse of the op's arguments; last dimensions are contiguous."""
    plan, p, device = plan_forward(a), lower(a), a.query.device
    p = p._replace(split_kv=plan.split_kv)
    strides = ForwardStrides(rows(a.query), rows(a.key), rows(a.value), rows(out))
    partials = None if plan.combine is None else alloc_partials(plan, plan.combine.kind, device)
    # Decode comes after prefill, which writes zeros for sequences that it skips.
    for step in (plan.prefill, plan.decode):
        if step is not None:
            if step.kind.BLOCK_KEYS:
                p = p._replace(blocks=lists_of(a, False)[0])
            launch(
                attention_forward, step.programs, device, a.query, numbers(a.key), numbers(a.value),
                out, lse,
                partials if step.kind.SPLIT_KV else None, strides, at_tile(a, p, step.tile),
                step.kind,
                warps=step.tile.warps, stages=step.tile.stages,
            )  # fmt: skip
    if plan.combine is not None:
        launch(
            attention_combine, plan.combine.programs, device, out, lse, partials, strides,
            at_tile(a, p, plan.combine.tile),
            plan.combine.kind, plan.combine.tile.BM, p.split_kv.max_splits, warps=4, stages=1,
        )  # fmt: skip
