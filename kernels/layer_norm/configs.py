# SPDX-License-Identifier: Apache-2.0
"""How many rows and columns a program of the norms holds at once, by a table: see kernels/tuned for how a measured one takes its place.

The entries are chosen by registers (see tests/triton/resources.json), not yet by time on a GPU: 16 numbers of each tensor in
a thread where rows are short, up to 32 where they are long, and several blocks on a multiprocessor in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import tuned
from .._lang import INTERPRETED


@dataclass(frozen=True)
class Config:
    """A tile of ROWS rows and BN columns (powers of two, BN a multiple of 32 for dropout). A row wider than BN is done in
    several blocks of columns, and read twice."""

    ROWS: int
    BN: int
    warps: int


# Width, padded to a power of two -> tile. Rows beyond the last entry are done in blocks as wide as "wider".
FORWARD = {
    32: Config(64, 32, 4), 64: Config(32, 64, 4), 128: Config(16, 128, 4), 256: Config(8, 256, 4), 512: Config(4, 512, 4),
    1024: Config(2, 1024, 4), 2048: Config(1, 2048, 4), 4096: Config(1, 4096, 8), 8192: Config(1, 8192, 8),
    16384: Config(1, 16384, 16),
}  # fmt: skip
BACKWARD = {
    32: Config(64, 32, 4), 64: Config(32, 64, 4), 128: Config(16, 128, 4), 256: Config(8, 256, 4), 512: Config(4, 512, 4),
    1024: Config(2, 1024, 4), 2048: Config(1, 2048, 4), 4096: Config(1, 4096, 8), 8192: Config(1, 8192, 8),
}  # fmt: skip
WIDER = Config(1, 4096, 8)
PARAMETERS = Config(32, 128, 4)  # gradients of weight and bias where rows are wider than BACKWARD's last
SUMS = Config(32, 64, 4)  # their second stage

# Large tiles, for the interpreter's time goes by operations, not by elements; still several of them, with tails, in tests.
INTERPRETED_TILES = {32: Config(64, 32, 1), 128: Config(32, 128, 1), 512: Config(8, 512, 1)}
INTERPRETED_WIDER = Config(8, 512, 1)

BLOCKS = 128  # programs that share the rows where the parameters' gradients are apart


def key_of(kernel: str, columns: int, itemsize: int) -> str:
    """The name of a kernel, "forward" or "backward", and class of problems in a tuned table."""
    width = next((f"up to {n} columns" for n in BACKWARD if columns <= n), "wider rows")
    return f"{kernel}, {8 * itemsize} bit, {width}"


def tile(columns: int, itemsize: int, device: torch.device, *, backward: bool = False) -> tuple[Config, bool]:
    """The tile for rows of so many numbers, the measured one or the table's, and whether they are wider than it."""
    if INTERPRETED:
        found = next((c for width, c in INTERPRETED_TILES.items() if columns <= width), INTERPRETED_WIDER)
    elif measured := tuned.table("layer_norm", device).get(key_of("backward" if backward else "forward", columns, itemsize)):
        found = Config(**measured)
    else:
        found = heuristic(columns, backward=backward)
    return found, columns > found.BN


def heuristic(columns: int, *, backward: bool) -> Config:
    return next((c for width, c in (BACKWARD if backward else FORWARD).items() if columns <= width), WIDER)


def candidates(kernel: str, columns: int) -> Iterator[Config]:
    """What `make tune` tries for rows of this many numbers, a power of two: the table's choice first."""
    first = heuristic(columns, backward=kernel == "backward")
    yield first
    for BN in (columns,) if columns in BACKWARD else (2048, 4096, 8192):
        for warps in (2, 4, 8, 16):
            for numbers in (4, 8, 16, 32):  # of each tensor in a thread
                found = Config(max(1, 32 * warps * numbers // BN), BN, warps)
                if found != first and found.ROWS * BN == 32 * warps * numbers:
                    yield found


def programs(device: torch.device, warps: int) -> int:
    """How many programs share the rows in backward, each with sums of its own for the parameters' gradients: 16 warps on each
    multiprocessor. It depends on the kind of device alone, so results are equal bits on equal devices."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)
