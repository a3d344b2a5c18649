# SPDX-License-Identifier: Apache-2.0
"""Table of tiles of the feed-forward kernels; kernels/tuned replaces entries by measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

INTERPRETER = 0  # used as a compute capability
FEW_ROWS = (16, 64)  # problem classes: up to 16 rows, up to 64, or more


@dataclass(frozen=True)
class Config:
    """A tile of BM rows and BN columns of hidden (a multiple of 32, for dropout), with BK along k.

    library: the library computes the gemm, and a separate kernel computes the rest.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    library: bool = False


# Kernel -> bytes of an element -> by rows: at most 16, at most 64, more. Chosen by registers and
# shared memory (see tests/triton/resources.json), not by time. "hidden" has two accumulators when
# gated.
HEURISTIC = {
    "hidden": {
        2: (Config(16, 64, 128, 4, 3), Config(64, 64, 64, 4, 3), Config(128, 128, 64, 8, 3)),
        4: (Config(16, 64, 32, 4, 3), Config(32, 64, 32, 8, 2), Config(64, 64, 32, 8, 2)),
    },
    "hidden gated": {
        2: (Config(16, 32, 128, 4, 3), Config(64, 64, 64, 4, 3), Config(128, 64, 64, 8, 3)),
        4: (Config(16, 32, 32, 4, 3), Config(32, 32, 32, 8, 2), Config(64, 32, 32, 8, 2)),
    },
    "d_hidden": {
        2: (Config(16, 64, 128, 4, 3), Config(64, 64, 64, 4, 3), Config(128, 64, 64, 8, 3)),
        4: (Config(16, 64, 32, 4, 3), Config(32, 64, 32, 8, 2), Config(64, 64, 32, 8, 2)),
    },
}
INTERPRETED = Config(32, 64, 64, 1, 1)


def rows_class(rows: int) -> str:
    """Return the name of a problem class in a tuned table."""
    return next((f"up to {n} rows" for n in FEW_ROWS if rows <= n), "many rows")


def key_of(kernel: str, rows: int, itemsize: int) -> str:
    return f"{kernel}, {8 * itemsize} bit, {rows_class(rows)}"


def config(
    kernel: str,
    capability: int,
    rows: int,
    itemsize: int,
    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Config:
    """Return a kernel's configuration: the measured one, or the table's. capability: 80, 90, 100,
    120, …, or INTERPRETER.
    """
    if capability == INTERPRETER:
        return INTERPRETED
    if measured := tuned.get(key_of(kernel, rows, itemsize)):
        return Config(**measured)
    return HEURISTIC[kernel][itemsize][sum(rows > n for n in FEW_ROWS)]


def candidates(kernel: str, rows: int, itemsize: int) -> Iterator[Config]:
    """Yield the configurations that `make tune` tries; the table's comes first."""
    first = HEURISTIC[kernel][itemsize][sum(rows > n for n in FEW_ROWS)]
    yield first
    wide = itemsize == 2
    for BM in {0: (16,), 1: (32, 64), 2: (64, 128)}[sum(rows > n for n in FEW_ROWS)]:
        for BN in (64, 128, 256) if wide and kernel == "hidden" else (32, 64, 128):
            for BK in (64, 128) if wide else (16, 32):
                for warps, stages in ((4, 3), (4, 4), (8, 3), (8, 4)):
                    found = Config(BM, BN, BK, warps, stages)
                    if found != first and BM * BN >= 64 * warps * 4:
                        yield found
    yield Config(first.BM, first.BN, first.BK, first.warps, 1, library=True)
