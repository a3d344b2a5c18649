# SPDX-License-Identifier: Apache-2.0
"""Iteration over a block mask, or over the listed blocks of a dense one (mask_lists.py).

A program's tile lies within one block of its side, so it has one list of blocks of the other side.
A list is a run of entries (block, index of its bits, or -1 for a full block), in ascending order.
The tiles of its blocks, in sequence, are the steps of one flat loop, as regular as a loop over a
range of tiles. ``walk`` removes the steps outside the bounds from both ends, because both ascend,
and the gap behind global keys (bounds.py). ``tile_at`` returns a step's tile. Entries, blocks and
indices are clamped: lists that change after their check give wrong numbers, never accesses out of
bounds.

Source: FlexAttention's lists of full and partial blocks (Dong et al., 2024); here both are in one
list, with bits, as in the CPU backend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import not_negative
from .bounds import tile_of_step

CHUNK = tl.constexpr(128)  # entries that a walk counts at a time: 16,384 tokens in blocks of 128


@triton.jit
def tiles_of_block(BY_KEYS: tl.constexpr, C: tl.constexpr):
    """Return the tiles per block along the walk: KV tiles, or Q tiles BY_KEYS, where a program owns
    keys.
    """
    if BY_KEYS:
        return C.BLOCK_QUERIES // C.BM
    return C.BLOCK_KEYS // C.BN


@triton.jit
def walk(i_b, i_h, i_tile, first, whole_end, last, gap, BY_KEYS: tl.constexpr, p, C: tl.constexpr):
    """Return (first entry, first step, end of the steps, gap) of the steps from first to last along
    this program's list.

    i_tile is the program's tile. Without lists the steps are returned unchanged: those after the
    full tiles.
    """
    entry = 0
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
            behind, whole_end, last = run_of_tiles(
                start, end, tl.maximum(first, bend), last, BY_KEYS, p, C
            )
            near = tl.minimum(near, PER)  # as in all valid lists: no step precedes the first entry
            bend = tl.minimum(whole_end, PER) + (behind - entry) * PER
            last = tl.maximum(last + (behind - entry) * PER, bend)
            jump = bend - tl.maximum(near_end, near)
            whole_end = near + jump
            gap = (bend, jump)
        else:
            entry, whole_end, last = run_of_tiles(start, end, first, last, BY_KEYS, p, C)
    return entry, whole_end, last, gap


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
def tile_at(n, entry, gap, i_tile, BY_KEYS: tl.constexpr, p, C: tl.constexpr):
    """Return (tile, word of its first row's bits in its block, or -1 if nothing is hidden) of a
    step.

    Without lists a step is a tile; without bits (dense mask) there is no word.
    """
    word = 0
    if not BY_KEYS:
        n = tile_of_step(n, gap, C)
    if C.BLOCK_KEYS:
        PER: tl.constexpr = tiles_of_block(BY_KEYS, C)
        p_entry = p.blocks.entries + 2 * (entry + n // PER).to(tl.int64)
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
