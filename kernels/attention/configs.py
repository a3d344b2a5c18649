# SPDX-License-Identifier: Apache-2.0
"""Table of tile sizes, warps and pipeline stages. No autotuning: start-up is free and results are
reproducible.

The entries are chosen by registers and shared memory (see tests/triton/resources.json), not yet by
time on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pytransformer.ops._problem.attention import LISTING, Listing

INTERPRETER = 0  # used as a compute capability
HEAD_DIMS = (64, 128, 256)  # problem classes
MANY_SCORE_MODS = 3  # score_mods from which a kernel's entry "…++" applies


@dataclass(frozen=True)
class Config:
    """A tile of BM queries and BN keys. BN is a multiple of 32 (dropout) and at least BM (the T5
    table's gradient).

    In "dkdv" the tile's rows are keys if each warp has separate rows: BN is at least 16 times
    warps.
    """

    BM: int
    BN: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Split:
    """Limits of split KV.

    Applies to sequences with at most ``max_rows`` rows (queries times heads that share a key head).
    A split has at least ``min_keys`` keys, and there are at most ``max_splits`` (a power of two).
    """

    max_rows: int
    min_keys: int
    max_splits: int


# 512 keys of 128 columns are 256 KB of bfloat16; the partials of 16 rows are 3 % of that.
SPLIT = Split(max_rows=32, min_keys=512, max_splits=64)
SPLIT_INTERPRETED = Split(max_rows=32, min_keys=128, max_splits=4)


LISTING_INTERPRETED = Listing(block=64, min_blocks=2, min_pairs=1)


# Largest head size (padded to a power of two) -> configuration. A kernel may have a second entry,
# "…+", for problems with score_mods (dense masks and biases, ALiBi, T5, segments, softcap,
# dropout), and a third, "…++", for many of them. "grouped dkdv" is for several query heads per key
# head without score_mods: its loop over heads uses registers.
SIXTEEN_BIT = {
    "forward": {64: Config(128, 64, 8, 3), 128: Config(128, 64, 8, 3), 256: Config(64, 32, 8, 1)},
    "forward+": {64: Config(128, 32, 8, 2), 128: Config(32, 32, 4, 2), 256: Config(32, 32, 8, 1)},
    "decode": {64: Config(16, 64, 4, 3), 128: Config(16, 64, 4, 2), 256: Config(16, 32, 4, 2)},
    "decode++": {64: Config(16, 64, 4, 3), 128: Config(16, 32, 4, 2), 256: Config(16, 32, 4, 2)},
    "dkdv": {64: Config(32, 128, 8, 2), 128: Config(16, 128, 8, 2), 256: Config(32, 32, 8, 1)},
    "dkdv+": {64: Config(32, 32, 4, 1), 128: Config(16, 32, 4, 1), 256: Config(16, 32, 8, 1)},
    "dkdv++": {64: Config(16, 32, 4, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "grouped dkdv": {
        64: Config(32, 128, 8, 1),
        128: Config(32, 64, 8, 1),
        256: Config(32, 32, 8, 1),
    },
    "dropout dkdv": {
        64: Config(32, 32, 4, 1),
        128: Config(16, 64, 8, 1),
        256: Config(16, 32, 8, 1),
    },
    "dropout dkdv++": {
        64: Config(16, 32, 4, 1),
        128: Config(16, 32, 8, 1),
        256: Config(16, 32, 8, 1),
    },
    "dq": {64: Config(64, 64, 4, 2), 128: Config(64, 64, 8, 2), 256: Config(32, 32, 8, 1)},
    "dq+": {64: Config(32, 32, 4, 1), 128: Config(16, 64, 8, 1), 256: Config(16, 32, 8, 1)},
    "dq++": {64: Config(32, 32, 4, 1), 128: Config(16, 64, 8, 1), 256: Config(16, 32, 8, 1)},
    "dbias": {64: Config(32, 128, 8, 1), 128: Config(32, 64, 8, 1), 256: Config(16, 32, 4, 1)},
}
THIRTY_TWO_BIT = {
    "forward": {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "forward+": {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "decode": {64: Config(16, 32, 4, 2), 128: Config(16, 32, 8, 2), 256: Config(16, 32, 8, 1)},
    "dkdv": {64: Config(16, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "dkdv+": {64: Config(16, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
    "grouped dkdv": {
        64: Config(32, 32, 8, 1),
        128: Config(16, 32, 8, 1),
        256: Config(16, 32, 8, 1),
    },
    "dropout dkdv": {
        64: Config(16, 32, 8, 1),
        128: Config(16, 32, 8, 1),
        256: Config(16, 32, 8, 1),
    },
    "dq": {64: Config(32, 32, 8, 1), 128: Config(16, 32, 8, 2), 256: Config(16, 32, 8, 2)},
    "dbias": {64: Config(16, 32, 8, 1), 128: Config(16, 32, 8, 1), 256: Config(16, 32, 8, 1)},
}
# Exceptions per architecture, by bytes of an element. The tiles above suit mma.sync (16 rows per
# warp, disjoint between warps); wgmma multiplies 64 rows with 4 warps, tcgen05 128.
WGMMA = {
    "forward+": {128: Config(128, 32, 8, 2)},
    "dbias": {64: Config(64, 64, 8, 1)},
    "dkdv": {64: Config(64, 128, 8, 2), 128: Config(32, 128, 8, 2)},
    "dkdv+": {64: Config(32, 128, 8, 2), 128: Config(16, 128, 8, 2)},
}
DIFFERENT = {
    2: {
        80: {"decode": {256: Config(16, 64, 4, 2)}, "dkdv+": {64: Config(32, 32, 4, 2)}},
        90: WGMMA
        | {
            "dkdv+": {**WGMMA["dkdv+"], 256: Config(16, 32, 8, 2)},
            "grouped dkdv": {64: Config(16, 128, 8, 2)},
        },
        100: WGMMA
        | {
            "dkdv": {64: Config(64, 128, 8, 2), 128: Config(16, 128, 8, 2)},
            "dkdv+": {**WGMMA["dkdv+"], 64: Config(32, 128, 8, 1), 256: Config(16, 32, 8, 2)},
            "grouped dkdv": {64: Config(32, 128, 8, 2), 128: Config(32, 128, 8, 1)},
            "dropout dkdv++": {64: Config(16, 32, 4, 2), 256: Config(16, 64, 8, 1)},
            "dq+": {256: Config(16, 32, 8, 2)},
            "dq++": {64: Config(16, 32, 4, 1)},
            "dbias": {64: Config(64, 128, 8, 1)},
        },
        120: {
            "forward": {128: Config(128, 32, 8, 3)},
            "dkdv": {64: Config(16, 128, 8, 2), 128: Config(16, 64, 8, 1)},
            "dkdv+": {64: Config(32, 32, 4, 2), 128: Config(16, 64, 8, 1)},
            "dropout dkdv": {128: Config(16, 32, 8, 1)},
            "dq+": {128: Config(32, 64, 8, 1)},
            "dq++": {64: Config(16, 32, 4, 1)},
        },
    },
    4: {
        80: {
            "forward": {128: Config(32, 32, 8, 2)},
            "decode": {256: Config(16, 32, 8, 2)},
            "dq": {128: Config(32, 32, 8, 2)},
            "dbias": {64: Config(32, 32, 8, 1), 256: Config(16, 32, 4, 1)},
        },
        90: {"dkdv+": {64: Config(16, 64, 8, 1)}, "forward+": {128: Config(16, 32, 8, 2)}},
        100: {
            "forward+": {128: Config(16, 32, 8, 2)},
            "grouped dkdv": {64: Config(16, 32, 8, 1)},
            "dropout dkdv": {128: Config(16, 32, 8, 3)},
            "dbias": {64: Config(32, 32, 8, 1)},
        },
        120: {
            "grouped dkdv": {128: Config(16, 32, 4, 1)},
            "dropout dkdv": {128: Config(16, 32, 8, 2)},
            "dbias": {64: Config(32, 32, 8, 1), 128: Config(16, 64, 8, 1)},
        },
    },
}
# Large tiles, because the interpreter's time depends on operations, not on elements; still several
# tiles, with tails, in tests.
INTERPRETED = {
    "forward": Config(32, 64, 1, 1),
    "decode": Config(16, 64, 1, 1),
    "dkdv": Config(32, 64, 1, 1),
    "grouped dkdv": Config(32, 64, 1, 1),
    "dropout dkdv": Config(32, 64, 1, 1),
    "dq": Config(32, 64, 1, 1),
    "dbias": Config(32, 64, 1, 1),
}


def split(capability: int) -> Split:
    """Return the split KV limits: equal for all architectures, because none has been measured."""
    return SPLIT_INTERPRETED if capability == INTERPRETER else SPLIT


def listing(capability: int) -> Listing:
    return LISTING_INTERPRETED if capability == INTERPRETER else LISTING


def effort(score_mods: int) -> int:
    """Return the class of a problem by its number of score_mods: 0 for none, 1 for some, 2 for
    many.
    """
    return min(score_mods, 1) + (score_mods >= MANY_SCORE_MODS)


def key_of(kernel: str, head_dim: int, itemsize: int, score_mods: int) -> str:
    """Return the name of a kernel and problem class in a tuned table."""
    largest = next(n for n in HEAD_DIMS if head_dim <= n)
    work = ("", ", work per element", ", much work per element")[effort(score_mods)]
    return f"{kernel}, {8 * itemsize} bit, head size {largest}{work}"


def entry_of(kernel: str, head_dim: int, itemsize: int, score_mods: int) -> tuple[str, int]:
    """Return the table key of a problem class: the nearest entry with at most these score_mods."""
    table = SIXTEEN_BIT if itemsize == 2 else THIRTY_TWO_BIT
    names = (kernel + "+" * n for n in range(effort(score_mods), -1, -1))
    return next(name for name in names if name in table), next(
        size for size in HEAD_DIMS if head_dim <= size
    )


def config(
    kernel: str,
    capability: int,
    head_dim: int,
    itemsize: int,
    *,
    score_mods: int,
    tuned: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Config:
    """Return a kernel's configuration for a number of score_mods: the measured one, or the table's.

    capability: 80, 90, 100, 120, …, or INTERPRETER.
    """
    if capability == INTERPRETER:
        return INTERPRETED[kernel]
    if measured := tuned.get(key_of(kernel, head_dim, itemsize, score_mods)):
        return Config(**measured)
    name, size = entry_of(kernel, head_dim, itemsize, score_mods)
    different = DIFFERENT[itemsize].get(capability, {}).get(name, {})
    return different.get(size) or (SIXTEEN_BIT if itemsize == 2 else THIRTY_TWO_BIT)[name][size]


def within(tile: Config, queries: int, keys: int, *, by_keys: bool) -> Config:
    """Return the tile, or a smaller one that fits a block of this many queries and keys.

    Warps shrink with the side that they divide (keys if by_keys), to at least 4. BM stays at most
    BN if it was.
    """
    BN = min(tile.BN, keys)
    BM = min(tile.BM, queries, BN if tile.BM <= tile.BN else queries)
    shrunk = tile.BN // BN if by_keys else tile.BM // BM
    return Config(BM, BN, min(tile.warps, max(4, tile.warps // shrunk)), tile.stages)


def candidates(kernel: str, head_dim: int, itemsize: int, *, score_mods: int) -> Iterator[Config]:
    """Yield the configurations that `make tune` tries: the table's first, then tiles around it."""
    first = config(kernel, 90, head_dim, itemsize, score_mods=score_mods)
    yield first
    wide = (32, 64, 128) if itemsize == 2 else (16, 32, 64)
    rows = {"decode": (16,), "dkdv": (16, 32, 64), "grouped dkdv": (16, 32, 64)}.get(kernel, wide)
    for BM in rows:
        for BN in (32, 64, 128):
            for warps in (4, 8):
                for stages in (2, 3, 4) if kernel == "decode" else (1, 2, 3):
                    found = Config(BM, BN, warps, stages)
                    # The T5 table's gradient needs BM <= BN; the accumulators of two tiles must fit
                    # in registers.
                    fits = (
                        BM * max(BN, head_dim)
                        <= (64 if kernel in ("forward", "decode") else 32) * 32 * warps
                    )
                    if found != first and fits and (kernel == "forward" or BM <= BN):
                        yield found
