# SPDX-License-Identifier: Apache-2.0
"""Launch plan of a call, computed once: tiles, compile-time constants, number of programs, and
scratch.

Creates and reads no tensor; launches, scratch and the output of ``explain`` all follow the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import NamedTuple

from pytransformer.ops._problem.attention import AttentionProblem

from .configs import Config, split
from .problem import Kind, SplitKV, capability, choose, kind_of


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
