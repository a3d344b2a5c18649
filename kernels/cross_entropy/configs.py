# SPDX-License-Identifier: Apache-2.0
"""Table of tiles, and of the rows of logits that exist at a time; kernels/tuned replaces entries by
measured ones.

The sizes follow from registers and memory traffic, not yet from time on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import tuned
from .._lang import INTERPRETED


@dataclass(frozen=True)
class Config:
    """A tile of ROWS rows and BN classes."""

    ROWS: int
    BN: int
    warps: int


# Kernel -> classes, padded to a power of two -> tile. Rows of more classes are processed in blocks
# of the last entry's width.
HEURISTIC = {
    "forward": {256: Config(4, 256, 4), 1024: Config(1, 1024, 4), 4096: Config(1, 4096, 8)},
    "backward": {256: Config(4, 256, 4), 1024: Config(1, 1024, 4), 4096: Config(1, 2048, 4)},
    # sums over rows for the bias gradient; with 4 warps sm_100 spills
    "bias": {4096: Config(32, 128, 8)},
}
INTERPRETED_TILE = Config(32, 256, 1)  # few operations, but several tiles with tails in tests

# Each chunk adds to the weight gradient: 16 bytes per element, against 6 operations per row of the
# chunk. At 2,048 rows (128k classes in one gibibyte) that is 1/5 of the time at a GPU's nominal
# rates.
CHUNK_BYTES = 1 << 30
CHUNK_BYTES_INTERPRETED = 1 << 16
# Bytes of a chunk's part of the weight gradient: gemms of at least 16,384 classes at 4,096 columns.
PART_BYTES = 1 << 28
PART_BYTES_INTERPRETED = 1 << 10


def key_of(kernel: str, classes: int) -> str:
    """Return the name of a kernel and problem class in a tuned table."""
    width = next(
        (f"up to {n} classes" for n in list(HEURISTIC[kernel])[:-1] if classes <= n), "more classes"
    )
    return f"{kernel}, {width}" if len(HEURISTIC[kernel]) > 1 else kernel


def tile(kernel: str, classes: int, device: torch.device) -> Config:
    """Return a kernel's tile for a number of classes: the measured one, or the table's."""
    if INTERPRETED:
        return HEURISTIC["bias"][4096] if kernel == "bias" else INTERPRETED_TILE
    if measured := tuned.table("cross_entropy", device).get(key_of(kernel, classes)):
        return Config(**measured)
    return heuristic(kernel, classes)


def heuristic(kernel: str, classes: int) -> Config:
    table = HEURISTIC[kernel]
    return next(
        (config for width, config in table.items() if classes <= width), list(table.values())[-1]
    )


def candidates(kernel: str, classes: int) -> Iterator[Config]:
    """Yield the configurations that `make tune` tries; the table's comes first."""
    first = heuristic(kernel, classes)
    yield first
    widths = (
        (64, 128, 256)
        if kernel == "bias"
        else (classes,)
        if classes <= 1024
        else (1024, 2048, 4096, 8192)
    )
    for BN in widths:
        for warps in (2, 4, 8, 16):
            for numbers in (8, 16, 32):  # per thread
                found = Config(max(1, 32 * warps * numbers // BN), BN, warps)
                if found != first and found.ROWS * BN == 32 * warps * numbers:
                    yield found


def chunk_rows(classes: int) -> int:
    """Return the number of rows whose float32 logits exist at a time: a multiple of 128, the side
    of a large gemm's tile.
    """
    rows = (CHUNK_BYTES_INTERPRETED if INTERPRETED else CHUNK_BYTES) // (4 * classes)
    return max(rows // 128 * 128, 16 if INTERPRETED else 128)


def part_rows(d: int) -> int:
    """Return the number of classes of the weight gradient's part that exists at a time, d float32
    values each.
    """
    return max(
        (PART_BYTES_INTERPRETED if INTERPRETED else PART_BYTES) // (4 * d),
        1 if INTERPRETED else 128,
    )
