"""Tiles, and how many rows of logits exist at a time, by a table: no autotuning.

The sizes are chosen by registers and by counting memory traffic, not yet by time on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._lang import INTERPRETED


@dataclass(frozen=True)
class Config:
    """A tile of ROWS rows and BN classes."""

    ROWS: int
    BN: int
    warps: int


# Classes, padded to a power of two -> tile. Rows of more classes are done in blocks as wide as the last entry.
FORWARD = {256: Config(4, 256, 4), 1024: Config(1, 1024, 4), 4096: Config(1, 4096, 8)}
BACKWARD = {256: Config(4, 256, 4), 1024: Config(1, 1024, 4), 4096: Config(1, 2048, 4)}
BIAS = Config(32, 128, 4)  # sums over rows for the bias's gradient
INTERPRETED_TILE = Config(32, 256, 1)  # few operations, still several tiles with tails in tests

# Each chunk adds to the weight's gradient, 16 bytes for each of its elements against 6 operations for each row of the chunk: at
# 2,048 rows, which 128k classes leave of a gibibyte, that is a fifth of the time by a GPU's nominal rates.
CHUNK_BYTES = 1 << 30
CHUNK_BYTES_INTERPRETED = 1 << 16


def tile(classes: int, *, backward: bool = False) -> Config:
    """The tile of the kernels over rows of so many classes."""
    if INTERPRETED:
        return INTERPRETED_TILE
    table = BACKWARD if backward else FORWARD
    return next((config for width, config in table.items() if classes <= width), list(table.values())[-1])


def chunk_rows(classes: int) -> int:
    """How many rows' float32 logits exist at a time: a multiple of 128, the side of a large product's tile."""
    rows = (CHUNK_BYTES_INTERPRETED if INTERPRETED else CHUNK_BYTES) // (4 * classes)
    return max(rows // 128 * 128, 16 if INTERPRETED else 128)
