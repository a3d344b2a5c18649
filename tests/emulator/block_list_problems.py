# SPDX-License-Identifier: Apache-2.0
"""Block masks with lists changed after the check: wrong results are allowed, bad accesses not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attention_problems import BF16, RAW_OP, in_blocks

import pytransformer as pt
from pytransformer.ops._core import fast_path

__all__ = ["RAW_OP", "problems", "wrong"]

SHAPE = (1, 2, 270, 400)
# name -> (tensor of the mask, index, value)
CHANGES = {
    "a block behind the last": ("entries", (1, 0), 1_000_000_000),
    "a block before the first": ("entries", (1, 0), -1),
    "a block of the transpose behind the last": ("key_entries", (1, 0), 1_000_000_000),
    "a block of the transpose before the first": ("key_entries", (1, 0), -1),
    "bits behind the last": ("entries", (slice(None), 1), 1_000_000),
    "bits of the transpose behind the last": ("key_entries", (slice(None), 1), 1_000_000),
    "bits before the first": ("entries", (slice(None), 1), -7),
    "a list that ends behind the last entry": ("offsets", (0, 1, -1), 1_000_000),
    "a list of the transpose that begins before the first entry": (
        "key_offsets",
        (0, 0, 0),
        -1_000_000,
    ),
    "lists in no order": ("offsets", (0, 0, 1), 12),
    "one block many times": ("entries", (slice(None), 0), 1),
}


class Problem:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def problems() -> Iterator[Problem]:
    yield from map(Problem, CHANGES)


def wrong(problem: Problem) -> list[str]:
    """Return the emulator's errors in forward and backward with these lists."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    mask = in_blocks(draw, SHAPE, 128, 64)
    name, where, value = CHANGES[problem.name]
    getattr(mask.blocks, name)[where] = value
    query, key = draw(1, 2, SHAPE[2], 64).to(BF16), draw(1, 1, SHAPE[3], 64).to(BF16)
    inputs = [t.requires_grad_() for t in (query, key, key.clone())]
    try:
        with fast_path.off():
            out = pt.attention(*inputs, attn_mask=mask, backend="cuda", strict=True)
            torch.autograd.grad(out.float().square().sum(), inputs)
    except RuntimeError as error:
        return [str(error)]
    return []
