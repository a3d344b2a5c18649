# SPDX-License-Identifier: Apache-2.0
"""Block masks of a split sequence: every rank has the full mask, and each tile gets its part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..ops._problem.blocks import Blocks, entry_rows
from ..ops.block_mask import BlockMask, as_block_mask

_KEPT = "_pytransformer_parts"
# 2^64 over the golden ratio: factors of neighbors are far apart.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class BlockParts:
    """Parts and checksum of a block mask, cached with it because many layers share a mask."""

    def __init__(self, mask: BlockMask) -> None:
        self.mask = mask
        self._parts: dict[tuple[range, ...], BlockMask] = {}

    @classmethod
    def of(cls, given: Any) -> BlockParts | None:
        """Return the parts of our or FlexAttention's block mask; None for other arguments."""
        mask = as_block_mask(given)
        if mask is None:
            return None
        kept: BlockParts | None = getattr(mask, _KEPT, None)
        if kept is None:
            setattr(mask, _KEPT, kept := cls(mask))
        return kept

    def part(
        self, *, heads: range | None = None, queries: range | None = None, keys: range | None = None
    ) -> BlockMask:
        """Return the mask of these ranges, counted from 0; None: all."""
        every = (range(n) for n in self.mask.shape[1:])
        place = tuple(
            whole if given is None else given for given, whole in zip((heads, queries, keys), every)
        )
        if place not in self._parts:
            self._parts[place] = self.mask.part(*place)
        return self._parts[place]

    def hidden(self, queries: Sequence[range], keys: Sequence[range]) -> frozenset[tuple[int, int]]:
        """Return (first query, first key) of the fully hidden pairs of chunks."""
        rows, width = self.mask.block_size
        return frozenset(
            (q.start, k.start)
            for q in queries
            for k in keys
            if not self._shown[
                q.start // rows : -(-q.stop // rows), k.start // width : -(-k.stop // width)
            ].any()
        )

    @functools.cached_property
    def checksum(self) -> int:
        """Return a checksum of the visible pairs; ranks with equal masks have equal checksums."""
        total = 0
        for t in (self.mask.blocks.offsets, self.mask.blocks.entries, self.mask.blocks.bits):
            factors = torch.arange(1, t.numel() + 1, device=t.device) * _ODD | 1
            total = total * 31 + int((t.flatten() * factors).sum())
        return total % (1 << 64)

    @functools.cached_property
    def _shown(self) -> torch.Tensor:
        """Return bool (query blocks, key blocks) on the CPU: visible in any sequence or head."""
        blocks: Blocks = self.mask.blocks
        down, across = (offsets.shape[2] - 1 for offsets in (blocks.offsets, blocks.key_offsets))
        rows, entry = entry_rows(blocks.offsets)
        shown = torch.zeros(down, across, dtype=torch.bool, device=rows.device)
        shown[rows % max(down, 1), blocks.entries[entry, 0].long()] = True
        return shown.cpu()
