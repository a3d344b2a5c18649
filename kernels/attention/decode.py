# SPDX-License-Identifier: Apache-2.0
"""Decode (split KV): few queries over many keys. Assigns work to programs and merges the splits'
partials.

    m = max_s m_s;  l = sum_s l_s e^(m_s - m);  o = sum_s o_s e^(m_s - m)    over splits s

A sequence is decoded if its rows, queries times the heads that share a key head, are at most
``max_rows``. Its visible keys are divided into equal runs of at least ``min_tiles`` tiles, at most
``max_splits`` runs. Both depend only on the sequence's lengths (plan.py), so a sequence gives the
same bits in any batch. If the host does not know all lengths, both forms are launched, and each
skips the other's sequences.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .._lang import kernel
from .bounds import sequence
from .plan import ForwardPlan
from .problem import Kind
from .tiles import finish, power, tile_rows


class Partials(NamedTuple):
    """Partials of each split of the keys: float32, rows (sequence, key head, split, row)."""

    m: torch.Tensor
    l: torch.Tensor
    o: torch.Tensor  # (rows, BDV)


# Host.


def alloc_partials(plan: ForwardPlan, kind: Kind, device: torch.device) -> Partials:
    """Allocate the splits' partials."""
    rows = plan.partial_rows
    m, l = torch.empty((2, rows), dtype=torch.float32, device=device)
    return Partials(m, l, torch.empty((rows, kind.BDV), dtype=torch.float32, device=device))


# Device.


@triton.jit
def packed_tile(p, C: tl.constexpr):
    """Return (row tile, split, batch, first query head) of this program."""
    i_split = tl.program_id(0) % p.split_kv.splits
    i_tile = tl.program_id(0) // p.split_kv.splits
    tiles = (p.split_kv.rows + C.BM - 1) // C.BM
    i_bh = i_tile // tiles
    heads = p.heads // p.group
    return i_tile % tiles, i_split, i_bh // heads, i_bh % heads * p.group


@triton.jit
def owned_queries(num_q, p, C: tl.constexpr):
    """Return the sequence's number of queries, or 0 if another launch processes it."""
    if C.DECODE_APART:
        decoded = num_q * p.group <= p.split_kv.max_rows
        num_q = tl.where(decoded, num_q, 0) if C.PACK_GQA else tl.where(decoded, 0, num_q)
    return num_q


@triton.jit
def kv_range(first, last, i_split, num_q, num_k, p, C: tl.constexpr):
    """Return one split's KV tiles. The tiles per split depend on the keys that the sequence's
    queries can see.
    """
    span = num_k
    if C.LEFT and (C.RIGHT or (C.CAUSAL and p.prefix_lengths is None)):
        right = 0 if C.CAUSAL and p.prefix_lengths is None else p.right
        span = p.left + right + 1 + num_q
        if C.GLOBAL:  # two runs of tiles, each partial at both ends
            span += p.global_keys + 2 * C.BN
        span = tl.minimum(num_k, span)
    tiles = (span + C.BN - 1) // C.BN + 1
    tiles = tl.maximum(
        p.split_kv.min_tiles, (tiles + p.split_kv.max_splits - 1) // p.split_kv.max_splits
    )
    first = tl.minimum(first + i_split * tiles, last)
    return first, tl.minimum(first + tiles, last)


@triton.jit
def partial_row(i_b, i_head, i_split, p, BM: tl.constexpr):
    """Return the index of a split's first row."""
    i_bh = (i_b * (p.heads // p.group) + i_head // p.group).to(tl.int64)
    return (i_bh * p.split_kv.splits + i_split) * ((p.split_kv.rows + BM - 1) // BM * BM)


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
    row_q, row_k, num_q, num_k, offset, prefix = sequence(p, i_b, C)
    num_q = owned_queries(num_q, p, C)
    i, i_h = tile_rows(i_row, i_head, p, C)  # [1]

    s = tl.arange(0, MAX_SPLITS)
    row = partial_row(i_b, i_head, s, p, BM) + i_row  # [MAX_SPLITS]
    m_s = s < p.split_kv.splits
    b_m = tl.load(partials.m + row, mask=m_s, other=float("-inf"))
    row_max = tl.max(b_m, 0)
    alpha = power(b_m - tl.where(row_max == float("-inf"), 0.0, row_max), C)
    b_l = tl.sum(tl.load(partials.l + row, mask=m_s, other=0.0) * alpha, 0)
    p_o = partials.o + row[:, None] * C.BDV + tl.arange(0, C.BDV)[None, :]
    b_o = tl.sum(tl.load(p_o, mask=m_s[:, None], other=0.0) * alpha[:, None], 0)  # [BDV]
    one = tl.full([1], 1.0, tl.float32)
    finish(
        OUT,
        LSE,
        strides,
        row_q,
        num_q,
        i,
        i_b,
        i_h,
        one * row_max,
        one * b_l,
        one[:, None] * b_o[None, :],
        p,
        C,
    )
