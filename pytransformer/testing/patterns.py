# SPDX-License-Identifier: Apache-2.0
"""Visibility patterns that benchmarks run by length: builders and FlexAttention mask_mods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops._problem.blocks import entry_rows
from ..ops.block_mask import BlockMask

Device = torch.device | str
Mod = Callable[[Any, Any, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Pattern:
    """A pattern: ``build(length, device)`` and FlexAttention's ``mod``, None for a table."""

    label: str
    build: Callable[[int, Device], BlockMask]
    mod: Mod | None = None

    # Few entries that live as long as the program; strided takes seconds at 65,536 tokens.
    @functools.lru_cache(maxsize=8)  # noqa: B019
    def make(self, length: int, device: Device) -> BlockMask:
        return self.build(length, device)

    def share(self, length: int) -> float:
        """Return the share of the CPU's 64-wide blocks that run."""
        return self.make(length, "cpu").share

    def mask_mod(self, mask: BlockMask) -> Mod:
        """Return the mask_mod for a mask of this pattern."""
        if self.mod is not None:
            return self.mod
        (queries, keys), lists = mask.block_size, mask.blocks
        row, entry = entry_rows(lists.offsets)
        table = torch.zeros(
            lists.offsets.shape[2] - 1,
            lists.key_offsets.shape[2] - 1,
            dtype=torch.bool,
            device=mask.device,
        )
        table[row, lists.entries[entry, 0].long()] = True
        return lambda b, h, i, j: table[i // queries, j // keys]


PATTERNS = {
    "local": Pattern(
        "local 256",
        lambda n, device: BlockMask.sliding_window(n, (256, 256), device=device),
        lambda b, h, i, j: (i - j).abs() <= 256,
    ),
    "longformer": Pattern(
        "longformer 512, 2 global",
        lambda n, device: BlockMask.longformer(n, 512, min(n, 2), device=device),
        lambda b, h, i, j: ((i - j).abs() <= 256) | (i < 2) | (j < 2),
    ),
    "big_bird": Pattern(
        "big_bird 3 + 2 + 3", lambda n, device: BlockMask.big_bird(n, device=device)
    ),
    "strided": Pattern(
        "strided 512",
        lambda n, device: BlockMask.strided(n, 512, device=device),
        lambda b, h, i, j: (j <= i) & ((i - j < 512) | ((i - j) % 512 == 0)),
    ),
}
