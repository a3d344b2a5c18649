# SPDX-License-Identifier: Apache-2.0
"""Lists of the non-empty blocks of a dense boolean mask, which kernels use like those of a block
mask.

The first kernel reports for each block if a pair is visible. The second writes the lists, one
program per block of queries and, in backward, one per block of keys. The mask is read once more,
with its strides, a broadcast dimension once; listed blocks are still checked per pair. Both use the
mask alone; lengths and causality bound the lists later, as they bound ranges of tiles.

Grids: one program per block; one program per list. Memory: 12 bytes per block, 20 in backward.
"""

from __future__ import annotations

import torch
import triton.language as tl

from pytransformer.ops._problem.attention import AttentionProblem, compact

from .._lang import kernel, launch, steps_of
from .configs import Listing
from .problem import BlockLists, block_lists, dense_of, listing_of

CHUNK = tl.constexpr(128)  # blocks that a list's program processes per step


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
