# SPDX-License-Identifier: Apache-2.0
"""Table of rows and columns per program of the norms; kernels/tuned replaces entries by measured
ones.

The entries are chosen by registers (see tests/triton/resources.json), not yet by time on a GPU: per
thread 16 values of each tensor for short rows, up to 32 for long ones, and several blocks per SM in
any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import tuned
from .._lang import INTERPRETED


@dataclass(frozen=True)
class Config:
    """A tile of ROWS rows and BN columns (powers of two; BN is a multiple of 32 for dropout).

    A row wider than BN is processed in several blocks of columns, and read twice.
    """

    ROWS: int
    BN: int
    warps: int


# Width, padded to a power of two -> tile. Rows wider than the last entry are processed in blocks of
# WIDER.
FORWARD = {
    32: Config(64, 32, 4), 64: Config(32, 64, 4), 128: Config(16, 128, 4), 256: Config(8, 256, 4),
    512: Config(4, 512, 4),
    1024: Config(2, 1024, 4), 2048: Config(1, 2048, 4), 4096: Config(1, 4096, 8),
    8192: Config(1, 8192, 8),
    16384: Config(1, 16384, 16),
}  # fmt: skip
BACKWARD = {
    32: Config(64, 32, 4), 64: Config(32, 64, 4), 128: Config(16, 128, 4), 256: Config(8, 256, 4),
    512: Config(4, 512, 4),
    1024: Config(2, 1024, 4), 2048: Config(1, 2048, 4), 4096: Config(1, 4096, 8),
    8192: Config(1, 8192, 8),
}  # fmt: skip
WIDER = Config(1, 4096, 8)
# weight and bias gradients of rows wider than BACKWARD's last entry
PARAMETERS = Config(32, 128, 4)
SUMS = Config(32, 64, 4)  # their second stage

# Large tiles, because the interpreter's time depends on operations, not on elements; still several
# tiles, with tails, in tests.
INTERPRETED_TILES = {32: Config(64, 32, 1), 128: Config(32, 128, 1), 512: Config(8, 512, 1)}
INTERPRETED_WIDER = Config(8, 512, 1)

BLOCKS = 128  # programs that share the rows in the separate kernel of parameter gradients


def key_of(kernel: str, columns: int, itemsize: int) -> str:
    """Return the name of a kernel, "forward" or "backward", and problem class in a tuned table."""
    width = next((f"up to {n} columns" for n in BACKWARD if columns <= n), "wider rows")
    return f"{kernel}, {8 * itemsize} bit, {width}"


def tile(
    columns: int, itemsize: int, device: torch.device, *, backward: bool = False
) -> tuple[Config, bool]:
    """Return the tile for rows of this width, measured or from the table, and True if rows are
    wider than it.
    """
    if INTERPRETED:
        found = next(
            (c for width, c in INTERPRETED_TILES.items() if columns <= width), INTERPRETED_WIDER
        )
    elif measured := tuned.table("layer_norm", device).get(
        key_of("backward" if backward else "forward", columns, itemsize)
    ):
        found = Config(**measured)
    else:
        found = heuristic(columns, backward=backward)
    return found, columns > found.BN


def heuristic(columns: int, *, backward: bool) -> Config:
    return next(
        (c for width, c in (BACKWARD if backward else FORWARD).items() if columns <= width), WIDER
    )


def candidates(kernel: str, columns: int) -> Iterator[Config]:
    """Yield the configurations that `make tune` tries for rows of this width, a power of two; the
    table's comes first.
    """
    first = heuristic(columns, backward=kernel == "backward")
    yield first
    for BN in (columns,) if columns in BACKWARD else (2048, 4096, 8192):
        for warps in (2, 4, 8, 16):
            for numbers in (4, 8, 16, 32):  # of each tensor per thread
                found = Config(max(1, 32 * warps * numbers // BN), BN, warps)
                if found != first and found.ROWS * BN == 32 * warps * numbers:
                    yield found


def programs(device: torch.device, warps: int) -> int:
    """Return the number of backward programs that share the rows, each with partial parameter
    gradients: 16 warps per SM.

    It depends only on the kind of device, so equal devices give equal bits.
    """
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)
