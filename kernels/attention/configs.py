# SPDX-License-Identifier: Apache-2.0
"""Tile sizes, warps and pipeline stages, and the launch plan of a call.

No autotuning: start-up is free and results are reproducible. The entries are chosen by registers
and shared memory (see tests/triton/resources.json), not yet by time on a GPU.

A plan has a call's tiles, compile-time constants, number of programs, and scratch. It is computed
once, and creates and reads no tensor. Launches, scratch and the output of ``explain`` follow it.

The tables import no Triton, because benchmarks read them on machines without it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pytransformer.ops._problem.attention import LISTING, AttentionProblem, Listing
from pytransformer.reference.philox import threshold

from .args import EIGHT_BITS, Kind, SplitKV, in_base2, padded

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


# Plan.


def capability(device: torch.device) -> int:
    from .._lang import INTERPRETED

    return INTERPRETER if INTERPRETED else 10 * torch.cuda.get_device_capability(device)[0]


def choose(kernel: str, a: AttentionProblem) -> Config:
    """Return a kernel's tile for the op's arguments; it lies within a block of a block mask."""
    from .. import tuned

    found = config(
        kernel, capability(a.query.device), padded(max(a.head_dim, a.value_dim)),
        a.query.element_size(), score_mods=a.by_pair,
        tuned=tuned.table("attention", a.query.device),
    )  # fmt: skip
    # a tile's bits and their widened values use registers: half of most tiles
    if a.key_scale is not None:
        stages = 1 if a.query.dtype == torch.float32 else found.stages
        found = dataclasses.replace(
            found, BM=min(found.BM, 64), BN=min(found.BN, 32), stages=stages
        )
    queries, keys = block_size(a)
    return within(found, queries, keys, by_keys=kernel.endswith("dkdv")) if keys else found


def listing_of(a: AttentionProblem) -> Listing | None:
    """Return the block list configuration of a dense boolean mask, or None if it is not listed."""
    found = listing(capability(a.query.device))
    return found if a.lists_mask(found) else None


def block_size(a: AttentionProblem) -> tuple[int, int]:
    """Return the queries and keys per listed block; 0 and 0 without lists."""
    if a.blocks is not None:
        return a.blocks.block_size
    found = listing_of(a)
    return (0, 0) if found is None else (found.block, found.block)


def kind_of(a: AttentionProblem) -> Kind:
    """Return the compile-time constants of the arguments, without the tile: BM and BN are 0."""
    from .._lang import precision

    block_queries, block_keys = block_size(a)
    return Kind(
        D=a.head_dim,
        DV=a.value_dim,
        BD=padded(a.head_dim),
        BDV=padded(a.value_dim),
        BM=0,
        BN=0,
        CAUSAL=a.causal != "none",
        BOTTOM_RIGHT=a.causal == "bottom_right",
        LEFT=a.left >= 0,
        RIGHT=a.right >= 0,
        GLOBAL=a.global_keys > 0,
        GROUPED=a.heads > a.key_heads,
        ALIGNED=a.key_start % 32 == 0,
        KEY_MASK=a.key_padding is not None,
        SOFTCAP=bool(a.softcap),
        DROPOUT=0 < threshold(a.dropout_p) < 65536,
        BASE2=in_base2(a),
        SPLIT_LSE=bool(a.added),
        PRECISION=precision(a.query.dtype),
        BUCKETS=0 if a.table is None else padded(a.table.shape[0]),
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=block_keys,
        PAGE_SIZE=0 if a.page_table is None else a.key.shape[2],
        EIGHT_BITS=EIGHT_BITS.get(a.key.dtype, 0),
    )


class Launch(NamedTuple):
    """One kernel on ``programs`` programs."""

    tile: Config
    kind: Kind
    programs: int


class ForwardPlan(NamedTuple):
    """Prefill, then decode, each None if no sequence can need it; then the merge of splits."""

    prefill: Launch | None
    decode: Launch | None
    combine: Launch | None
    split_kv: SplitKV | None
    partial_rows: int  # over all splits: rows of a maximum, a sum and an output, in float32

    @property
    def bytes(self) -> int:
        """Size of the splits' partials."""
        return 0 if self.decode is None else 4 * self.partial_rows * (self.decode.kind.BDV + 2)

    @property
    def note(self) -> str:
        """Text for ``explain``."""
        said = []
        if self.prefill is not None:
            said.append(
                f"forward by tiles of {self.prefill.tile.BM} queries and {self.prefill.tile.BN}"
                " keys"
            )
            if keys := self.prefill.kind.BLOCK_KEYS:
                said[-1] += f", in the visible blocks of {self.prefill.kind.BLOCK_QUERIES} x {keys}"
        if self.split_kv is not None:
            apart = (
                f"sequences of at most {self.split_kv.max_rows} rows decoded"
                if self.prefill is not None
                else "decoded"
            )
            said.append(
                f"{apart}, their keys split over {self.split_kv.splits}"
                if self.split_kv.splits > 1
                else apart
            )
        return "triton: " + "; ".join(said)


class Dbias(NamedTuple):
    """The gradient of a mask or bias; one program sums ``shared`` sequences, heads and tiles of
    broadcast dimensions.
    """

    launch: Launch
    shared: tuple[int, ...]


class BackwardPlan(NamedTuple):
    dq: Launch  # preprocess too
    dkdv: Launch
    dbias: dict[str, Dbias]  # of masks and biases that have queries and keys


def plan_forward(a: AttentionProblem) -> ForwardPlan:
    """Return forward's plan."""
    limits, tile, kind = split(capability(a.query.device)), choose("decode", a), kind_of(a)
    right = 0 if a.causal != "none" and a.prefix_lengths is None else a.right
    window = a.left + right if a.left >= 0 and right >= 0 else None
    if window is not None and a.global_keys:  # as in kv_range
        window += a.global_keys + 2 * tile.BN
    many, split_kv = plan_of(
        a.num_queries, a.num_keys, a.group, window, a.ragged,
        max_rows=limits.max_rows, tile=tile.BN, min_keys=limits.min_keys,
        max_splits=limits.max_splits,
    )  # fmt: skip
    # heads that share keys may have separate lists, so they cannot share a tile
    if a.blocks is not None:
        many, split_kv = True, None
    prefill = decode = combine = None
    partial_rows = 0
    if many:
        chosen = choose("forward", a)
        prefill = _launch(
            chosen, kind, _query_programs(a, chosen), DECODE_APART=split_kv is not None
        )
    if split_kv is not None:
        heads, row_tiles = a.sequences * a.key_heads, -(-split_kv.rows // tile.BM)
        padding = a.key_padding
        decode = _launch(
            tile, kind, heads * row_tiles * split_kv.splits, PACK_GQA=True,
            SPLIT_KV=split_kv.splits > 1, DECODE_APART=many,
            KEY_MASK=padding is not None and (padding.shape[1] == 1 or a.group == 1),
            BLOCK_QUERIES=0, BLOCK_KEYS=0,
        )  # fmt: skip
        if split_kv.splits > 1:
            partial_rows = heads * row_tiles * split_kv.splits * tile.BM
            combine = Launch(tile, dataclasses.replace(decode.kind, BM=1), heads * split_kv.rows)
    return ForwardPlan(prefill, decode, combine, split_kv, partial_rows)


def plan_of(
    num_queries: int,
    num_keys: int,
    group: int,
    window: int | None,
    ragged: bool,
    *,
    max_rows: int,
    tile: int,
    min_keys: int,
    max_splits: int,
) -> tuple[bool, SplitKV | None]:
    """Return (True if some sequence may need prefill, split KV of the rest or None), for the
    longest sequence's sizes.

    ragged: others may be shorter. window: left + right of a bounded one.
    """
    rows = num_queries * group
    if rows > max_rows and (not ragged or group > max_rows):
        return True, None
    span = num_keys if window is None else min(num_keys, window + 1 + num_queries)
    tiles = max(1, min_keys // tile)
    splits = min(max_splits, -(-(-(-span // tile) + 1) // tiles))
    return rows > max_rows, SplitKV(max_rows, min(rows, max_rows), splits, tiles, max_splits)


def plan_backward(a: AttentionProblem, names: Collection[str]) -> BackwardPlan:
    """Return the plan of the gradients of these arguments."""
    kind, tile = kind_of(a), choose("dq", a)
    dq = _launch(tile, kind, _query_programs(a, tile))
    kinds = {
        "dropout dkdv": bool(a.dropout_p),
        "grouped dkdv": kind.GROUPED and not a.by_pair,
        "dkdv": True,
    }
    tile = choose(next(name for name, found in kinds.items() if found), a)
    dkdv = _launch(
        tile, kind, a.sequences * a.key_heads * _key_tiles(a, tile),
        KEYS_FIRST=not a.dropout_p and tile.BN >= 16 * tile.warps,
    )  # fmt: skip
    dbias = {}
    for name, t in a.added.items():
        if name in names and not a.empty:
            tile = choose("dbias", a)
            # over everything
            counts = (a.sequences, a.heads, -(-a.num_queries // tile.BM), _key_tiles(a, tile))
            programs = math.prod(1 if size == 1 else n for n, size in zip(counts, t.shape))
            launch = _launch(
                tile, kind, programs, SUM_QUERIES=t.shape[2] == 1, SUM_KEYS=t.shape[3] == 1
            )
            dbias[name] = Dbias(
                launch, tuple(n if size == 1 else 1 for n, size in zip(counts, t.shape))
            )
    return BackwardPlan(dq, dkdv, dbias)


def _launch(tile: Config, kind: Kind, programs: int, **more: int) -> Launch:
    return Launch(tile, dataclasses.replace(kind, BM=tile.BM, BN=tile.BN, **more), programs)


def _query_programs(a: AttentionProblem, tile: Config) -> int:
    """Return the number of Q tiles over all sequences and heads."""
    return a.sequences * a.heads * -(-a.num_queries // tile.BM)


def _key_tiles(a: AttentionProblem, tile: Config) -> int:
    return -(-(a.num_keys + a.key_start % 32) // tile.BN)
