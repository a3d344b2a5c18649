# SPDX-License-Identifier: Apache-2.0
"""Attention backward, deterministic and without atomics: one program owns each sum and adds in a
fixed order.

    P = e^(s - lse),  D = rows of (out * d_out) - d_lse
    dP = keep * keep_scale * (d_out @ valueᵀ),  dS = P * (dP - D)
    dX = dS * (1 - (s / softcap)²) with softcap, else dS
    d_value = (keep * keep_scale * P)ᵀ @ d_out
    d_query = scale * dX @ key;  d_key = scale * dXᵀ @ query
    d_mask, d_bias, d_slopes, d_table: sums of dS

``preprocess`` computes D, each row's maximum and d_sink = -sum of e^(sink - lse) * D. A program of
``dkdv`` owns a KV tile (for all query heads of its key head), one of ``dq`` a Q tile, one of
``dbias`` a tile of a mask's or bias's gradient, in whose shape it sums over broadcast dimensions.
Each recomputes S with queries as rows, the orientation with a cheap dropout mask. ``dkdv`` without
dropout may use keys as rows, so that weights and dS are in place for its other two gemms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.ops._problem.attention import AttentionProblem

from .._lang import LOG2E, dot, kernel, launch, narrow, steps_of
from .._launch import replayed
from .args import Rows, at_tile, dense_strides, lower, rows
from .configs import Launch, plan_backward
from .mask import (
    clipped,
    key_bounds,
    key_mask,
    key_origin,
    kv_tiles,
    lists_of,
    query_bounds,
    segments_of,
    sequence,
    step_of_tile,
    tile_at,
    tile_range,
    visible,
    visible_keys,
    visible_rows,
    walk,
)
from .score_mod import distance, score_mod, softcap
from .softmax import dropped, keep_mask, power, sink_of, softmax_step, with_sink
from .tiles import (
    at_head,
    at_row_stats,
    load_rows,
    of_queries,
    query_tile,
    store_rows,
    tile_of,
)

LARGE = tl.constexpr(1024.0)  # above this, a rounded lse loses digits of the log of the sum


class BackwardStrides(NamedTuple):
    LAYOUT = True
    q: Rows
    k: Rows
    v: Rows
    o: Rows
    do: Rows
    dq: Rows | None = None
    dk: Rows | None = None
    dv: Rows | None = None


class Saved(NamedTuple):
    """Inputs of the backward kernels besides query, key and value."""

    do: torch.Tensor
    delta: torch.Tensor
    # With log2_sum the row's maximum; else lse in the units of scores. +inf for a row without
    # visible keys.
    row_max: torch.Tensor
    log2_sum: torch.Tensor | None


class QueryRows(NamedTuple):
    """The operands that backward loads of BM queries."""

    q: Any  # [BM, BD]
    do: Any  # [BM, BDV]
    row_max: Any  # [BM]
    log2_sum: Any
    delta: Any


class BiasGradient(NamedTuple):
    """Destination of a mask's or bias's gradient, and the extent that each element sums over."""

    data: torch.Tensor
    batch: int  # strides
    head: int
    query: int
    key: int | None  # None is 1
    batches: int  # sequences, heads and tiles that one program sums
    heads: int
    query_tiles: int
    key_tiles: int


# One tile.


@triton.jit
def tile_dot(b_queries, b_keys, C: tl.constexpr):
    """Return the tile of dot products of each query's row with each key's."""
    if C.KEYS_FIRST:
        b = dot(b_keys, tl.trans(b_queries), tile_of(0.0, tl.float32, C), C)
    else:
        b = dot(b_queries, tl.trans(b_keys), tile_of(0.0, tl.float32, C), C)
    return b


@triton.jit
def scores(b_q, b_k, m_s, i, j, i_b, i_h, offset, p, C: tl.constexpr):
    """Return (tile of scores, capped scores before any bias, visible mask)."""
    capped = softcap(tile_dot(b_q, b_k, C) * p.score_scale, p, C)
    b_s, m_s = score_mod(capped, m_s, i, j, i_b, i_h, offset, p, C)
    return b_s, capped, m_s


@triton.jit
def tile_gradients(b_k, b_v, b_rows, m_s, i, j, i_b, i_h, offset, p, C: tl.constexpr):
    """Return the tiles of weights after dropout (unscaled), dS and dX, and the visible mask."""
    b_s, capped, m_s = scores(b_rows.q, b_k, m_s, i, j, i_b, i_h, offset, p, C)
    b_p = power(b_s - of_queries(b_rows.row_max, C), C)
    if C.SPLIT_LSE:  # the sum is separate from the maximum
        b_p = tl.exp2(
            (b_s - of_queries(b_rows.row_max, C)) * LOG2E - of_queries(b_rows.log2_sum, C)
        )
    b_dp = tile_dot(b_rows.do, b_v, C)
    b_pd = b_p
    if C.DROPOUT:
        keep = keep_mask(i, j, i_b, i_h, p, C)
        b_pd = dropped(b_p, keep, p)
        b_dp = dropped(b_dp, keep, p)
    b_ds = tl.where(m_s, b_p * (b_dp * p.keep_scale - of_queries(b_rows.delta, C)), 0.0)
    b_dx = b_ds
    if C.SOFTCAP:
        capped = capped / p.softcap
        b_dx = tl.where(m_s, b_ds * (1.0 - capped * capped), 0.0)
    return b_pd, b_ds, b_dx, m_s


@triton.jit
def load_query_rows(
    Q, saved, strides, i, i_b, i_h, row_q, m_i, MASKED: tl.constexpr, p, C: tl.constexpr
):
    """Load what backward needs of BM queries; rows without visible keys are read as zero."""
    p_row = at_row_stats(row_q + i, i_b, i_h, p)
    b_row_max = tl.load(saved.row_max + p_row, mask=m_i, other=float("inf"))
    b_delta = tl.load(saved.delta + p_row, mask=m_i, other=0.0)
    b_log2_sum = b_delta
    if C.SPLIT_LSE:
        b_log2_sum = tl.load(saved.log2_sum + p_row, mask=m_i, other=0.0)
    b_q = load_rows(at_head(Q, strides.q, i_b, i_h), strides.q, row_q, i, m_i, MASKED, C.D, C.BD)
    b_do = load_rows(
        at_head(saved.do, strides.do, i_b, i_h), strides.do, row_q, i, m_i, MASKED, C.DV, C.BDV
    )
    if (
        p.mask.data is not None
        or p.bias.data is not None
        or p.query_segments is not None
        or C.BLOCK_KEYS
    ):
        m_live = (b_row_max != float("inf"))[:, None]
        b_q = tl.where(m_live, b_q, 0.0).to(b_q.dtype)
        b_do = tl.where(m_live, b_do, 0.0).to(b_do.dtype)
    return QueryRows(b_q, b_do, b_row_max, b_log2_sum, b_delta)


# preprocess.


@kernel
def attention_backward_preprocess(Q, K, OUT, LSE, DLSE, DSINKS, saved, strides, p, C: tl.constexpr):
    """Write the row stats of BM queries, and their part of the sink's gradient: delta, each row's
    maximum, and log2 of its sum if lse would lose it.
    """
    i_tile, _split, i_b, i_h = query_tile(p, C)
    seq = sequence(p, i_b, C)
    i = i_tile * C.BM + tl.arange(0, C.BM)
    m_i = i < seq.num_q
    p_row = at_row_stats(seq.row_q + i, i_b, i_h, p)
    b_lse = tl.load(LSE + p_row, mask=m_i, other=float("-inf"))
    m_q = m_i  # includes queries without visible keys
    b_sink = float("-inf") if p.sinks is None else sink_of(i_h, p)
    m_i = m_i & ((b_lse <= b_sink) == 0)
    b_o = load_rows(
        at_head(OUT, strides.o, i_b, i_h), strides.o, seq.row_q, i, m_i, True, C.DV, C.BDV
    )
    b_do = load_rows(
        at_head(saved.do, strides.do, i_b, i_h), strides.do, seq.row_q, i, m_i, True, C.DV, C.BDV
    )
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    if DLSE is not None:
        b_delta -= tl.load(DLSE + p_row, mask=m_i, other=0.0)
    b_row_max = b_lse * LOG2E if C.BASE2 else b_lse
    if C.SPLIT_LSE:
        b_log2_sum = tl.full([C.BM], 0.0, tl.float32)
        if tl.max(tl.where(m_i, tl.abs(b_lse), 0.0), 0) > LARGE:
            b_row_max, b_log2_sum = row_max_and_log2_sum(Q, K, i_tile, i_b, i_h, seq, strides, p, C)
        tl.store(saved.log2_sum + p_row, b_log2_sum, mask=i < seq.num_q)
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
    tl.store(saved.delta + p_row, b_delta, mask=i < seq.num_q)
    tl.store(saved.row_max + p_row, tl.where(m_i, b_row_max, float("inf")), mask=i < seq.num_q)


@triton.jit
def row_max_and_log2_sum(Q, K, i_tile, i_b, i_h, seq, strides, p, C: tl.constexpr):
    """Return each row's maximum score, and log2 of the sum: forward's loop without the values."""
    i = i_tile * C.BM + tl.arange(0, C.BM)
    bounds, m_i = key_bounds(i, seq, p, C)
    run = kv_tiles(bounds, m_i, p, C)
    b_q = load_rows(at_head(Q, strides.q, i_b, i_h), strides.q, seq.row_q, i, m_i, True, C.D, C.BD)
    seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)
    K = at_head(K, strides.k, i_b, i_h // p.group)
    b_m = tl.full([C.BM], float("-inf"), tl.float32)
    b_l = tl.full([C.BM], 0.0, tl.float32)
    steps = walk(clipped(run, run.first, run.last), i_b, i_h, i_tile, False, p, C)
    for n in range(steps.starts[2], steps.ends[2]):
        t, word = tile_at(n, steps, 0, False, p, C)
        j = run.origin + t * C.BN + tl.arange(0, C.BN)
        m_j = visible_keys(j, run.seen, i_b, i_h, p, C)
        b_k = load_rows(K, strides.k, seq.row_k, j, m_j, True, C.D, C.BD)
        seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
        m_s = visible(i, j, bounds, m_i, m_j, seg_q, seg_k, word, True, False, p, C)
        b_s, _capped, _m_s = scores(b_q, b_k, m_s, i, j, i_b, i_h, seq.offset, p, C)
        b_m, b_l, _alpha, _b_p = softmax_step(b_m, b_l, b_s, 1, C)
    if p.sinks is not None:
        b_m, b_l, _alpha = with_sink(b_m, b_l, i_h, p, C)
    return b_m, tl.log2(tl.where(b_l == 0.0, 1.0, b_l))


# dkdv.


@kernel
def attention_backward_dkdv(Q, K, V, DK, DV, saved, strides, p, C: tl.constexpr):
    """Compute d_key and d_value of BN keys, summed over the query heads that share them."""
    origin = key_origin(p, C)
    tiles = (p.num_keys - origin + C.BN - 1) // C.BN
    i_bh = tl.program_id(0) // tiles
    i_b = i_bh // (p.heads // p.group)
    i_hk = i_bh % (p.heads // p.group)
    seq = sequence(p, i_b, C)
    i_tile = tl.program_id(0) % tiles
    j = origin + i_tile * C.BN + tl.arange(0, C.BN)
    bounds, m_j = query_bounds(j, seq, p, C)
    run = tile_range(*bounds, m_j, 0, C.BM)
    # b_k: [BN, BD]
    b_k = load_rows(at_head(K, strides.k, i_b, i_hk), strides.k, seq.row_k, j, m_j, True, C.D, C.BD)
    # b_v: [BN, BDV]
    b_v = load_rows(
        at_head(V, strides.v, i_b, i_hk), strides.v, seq.row_k, j, m_j, True, C.DV, C.BDV
    )
    seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)

    b_dk = tl.full([C.BN, C.BD], 0.0, tl.float32)
    b_dv = tl.full([C.BN, C.BDV], 0.0, tl.float32)
    FIRST: tl.constexpr = C.FIRST_QUERY_PART
    for g in range(p.group if C.GROUPED else 1):
        i_h = i_hk * p.group + g
        m_k = key_mask(j, i_b, i_h, m_j, p, C)
        steps = walk(run, i_b, i_h, i_tile, True, p, C)
        # partial tiles at the lower bounds, full tiles, partial tiles at the upper bounds
        for PART in tl.static_range(FIRST, 3):
            for n in range(steps.starts[PART], steps.ends[PART]):
                t, word = tile_at(n, steps, i_tile, True, p, C)
                i = t * C.BM + tl.arange(0, C.BM)
                m_i = (i >= run.seen[0]) & (i < run.seen[1])
                b_rows = load_query_rows(
                    Q, saved, strides, i, i_b, i_h, seq.row_q, m_i, PART != 1, p, C
                )
                seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)
                m_s = visible(i, j, bounds, m_i, m_k, seg_q, seg_k, word, PART != 1, True, p, C)
                b_pd, _b_ds, b_dx, _m_s = tile_gradients(
                    b_k, b_v, b_rows, m_s, i, j, i_b, i_h, seq.offset, p, C
                )
                b_dv = dot(by_keys(narrow(b_pd, b_rows.do.dtype), C), b_rows.do, b_dv, C)
                b_dk = dot(by_keys(narrow(b_dx, b_rows.q.dtype), C), b_rows.q, b_dk, C)

    # Zero keys that no query sees: such a key may be in a full tile, with sums that are not its
    # own.
    b_dk = tl.where(m_j[:, None], b_dk * p.scale, 0.0)
    b_dv = tl.where(m_j[:, None], b_dv * p.keep_scale, 0.0)
    m_j = (j >= 0) & (j < (seq.num_k if p.cu_keys is not None else p.num_keys))
    if DK is not None:
        store_rows(
            at_head(DK, strides.dk, i_b, i_hk), strides.dk, seq.row_k, j, m_j, b_dk, C.D, C.BD
        )
    if DV is not None:
        store_rows(
            at_head(DV, strides.dv, i_b, i_hk), strides.dv, seq.row_k, j, m_j, b_dv, C.DV, C.BDV
        )


@triton.jit
def by_keys(tile, C: tl.constexpr):
    """Return the tile with keys as rows: with C.KEYS_FIRST in registers, else transposed through
    shared memory.
    """
    if not C.KEYS_FIRST:
        tile = tl.trans(tile)
    return tile


# dq.


@kernel
def attention_backward_dq(Q, K, V, DQ, DSLOPES, DTABLE, saved, strides, p, C: tl.constexpr):
    """Compute d_query of BM queries, and their partial gradients of slopes and the T5 table."""
    i_tile, _split, i_b, i_h = query_tile(p, C)
    seq = sequence(p, i_b, C)
    K = at_head(K, strides.k, i_b, i_h // p.group)
    V = at_head(V, strides.v, i_b, i_h // p.group)
    i = i_tile * C.BM + tl.arange(0, C.BM)
    bounds, m_i = key_bounds(i, seq, p, C)
    run = kv_tiles(bounds, m_i, p, C)
    b_rows = load_query_rows(Q, saved, strides, i, i_b, i_h, seq.row_q, m_i, True, p, C)
    seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)
    steps = walk(run, i_b, i_h, i_tile, False, p, C)

    b_dq = tl.full([C.BM, C.BD], 0.0, tl.float32)
    b_slope = tl.full([C.BM], 0.0, tl.float32)
    if DTABLE is not None:
        b_table = tl.full([C.BUCKETS], 0.0, tl.float32)
        before = tl.full([C.BM, C.BN], 0.0, tl.float32)  # dS of the previous tile
        left = run.last - 1  # index of the previous tile; finally of the last
    FIRST: tl.constexpr = C.FIRST_PART
    for PART in tl.static_range(FIRST, 3):
        for n in range(steps.starts[PART], steps.ends[PART]):
            t, word = tile_at(n, steps, 0, False, p, C)
            j = run.origin + t * C.BN + tl.arange(0, C.BN)
            m_j = visible_keys(j, run.seen, i_b, i_h, p, C)
            b_k = load_rows(K, strides.k, seq.row_k, j, m_j, PART != 1 or C.KEY_MASK, C.D, C.BD)
            b_v = load_rows(V, strides.v, seq.row_k, j, m_j, PART != 1 or C.KEY_MASK, C.DV, C.BDV)
            seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
            m_s = visible(i, j, bounds, m_i, m_j, seg_q, seg_k, word, PART != 1, False, p, C)
            _b_pd, b_ds, b_dx, m_s = tile_gradients(
                b_k, b_v, b_rows, m_s, i, j, i_b, i_h, seq.offset, p, C
            )
            b_dq = dot(narrow(b_dx, b_k.dtype), visible_rows(b_k, m_s, p, C), b_dq, C)
            if DSLOPES is not None:
                b_slope -= tl.sum(b_ds * distance(i, j, seq.offset, C), 1)
            if DTABLE is not None:
                if C.BLOCK_KEYS or C.GAP:
                    if t != left + 1:  # not adjacent
                        b_table += last_diagonals(before, i, left, seq.offset, run.origin, p, C)
                        before = tl.full([C.BM, C.BN], 0.0, tl.float32)
                    left = t
                sums = diagonal_sums(before, b_ds, C)
                b_table += by_bucket(sums, -C.BN, i, j, seq.offset, p.diagonals, C)
                before = b_ds

    i_program = (i_b * p.heads + i_h).to(tl.int64) * ((p.num_queries + C.BM - 1) // C.BM) + i_tile
    if DSLOPES is not None:
        tl.store(DSLOPES + i_program, tl.sum(b_slope, 0))
    if DTABLE is not None:
        if run.last > run.first:
            b_table += last_diagonals(before, i, left, seq.offset, run.origin, p, C)
        tl.store(DTABLE + i_program * C.BUCKETS + tl.arange(0, C.BUCKETS), b_table)
    if DQ is not None:
        m_i = i < (seq.num_q if p.cu_queries is not None else p.num_queries)
        store_rows(
            at_head(DQ, strides.dq, i_b, i_h),
            strides.dq,
            seq.row_q,
            i,
            m_i,
            b_dq * p.scale,
            C.D,
            C.BD,
        )


# The gradient of T5's table from tiles of dS: sums along diagonals, added per bucket of their
# distance. A gather skews a row of tiles, so that diagonals become columns. A diagonal crosses two
# adjacent tiles, so each tile is summed with the one to its left; a tile of zeros completes the
# diagonals that start in a run's last tile.


@triton.jit
def diagonal_sums(before, b_ds, C: tl.constexpr):
    """Return [BN]: sums of dS along the diagonals d0 - BN + c of this row of tiles, with one skew
    and one column sum.

    d0 is the diagonal of the first element of the tile b_ds; ``before`` is the tile to its left.
    """
    tl.static_assert(C.BM <= C.BN)
    r = tl.arange(0, C.BM)[:, None]
    c = tl.arange(0, C.BN)[None, :]
    return tl.sum(tl.gather(tl.where(c >= r, before, b_ds), (r + c) % C.BN, 1), 0)


@triton.jit
def last_diagonals(before, i, left, offset, origin, p, C: tl.constexpr):
    """Return [BUCKETS]: the sums that a tile to the right of the tile ``left`` would complete."""
    j = origin + left * C.BN + tl.arange(0, C.BN)
    nothing = tl.full([C.BM, C.BN], 0.0, tl.float32)
    return by_bucket(diagonal_sums(before, nothing, C), 0, i, j, offset, p.diagonals, C)


@triton.jit
def by_bucket(sums, step, i, j, offset, diagonals, C: tl.constexpr):
    """Return [BUCKETS]: the sums of the diagonals from the tile's first one plus step on, added per
    bucket.
    """
    d = tl.min(j, 0) - tl.min(i, 0) - offset + step
    d = tl.minimum(tl.maximum(d, diagonals.d_min), diagonals.d_max)
    bucket = tl.load(diagonals.bucket + diagonals.zero + d + tl.arange(0, C.BN))
    return tl.sum(
        tl.where(bucket[:, None] == tl.arange(0, C.BUCKETS)[None, :], sums[:, None], 0.0), 0
    )


# dbias.


@kernel
def attention_backward_dbias(Q, K, V, grad, saved, strides, p, C: tl.constexpr):
    """Compute one tile of a mask's or bias's gradient, summed over the sequences, heads, queries
    and keys that share it.
    """
    origin = key_origin(p, C)
    key_tiles = (p.num_keys - origin + C.BN - 1) // C.BN // grad.key_tiles
    query_tiles = (p.num_queries + C.BM - 1) // C.BM // grad.query_tiles
    heads = p.heads // grad.heads
    pid = tl.program_id(0)
    i_key = pid % key_tiles
    i_query = pid // key_tiles % query_tiles
    i_head = pid // key_tiles // query_tiles % heads
    i_batch = pid // key_tiles // query_tiles // heads

    b_sum = tl.full([C.BM, C.BN], 0.0, tl.float32)
    for b in range(grad.batches):
        i_b = i_batch + b
        seq = sequence(p, i_b, C)
        for h in range(grad.heads):
            i_h = i_head + h
            K_head = at_head(K, strides.k, i_b, i_h // p.group)
            V_head = at_head(V, strides.v, i_b, i_h // p.group)
            for i_tile in range(i_query, i_query + grad.query_tiles):
                i = i_tile * C.BM + tl.arange(0, C.BM)
                bounds, m_i = key_bounds(i, seq, p, C)
                run = kv_tiles(bounds, m_i, p, C)
                b_rows = load_query_rows(Q, saved, strides, i, i_b, i_h, seq.row_q, m_i, True, p, C)
                seg_q = segments_of(p.query_segments, i_b, p.num_queries, i, m_i)
                first = step_of_tile(i_key, run.gap, C)
                run = clipped(run, first, step_of_tile(i_key + grad.key_tiles, run.gap, C))
                steps = walk(run, i_b, i_h, i_tile, False, p, C)
                for n in range(steps.starts[2], steps.ends[2]):
                    t, word = tile_at(n, steps, 0, False, p, C)
                    j = origin + t * C.BN + tl.arange(0, C.BN)
                    m_j = visible_keys(j, run.seen, i_b, i_h, p, C)
                    b_k = load_rows(K_head, strides.k, seq.row_k, j, m_j, True, C.D, C.BD)
                    b_v = load_rows(V_head, strides.v, seq.row_k, j, m_j, True, C.DV, C.BDV)
                    seg_k = segments_of(p.key_segments, i_b, p.num_keys, j, m_j)
                    m_s = visible(i, j, bounds, m_i, m_j, seg_q, seg_k, word, True, False, p, C)
                    _b_pd, b_ds, _b_dx, _m_s = tile_gradients(
                        b_k, b_v, b_rows, m_s, i, j, i_b, i_h, seq.offset, p, C
                    )
                    b_sum += b_ds

    # Sum over the tile's broadcast dimensions, then write the tile, a row, a column or one number.
    i = i_query * C.BM + tl.arange(0, C.BM)
    j = origin + i_key * C.BN + tl.arange(0, C.BN)
    m_i = i < p.num_queries
    m_j = (j >= 0) & (j < p.num_keys)
    if C.SUM_QUERIES:
        b_sum = tl.broadcast_to(tl.sum(b_sum, 0)[None, :], [C.BM, C.BN])
        m_i = i == 0
    if C.SUM_KEYS:
        b_sum = tl.broadcast_to(tl.sum(b_sum, 1)[:, None], [C.BM, C.BN])
        m_j = j == 0
    p_tile = at_head(grad.data, grad, i_batch, i_head)
    p_tile += i.to(tl.int64)[:, None] * grad.query + steps_of(j.to(tl.int64)[None, :], grad.key)
    tl.store(p_tile, narrow(b_sum, grad.data.dtype.element_ty), mask=m_i[:, None] & m_j[None, :])


# Launches.


@replayed
def backward(
    a: AttentionProblem,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    wanted: dict[str, torch.Tensor],
) -> None:
    """Write the gradients in ``wanted``, keyed by the op's argument names; last dimensions are
    contiguous.
    """
    device, plan, (by_queries, by_keys) = (
        a.query.device,
        plan_backward(a, wanted),
        lists_of(a, False, True),
    )
    problem = lower(a)._replace(blocks=by_queries)
    delta, row_max = torch.empty_like(lse), torch.empty_like(lse)
    step = plan.dq
    p, kind, warps, stages = (
        at_tile(a, problem, step.tile),
        step.kind,
        step.tile.warps,
        step.tile.stages,
    )
    saved = Saved(grad_out, delta, row_max, torch.empty_like(lse) if kind.SPLIT_LSE else None)
    dq, dk, dv = (wanted.get(name) for name in ("query", "key", "value"))
    strides = BackwardStrides(
        *map(rows, (a.query, a.key, a.value, out, grad_out)),
        *(None if t is None else rows(t) for t in (dq, dk, dv)),
    )
    sinks = _alloc_partials(a, step, 1) if "sinks" in wanted else None
    launch(
        attention_backward_preprocess, step.programs, device, a.query, a.key, out, lse, grad_lse,
        sinks, saved, strides, p, kind,
        warps=warps, stages=1,
    )  # fmt: skip
    if sinks is not None:
        wanted["sinks"].copy_(sinks.sum((0, 2))[:, 0])
    if not wanted.keys().isdisjoint(("query", "slopes", "table")):
        slopes = _alloc_partials(a, step, 1) if "slopes" in wanted else None
        table = _alloc_partials(a, step, kind.BUCKETS) if "table" in wanted else None
        launch(
            attention_backward_dq, step.programs, device, a.query, a.key, a.value, dq, slopes,
            table, saved, strides, p, kind,
            warps=warps, stages=stages,
        )  # fmt: skip
        if slopes is not None:
            wanted["slopes"].copy_(slopes.sum((0, 2))[:, 0])
        if table is not None:
            wanted["table"].copy_(table.sum((0, 2))[:, : a.buckets[0]].t())
    if dk is not None or dv is not None:
        step = plan.dkdv
        launch(
            attention_backward_dkdv, step.programs, device, a.query, a.key, a.value, dk, dv, saved,
            strides,
            at_tile(a, problem, step.tile)._replace(blocks=by_keys), step.kind,
            warps=step.tile.warps, stages=step.tile.stages,
        )  # fmt: skip
    for name in wanted.keys() & {"mask", "bias"}:
        if name not in plan.dbias:
            wanted[name].zero_()
    for name, (step, shared) in plan.dbias.items():
        gradient = BiasGradient(wanted[name], *dense_strides(wanted[name]), *shared)
        launch(
            attention_backward_dbias, step.programs, device, a.query, a.key, a.value, gradient,
            saved, strides,
            at_tile(a, problem, step.tile), step.kind, warps=step.tile.warps,
            stages=step.tile.stages,
        )  # fmt: skip


def _alloc_partials(a: AttentionProblem, step: Launch, width: int) -> torch.Tensor:
    """Allocate float32 (sequences, heads, Q tiles, width): each program's part of a sum over all of
    them.
    """
    return torch.empty(
        (a.sequences, a.heads, -(-a.num_queries // step.tile.BM), width), device=a.query.device
    )
