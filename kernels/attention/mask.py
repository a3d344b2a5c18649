# SPDX-License-Identifier: Apache-2.0
"""Visibility: the tiles that a program visits, and the visible pairs of a tile.

Bounds. Positions are local to the sequence: query i is on the diagonal of key i + offset. A row's
bounds are the keys lo <= j < hi visible by causality, window, lengths and prefix; a column's bounds
likewise. A sequence's first KV tile starts at or before key 0, at an absolute multiple of 32, the
size of the dropout mask's groups.

A causal window of 4 keys on the left, queries 8 to 11 (offset 0), KV tiles of 4 keys; x is visible:

    . . . . | x x x x | x . . .        query  8: lo = 4, hi = 9
    . . . . | . x x x | x x . .
    . . . . | . . x x | x x x .
    . . . . | . . . x | x x x x        query 11: lo = 7, hi = 12
    tile 0    tile 1    tile 2         first = 1, last = 3; none is full

Global keys. With a window that ends on the left (C.GAP) a query also sees the keys before ``near``,
and a program iterates over two runs of tiles, [0, ahead) and [bend, last). They form one range of
steps, [jump, last) with jump = bend - ahead: a step below ``bend`` is the tile ``jump`` before it.
So loops are the same as for one range, and tiles in the gap are neither loaded nor computed. If the
runs touch, jump is 0.

Block lists. A program's tile lies within one block of its side, so it has one list of blocks of the
other side: a run of entries (block, index of its bits, or -1 for a full block), in ascending order.
The tiles of its blocks, in sequence, are the steps of one flat loop, as regular as a loop over a
range of tiles. ``walk`` removes the steps outside the bounds from both ends, because both ascend,
and the gap behind global keys. Entries, blocks and indices are clamped: lists that change after
their check give wrong numbers, never accesses out of bounds. A dense boolean mask gets such lists
from two kernels (``lists_of``).

Pairs. ``visible`` returns a tile's mask by bounds, segments and block bits; score_mod.py reads
dense masks. Hidden scores are -inf.

Source: FlexAttention's lists of full and partial blocks (Dong et al., 2024); here both are in one
list, with bits, as in the CPU backend.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.ops._problem.attention import AttentionProblem, compact

from .._lang import apart_from_products, kernel, launch, not_negative, steps_of
from .args import BlockLists, block_lists, dense_of
from .configs import Listing, listing_of
from .tiles import at_head, of_keys, of_queries, tile_of

NOWHERE = tl.constexpr(1 << 29)
# Entries that a walk counts, and blocks that a list's program processes, per step.
CHUNK = tl.constexpr(128)


class Sequence(NamedTuple):
    """One sequence in the tensors, and its positions."""

    row_q: Any  # first row of queries and of keys; 0 unless packed
    row_k: Any
    num_q: Any
    num_k: Any
    offset: Any  # query i is on the diagonal of key i + offset
    prefix: Any


class Range(NamedTuple):
    """Tiles of the other side that any row of a program's tile sees, with C.GAP as steps."""

    first: Any
    full: Any  # tiles in [full, full_end) are visible to every row
    full_end: Any
    last: Any
    origin: Any  # position of tile 0
    seen: Any  # (start, end) of the positions any row sees; with C.GAP, then the end of global keys
    gap: Any  # (bend, jump)


class Steps(NamedTuple):
    """Steps of a program's loop in three ranges: partial tiles at the lower bounds, full tiles, and
    partial tiles at the upper bounds. Steps along a list are all in the last range.
    """

    starts: Any
    ends: Any
    entry: Any  # first entry of the list
    gap: Any


# Bounds.


@triton.jit
def sequence(p, i_b, C: tl.constexpr):
    """Return one sequence, with lengths clamped to the tensors. It has no queries if another launch
    processes it.
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
    if C.DECODE_APART:
        decoded = num_q * p.group <= p.split_kv.max_rows
        num_q = tl.where(decoded, num_q, 0) if C.PACK_GQA else tl.where(decoded, 0, num_q)
    return Sequence(row_q, row_k, num_q, num_k, offset, prefix)


@triton.jit
def key_bounds(i, seq, p, C: tl.constexpr):
    """Return ((lo, hi, near), mask of non-empty) of the key range of each query of i: lo <= j < hi,
    and with C.GAP j < near.
    """
    lo = tl.zeros_like(i)
    hi = lo + seq.num_k
    if C.CAUSAL:
        below = i + seq.offset + 1
        if p.prefix_lengths is not None:
            below = tl.maximum(below, seq.prefix)
        hi = tl.minimum(hi, below)
    near = hi
    if C.GLOBAL:
        near = tl.minimum(near, p.global_keys - p.key_start)
    if C.RIGHT:
        hi = tl.minimum(hi, i + seq.offset + p.right + 1)
    if C.LEFT:
        lo = tl.maximum(lo, i + seq.offset - p.left)
    elif C.GLOBAL:
        hi = tl.maximum(hi, near)
    m_i = lo < hi
    if C.GAP:
        m_i = m_i | (near > 0)
    return (lo, hi, near), (i < seq.num_q) & m_i


@triton.jit
def query_bounds(j, seq, p, C: tl.constexpr):
    """Return ((lo, hi), mask of non-empty) of the query range of each key of j; the inverse of
    key_bounds.

    The queries that see a global key are one interval too, so there is no gap.
    """
    lo = tl.zeros_like(j)
    hi = lo + seq.num_q
    if C.CAUSAL:
        above = j - seq.offset
        if p.prefix_lengths is not None:
            above = tl.where(j < seq.prefix, 0, above)
        lo = tl.maximum(lo, above)
    from_query = lo
    to_query = hi
    if C.RIGHT:
        lo = tl.maximum(lo, j - seq.offset - p.right)
    if C.LEFT:
        hi = tl.minimum(hi, j - seq.offset + p.left + 1)
    if C.GLOBAL:  # no window hides global keys
        m_global = j < p.global_keys - p.key_start
        lo = tl.where(m_global, from_query, lo)
        hi = tl.where(m_global, to_query, hi)
    return (lo, hi), (j >= 0) & (j < seq.num_k) & (lo < hi)


@triton.jit
def tile_range(lo, hi, live, origin, SIZE: tl.constexpr):
    """Return the range of tiles of SIZE between these bounds of rows; only ``live`` rows count."""
    start = tl.min(tl.where(live, lo, NOWHERE), 0)
    end = tl.max(tl.where(live, hi, 0), 0)
    inner = tl.max(tl.where(live, lo, 0), 0)
    outer = tl.min(tl.where(live, hi, NOWHERE), 0)
    first = (tl.minimum(start, end) - origin) // SIZE
    last = tl.maximum((end - origin + SIZE - 1) // SIZE, first)
    full = tl.minimum((inner - origin + SIZE - 1) // SIZE, last)
    full_end = tl.minimum(tl.maximum((outer - origin) // SIZE, full), last)
    return Range(first, full, full_end, last, origin, (start, end), (0, 0))


@triton.jit
def kv_tiles(bounds, m_i, p, C: tl.constexpr):
    """Return the range of KV tiles of a Q tile with these bounds."""
    lo, hi, near = bounds
    origin = key_origin(p, C)
    # If the windows of some queries have ended, another query's window may contain one key, the
    # last; no tile is full then.
    if C.GAP:
        run = tile_range(lo, hi, m_i & (lo < hi), origin, C.BN)
        bend = run.first
        near_end = tl.max(tl.where(m_i, near, 0), 0)
        ahead = tl.where(near_end > 0, (near_end - origin + C.BN - 1) // C.BN, 0)
        jump = tl.maximum(bend - ahead, 0)
        last = tl.maximum(run.last, ahead)
        seen = (run.seen[0], run.seen[1], near_end)
        return Range(jump, run.full, run.full_end, last, origin, seen, (bend, jump))
    else:
        return tile_range(lo, hi, m_i, origin, C.BN)


@triton.jit
def clipped(run, first, last):
    """Return the steps of the range from first to last, all as partial tiles."""
    first = tl.maximum(run.first, first)
    last = tl.minimum(run.last, last)
    return Range(first, first, first, last, run.origin, run.seen, run.gap)


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


# Block lists.


@triton.jit
def tiles_of_block(BY_KEYS: tl.constexpr, C: tl.constexpr):
    """Return the tiles per block along the walk: KV tiles, or Q tiles BY_KEYS, where a program owns
    keys.
    """
    if BY_KEYS:
        return C.BLOCK_QUERIES // C.BM
    return C.BLOCK_KEYS // C.BN


@triton.jit
def walk(run, i_b, i_h, i_tile, BY_KEYS: tl.constexpr, p, C: tl.constexpr):
    """Return the steps over a range of tiles, with lists only the tiles of listed blocks.

    i_tile is the program's tile.
    """
    entry, first, rest, last, gap = 0, run.first, run.full_end, run.last, run.gap
    if C.BLOCK_KEYS:
        row = i_tile * C.BN // C.BLOCK_KEYS if BY_KEYS else i_tile * C.BM // C.BLOCK_QUERIES
        p_list = (
            p.blocks.offsets
            + i_b.to(tl.int64) * p.blocks.batch
            + i_h * p.blocks.head
            + row * p.blocks.row
        )
        start = tl.minimum(tl.maximum(tl.load(p_list), 0), p.blocks.num_entries)
        end = tl.minimum(tl.maximum(tl.load(p_list + 1), start), p.blocks.num_entries)
        # the runs before and after the gap; the second counts steps from the first one's entry
        if C.GAP and not BY_KEYS:
            PER: tl.constexpr = tiles_of_block(BY_KEYS, C)
            bend, jump = gap
            entry, near, near_end = run_of_tiles(
                start, end, first - jump, tl.minimum(bend, last) - jump, BY_KEYS, p, C
            )
            behind, rest, last = run_of_tiles(
                start, end, tl.maximum(first, bend), last, BY_KEYS, p, C
            )
            near = tl.minimum(near, PER)  # as in all valid lists: no step precedes the first entry
            bend = tl.minimum(rest, PER) + (behind - entry) * PER
            last = tl.maximum(last + (behind - entry) * PER, bend)
            jump = bend - tl.maximum(near_end, near)
            rest = near + jump
            gap = (bend, jump)
        else:
            entry, rest, last = run_of_tiles(start, end, first, last, BY_KEYS, p, C)
    return Steps((run.first, run.full, rest), (run.full, run.full_end, last), entry, gap)


@triton.jit
def run_of_tiles(start, end, first, last, BY_KEYS: tl.constexpr, p, C: tl.constexpr):
    """Return (first entry, first step, end of the steps) of the tiles from first to last in the
    entries from start to end.
    """
    PER: tl.constexpr = tiles_of_block(BY_KEYS, C)
    before = 0  # blocks before the first tile, and blocks up to the last
    until = 0
    for chunk in range(start, end, CHUNK):
        e = chunk + tl.arange(0, CHUNK)
        b_block = tl.load(p.blocks.entries + 2 * e.to(tl.int64), mask=e < end, other=1 << 29)
        before += tl.sum((b_block < first // PER).to(tl.int32), 0)
        until += tl.sum((b_block <= (last - 1) // PER).to(tl.int32), 0)
    entry = start + before
    p_entry = p.blocks.entries + 2 * entry.to(tl.int64)
    count = until - before
    from_block = tl.load(p_entry, mask=count > 0, other=0)
    to_block = tl.load(p_entry + 2 * (count - 1), mask=count > 0, other=0)
    return (
        entry,
        tl.maximum(first - from_block * PER, 0),
        count * PER - tl.maximum((to_block + 1) * PER - last, 0),
    )


@triton.jit
def tile_at(n, steps, i_tile, BY_KEYS: tl.constexpr, p, C: tl.constexpr):
    """Return (tile, word of its first row's bits in its block, or -1 if nothing is hidden) of a
    step.

    Without lists a step is a tile; without bits (dense mask) there is no word.
    """
    word = 0
    if not BY_KEYS:
        n = tile_of_step(n, steps.gap, C)
    if C.BLOCK_KEYS:
        PER: tl.constexpr = tiles_of_block(BY_KEYS, C)
        p_entry = p.blocks.entries + 2 * (steps.entry + n // PER).to(tl.int64)
        block = tl.minimum(tl.maximum(tl.load(p_entry), 0), p.blocks.columns - 1)
        n = block * PER + n % PER
        key_tile = i_tile if BY_KEYS else n
    if C.BLOCK_KEYS and p.blocks.bits is not None:
        place = tl.minimum(tl.load(p_entry + 1), p.blocks.num_partial - 1)
        word = (
            place.to(tl.int64) * (C.BLOCK_QUERIES * C.BLOCK_KEYS // 32)
            + key_tile * C.BN % C.BLOCK_KEYS // 32
        )
        word = tl.where(place < 0, -1, word)
    return n, word


@triton.jit
def block_pairs(i, word, p, C: tl.constexpr):
    """Return the visible mask of a tile from its bits: one word per 32 keys of a query, expanded to
    the tile's layout.
    """
    p_row = p.blocks.bits + word + (i % C.BLOCK_QUERIES) * (C.BLOCK_KEYS // 32)
    if C.KEYS_FIRST:
        p_words = p_row[None, :] + tl.arange(0, C.BN // 32)[:, None]
        words = tl.load(p_words, mask=not_negative(word, p_words), other=-1)  # [BN / 32, BM]
        bits = words[:, None, :] & (1 << tl.arange(0, 32))[None, :, None]
        pairs = tl.reshape(bits, [C.BN, C.BM])
    else:
        p_words = p_row[:, None] + tl.arange(0, C.BN // 32)[None, :]
        words = tl.load(p_words, mask=not_negative(word, p_words), other=-1)  # [BM, BN / 32]
        bits = words[:, :, None] & (1 << tl.arange(0, 32))[None, None, :]
        pairs = tl.reshape(bits, [C.BM, C.BN])
    return pairs != 0


# Pairs.


@triton.jit
def key_mask(j, i_b, i_h, m_j, p, C: tl.constexpr):
    """Return m_j without keys that the mask hides from every query."""
    if C.KEY_MASK:
        p_mask = at_head(p.mask.data, p.mask, i_b, i_h)
        b_mask = tl.load(p_mask + steps_of(j.to(tl.int64), p.mask.key), mask=m_j, other=0)
        return m_j & (apart_from_products(b_mask, C) != 0)
    return m_j


@triton.jit
def visible_keys(j, seen, i_b, i_h, p, C: tl.constexpr):
    """Return the mask of the keys of j that a query of the tile may see: only these are loaded."""
    return key_mask(j, i_b, i_h, seen_keys(j, seen, C), p, C)


@triton.jit
def segments_of(P, i_b, num, x, m_x):
    """Load segment ids of rows or columns x; P is None or (B, L)."""
    if P is not None:  # a single return, because two would need one dtype
        x = tl.load(P + i_b.to(tl.int64) * num + x, mask=m_x, other=0)
    return x


@triton.jit
def visible(
    i,
    j,
    bounds,
    m_i,
    m_j,
    seg_q,
    seg_k,
    word,
    MASKED: tl.constexpr,
    BY_KEYS: tl.constexpr,
    p,
    C: tl.constexpr,
):
    """Return a tile's visible mask by bounds (of the queries, or BY_KEYS of the keys), segments and
    block mask.

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
    if p.query_segments is not None:
        m_s = m_s & (of_queries(seg_q, C) == of_keys(seg_k, C))
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


# Lists of the non-empty blocks of a dense boolean mask.
#
# The first kernel reports for each block if a pair is visible. The second writes the lists, one
# program per block of queries and, in backward, one per block of keys. The mask is read once more,
# with its strides, a broadcast dimension once; listed blocks are still checked per pair. Both use
# the mask alone; lengths and causality bound the lists later, as they bound ranges of tiles.
# Memory: 12 bytes per block, 20 in backward.


@kernel
def attention_mask_blocks(mask, STATES, heads, num_queries, num_keys, BLOCK: tl.constexpr):
    """Store 1 if a pair of the block is visible, else 0."""
    across = (num_keys + BLOCK - 1) // BLOCK
    down = (num_queries + BLOCK - 1) // BLOCK
    pid = tl.program_id(0)
    i_bh = pid // across // down
    i = pid // across % down * BLOCK + tl.arange(0, BLOCK)
    j = pid % across * BLOCK + tl.arange(0, BLOCK)
    p_head = (
        mask.data
        + (i_bh // heads).to(tl.int64) * mask.batch
        + (i_bh % heads).to(tl.int64) * mask.head
    )
    p_block = (
        p_head + i.to(tl.int64)[:, None] * mask.query + steps_of(j.to(tl.int64), mask.key)[None, :]
    )
    b = tl.load(p_block, mask=(i < num_queries)[:, None] & (j < num_keys)[None, :], other=0)
    tl.store(STATES + pid, tl.max(tl.max((b != 0).to(tl.int32), 1), 0))


@kernel
def attention_mask_lists(STATES, OFFSETS, ENTRIES, lists, length, step, stride):
    """Write one list: its start, its end, and its blocks in ascending order.

    ``step`` is the distance between the states of a list, ``stride`` between lists.
    """
    i_list = tl.program_id(0)
    i_bh = i_list // lists
    start = i_list * length
    p_states = STATES + i_bh * lists * length + i_list % lists * stride
    count = 0
    for chunk in range(0, length, CHUNK):
        n = chunk + tl.arange(0, CHUNK)
        b_state = tl.load(p_states + n * step, mask=n < length, other=0)
        place = start + count + tl.cumsum(b_state, 0) - b_state
        tl.store(ENTRIES + 2 * place.to(tl.int64), n, mask=b_state != 0)
        count += tl.sum(b_state, 0)
    tl.store(OFFSETS + 2 * i_list, start)
    tl.store(OFFSETS + 2 * i_list + 1, start + count)


def lists_of(a: AttentionProblem, *by_keys: bool) -> list[BlockLists]:
    """Return the lists that kernels use, per requested direction: by blocks of queries or of keys;
    empty without lists.
    """
    found = listing_of(a)
    if found is None:
        return [block_lists(a, way) for way in by_keys]
    made = MaskLists(a, found)
    return [made.lists(way) for way in by_keys]


class MaskLists:
    """States of the blocks of a call's mask, and lists of non-empty ones."""

    def __init__(self, a: AttentionProblem, found: Listing) -> None:
        assert a.mask is not None
        mask = compact(a.mask)
        self.shape = tuple(mask.shape[:2])
        self.block, self.device = found.block, a.query.device
        self.down, self.across = (-(-n // found.block) for n in (a.num_queries, a.num_keys))
        self.heads = self.shape[0] * self.shape[1]
        self.states = torch.empty(
            self.heads * self.down * self.across, dtype=torch.int32, device=self.device
        )
        launch(
            attention_mask_blocks, self.states.numel(), self.device, dense_of(mask), self.states,
            self.shape[1], a.num_queries,
            a.num_keys, found.block, warps=4, stages=1,
        )  # fmt: skip

    def lists(self, by_keys: bool) -> BlockLists:
        number, length = (self.across, self.down) if by_keys else (self.down, self.across)
        step, stride = (self.across, 1) if by_keys else (1, self.across)
        offsets = torch.empty((*self.shape, number, 2), dtype=torch.int32, device=self.device)
        entries = torch.empty(
            (self.heads * number * length, 2), dtype=torch.int32, device=self.device
        )
        launch(
            attention_mask_lists, self.heads * number, self.device, self.states, offsets, entries,
            number, length, step, stride,
            warps=4, stages=1,
        )  # fmt: skip
        batch, head = (0 if n == 1 else s for n, s in zip(self.shape, offsets.stride()))
        return BlockLists(
            offsets, entries, None, batch, head, row=2, num_entries=entries.shape[0], columns=length
        )
