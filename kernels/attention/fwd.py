# SPDX-License-Identifier: Apache-2.0
"""Attention forward: online softmax over KV tiles, one program for BM queries of one head.

    m' = max(m, max_j s);  l = l e^(m - m') + sum_j e^(s - m')
    o = o e^(m - m') + sum_j drop(e^(s - m')) v_j
    out = o / l * keep_scale;  lse = m + ln l

Grid: one flat dimension over batch, query heads and Q tiles. Scores, sums and o are float32 and
stay in registers; weights are rounded to value's dtype for the gemm. A row without visible keys has
l = 0 and gives 0 and -inf.

Decode, few queries over many keys, uses this kernel with C.PACK_GQA: a tile's rows are the queries
of all heads that share a key head, so keys and values are read once. Long keys are split over
programs (split KV), which write partial m, l and o; ``attention_combine`` merges them:

    m = max_s m_s;  l = sum_s l_s e^(m_s - m);  o = sum_s o_s e^(m_s - m)    over splits s

A sequence is decoded if its rows, queries times the heads that share a key head, are at most
``max_rows``. Its visible keys are divided into equal runs of at least ``min_tiles`` tiles, at most
``max_splits`` runs. Both depend only on the sequence's lengths (configs.py), so a sequence gives
the same bits in any batch. If the host does not know all lengths, both forms are launched, and each
skips the other's sequences.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.ops._problem.attention import AttentionProblem

from .._lang import LN2, dot, kernel, launch, narrow
from .._launch import numbers, replayed
from .args import ForwardStrides, Kind, at_tile, lower, rows
from .configs import ForwardPlan, plan_forward
from .mask import (
    Range,
    key_bounds,
    kv_tiles,
    lists_of,
    segments_of,
    sequence,
    tile_at,
    visible,
    visible_keys,
    visible_rows,
    walk,
)
from .score_mod import score_mod, softcap
from .softmax import above_sink, dropped, keep_mask, sink_of, softmax_step, with_sink
from .tiles import (
    at_head,
    at_key_head,
    at_row_stats,
    column,
    load_keys,
    load_queries,
    load_scales,
    pages_of,
    query_tile,
    store_rows,
    tile_rows,
    widened,
)


class Partials(NamedTuple):
    """Partials of each split of the keys: float32, rows (sequence, key head, split, row)."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor  # (rows, BDV)


@kernel
def attention_forward(Q, K, V, OUT, LSE, partials, strides, p, C: tl.constexpr):
    i_tile, i_split, i_b, i_head = query_tile(p, C)
    seq = sequence(p, i_b, C)
    i, i_h = tile_rows(i_tile, i_head, p, C)  # [BM]
    bounds, m_i = key_bounds(i, seq, p, C)  # [BM]
    run = kv_tiles(bounds, m_i, p, C)
    if C.SPLIT_KV:
        run = kv_range(run, i_split, seq, p, C)
    steps = walk(run, i_b, i_head, i_tile, False, p, C)
    i_hk = i_head // p.group
    K = at_key_head(K, strides.k, i_b, i_hk, C)
    V = at_key_head(V, strides.v, i_b, i_hk, C)
    b_q = load_queries(Q, strides.q, i_b, i_h, seq.row_q, i, m_i, C)  # [BM, BD]
    seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)

    b_m = tl.full([C.BM], float("-inf"), tl.float32)
    b_l = tl.full([C.BM], 0.0, tl.float32)
    b_o = tl.full([C.BM, C.BDV], 0.0, tl.float32)
    # partial tiles at the lower bounds, full tiles, partial tiles at the upper bounds
    FIRST: tl.constexpr = C.FIRST_PART
    for PART in tl.static_range(FIRST, 3):
        for n in range(steps.starts[PART], steps.ends[PART]):
            t, word = tile_at(n, steps, 0, False, p, C)
            j = run.origin + t * C.BN + tl.arange(0, C.BN)  # [BN]
            m_j = visible_keys(j, run.seen, i_b, i_head, p, C)
            page = pages_of(j, m_j, i_b, p, C)
            # b_k: [BN, BD], m_s: [BM, BN]
            b_k = load_keys(K, strides.k, seq.row_k, j, m_j, page, PART != 1, C.D, C.BD, C)
            seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
            m_s = visible(i, j, bounds, m_i, m_j, seg_q, seg_k, word, PART != 1, False, p, C)
            k_scale = load_scales(False, i_b, i_hk, j, page, m_j, p, C)

            # b_s: [BM, BN], -inf where hidden
            b_s = dot(b_q, tl.trans(widened(b_k, b_q.dtype, C)), None, C) * p.score_scale
            if C.EIGHT_BITS:
                b_s = b_s * k_scale[None, :]
            b_s, m_s = score_mod(softcap(b_s, p, C), m_s, i, j, i_b, i_h, seq.offset, p, C)
            b_m, b_l, alpha, b_p = softmax_step(b_m, b_l, b_s, 1, C)  # b_p: [BM, BN]

            # b_v: [BN, BDV]
            b_v = load_keys(V, strides.v, seq.row_k, j, m_j, page, PART != 1, C.DV, C.BDV, C)
            if C.DROPOUT:
                b_p = dropped(b_p, keep_mask(i, j, i_b, i_h, p, C), p)
            v_scale = load_scales(True, i_b, i_hk, j, page, m_j, p, C)
            b_o = add_values(b_o, alpha, b_p, b_v, v_scale, m_s, b_q.dtype, p, C)

    b_l = tl.where(m_i, b_l, 0.0)
    if C.SPLIT_KV:
        row = partial_row(i_b, i_head, i_split, p, C.BM) + i_tile * C.BM + tl.arange(0, C.BM)
        tl.store(partials.m + row, b_m)
        tl.store(partials.l + row, b_l)
        tl.store(partials.o + row[:, None] * C.BDV + tl.arange(0, C.BDV)[None, :], b_o)
    else:
        finish(OUT, LSE, strides, seq, i, i_b, i_h, b_m, b_l, b_o, p, C)


@kernel
def attention_combine(
    OUT, LSE, partials, strides, p, C: tl.constexpr, BM: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """Merge the splits of one row of a decoded sequence, in an order that does not depend on the
    rest of the batch.
    """
    i_bh = tl.program_id(0) // p.split_kv.rows
    i_row = tl.program_id(0) % p.split_kv.rows
    heads = p.heads // p.group
    i_b = i_bh // heads
    i_head = i_bh % heads * p.group
    seq = sequence(p, i_b, C)
    i, i_h = tile_rows(i_row, i_head, p, C)  # [1]

    s = tl.arange(0, MAX_SPLITS)
    row = partial_row(i_b, i_head, s, p, BM) + i_row  # [MAX_SPLITS]
    m_s = s < p.split_kv.splits
    b_m = tl.load(partials.m + row, mask=m_s, other=float("-inf"))
    # Each split's maximum is a score of weight e^(m_s - m).
    row_max, _sum, _alpha, b_p = softmax_step(float("-inf"), 0.0, b_m, 0, C)  # b_p: [MAX_SPLITS]
    b_l = tl.sum(tl.load(partials.l + row, mask=m_s, other=0.0) * b_p, 0)
    p_o = partials.o + row[:, None] * C.BDV + tl.arange(0, C.BDV)[None, :]
    b_o = tl.sum(tl.load(p_o, mask=m_s[:, None], other=0.0) * b_p[:, None], 0)  # [BDV]
    one = tl.full([1], 1.0, tl.float32)
    row_max, b_l, b_o = one * row_max, one * b_l, one[:, None] * b_o[None, :]
    finish(OUT, LSE, strides, seq, i, i_b, i_h, row_max, b_l, b_o, p, C)


@triton.jit
def add_values(b_o, alpha, b_p, b_v, v_scale, m_s, dtype: tl.constexpr, p, C: tl.constexpr):
    """Return alpha * b_o + b_p @ b_v for float32 weights.

    A weight times an eight-bit scale may be too small for float16, so it is split into two
    bfloat16, which hold 16 of its bits.
    """
    if C.EIGHT_BITS:
        b_p = b_p * tl.trans(visible_rows(v_scale[:, None], m_s, p, C))
    b_v = visible_rows(b_v, m_s, p, C)
    acc = b_o * alpha[:, None]
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
def finish(OUT, LSE, strides, seq, i, i_b, i_h, b_m, b_l, b_o, p, C: tl.constexpr):
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
        b_lse = tl.where(dead, tl.where(i < seq.num_q, b_sink, float("-inf")), b_lse)
    b_o = tl.where(dead[:, None], 0.0, b_o * (b_scale / b_l)[:, None])
    m_i = i < (
        seq.num_q if p.cu_queries is not None or (C.PACK_GQA and C.DECODE_APART) else p.num_queries
    )
    store_rows(
        at_head(OUT, strides.o, i_b, column(i_h, C)), strides.o, seq.row_q, i, m_i, b_o, C.DV, C.BDV
    )
    tl.store(at_row_stats(LSE, i_b, i_h, p) + seq.row_q + i, b_lse, mask=m_i)


# Split KV.


@triton.jit
def kv_range(run, i_split, seq, p, C: tl.constexpr):
    """Return one split's range of KV tiles.

    The tiles per split depend on the keys that the sequence's queries can see.
    """
    span = seq.num_k
    if C.LEFT and (C.RIGHT or (C.CAUSAL and p.prefix_lengths is None)):
        right = 0 if C.CAUSAL and p.prefix_lengths is None else p.right
        span = p.left + right + 1 + seq.num_q
        if C.GLOBAL:  # two runs of tiles, each partial at both ends
            span += p.global_keys + 2 * C.BN
        span = tl.minimum(seq.num_k, span)
    tiles = (span + C.BN - 1) // C.BN + 1
    tiles = tl.maximum(
        p.split_kv.min_tiles, (tiles + p.split_kv.max_splits - 1) // p.split_kv.max_splits
    )
    first = tl.minimum(run.first + i_split * tiles, run.last)
    last = tl.minimum(first + tiles, run.last)
    full = tl.minimum(tl.maximum(run.full, first), last)
    full_end = tl.minimum(tl.maximum(run.full_end, full), last)
    return Range(first, full, full_end, last, run.origin, run.seen, run.gap)


@triton.jit
def partial_row(i_b, i_head, i_split, p, BM: tl.constexpr):
    """Return the index of a split's first row."""
    i_bh = (i_b * (p.heads // p.group) + i_head // p.group).to(tl.int64)
    return (i_bh * p.split_kv.splits + i_split) * ((p.split_kv.rows + BM - 1) // BM * BM)


def alloc_partials(plan: ForwardPlan, kind: Kind, device: torch.device) -> Partials:
    """Allocate the splits' partials."""
    rows = plan.partial_rows
    m, l = torch.empty((2, rows), dtype=torch.float32, device=device)
    return Partials(m, l, torch.empty((rows, kind.BDV), dtype=torch.float32, device=device))


# Launches.


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
