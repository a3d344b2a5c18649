"""How many rows and columns a program of the norms holds at once, by a table: no autotuning.

The entries are chosen by registers (see tests/triton/resources.json), not yet by time on a GPU: 16 numbers of each tensor in
a thread where rows are short, up to 32 where they are long, and several blocks on a multiprocessor in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def tile(columns: int, *, backward: bool = False) -> tuple[Config, bool]:
    """The tile for rows of so many numbers, and whether they are wider than it."""
    table = INTERPRETED_TILES if INTERPRETED else BACKWARD if backward else FORWARD
    for width, found in table.items():
        if columns <= width:
            return found, False
    return (INTERPRETED_WIDER if INTERPRETED else WIDER), True


def programs(device: torch.device, warps: int) -> int:
    """How many programs share the rows in backward, each with sums of its own for the parameters' gradients: 16 warps on each
    multiprocessor. It depends on the kind of device alone, so results are equal bits on equal devices."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, 16 // warps)
