# SPDX-License-Identifier: Apache-2.0
"""Faults of multi-rank attention, each of which the tests must detect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from pytransformer.distributed import blocks, call, gradients, plan, sinks, tile


def _merged_without_weights(
    merged: tile.Merged, out: torch.Tensor, lse: tile.Lse, start: int, stop: int
) -> None:
    merged.out[:, :, start:stop] += out
    merged.lse.rest[:, :, start:stop] = torch.logaddexp(merged.lse.rest[:, :, start:stop], lse.rest)


def _visible_below_the_diagonal(pattern: plan.Pattern, queries: range, keys: range) -> bool:
    """Drop the required tiles on the diagonal from computation and communication."""
    return VISIBLE(pattern, queries, keys) and not (pattern.causal and keys.stop > queries.start)


def _at(**moved: Callable[[Any], Any]) -> Callable[..., Any]:
    def tile_elsewhere(of: call.RingCall, i: int, j: int, step: int, keys: Any) -> Any:
        a = TILE(of, i, j, step, keys)
        return a._replace(**{name: move(a) for name, move in moved.items()})

    return tile_elsewhere


def _with_sinks(of: call.RingCall, i: int, j: int, step: int, keys: Any) -> Any:
    return TILE(of, i, j, step, keys)._replace(sinks=of.a.sinks)


def _of_the_last_tile(lse: tile.Lse, start: int, stop: int) -> tile.Lse:
    rest = lse.rest[:, :, start:stop]
    return tile.Lse(None, rest - 0.05)


def _part_of_other_rows(of: blocks.BlockParts, queries: range, keys: range) -> Any:
    return PART(of, queries=range(len(queries)), keys=keys)


def _all_but_the_first(
    of: blocks.BlockParts, queries: Any, keys: Any
) -> frozenset[tuple[int, int]]:
    return frozenset(
        (q.start, k.start) for q in queries for k in keys if k.start and q.start != k.start
    )


PART = blocks.BlockParts.part
VISIBLE, TILE = plan.Pattern.visible, call.RingCall.tile
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "merged without the weights of lse": (tile.Merged, "add", _merged_without_weights),
    "tiles on the diagonal neither sent nor computed": (
        plan.Pattern,
        "visible",
        _visible_below_the_diagonal,
    ),
    "queries count from the rank's start": (call.RingCall, "tile", _at(query_start=lambda a: 0)),
    "keys count from the rank's start": (
        call.RingCall,
        "tile",
        _at(key_start=lambda a: 0, key_lengths=lambda a: None),
    ),
    "lengths not cut, but halved": (
        call,
        "_cut",
        lambda lengths, shift, rows: None if lengths is None else lengths // 2,
    ),
    "a sink in every tile": (call.RingCall, "tile", _with_sinks),
    "no sink": (sinks, "sink_logits", lambda s, work: torch.full_like(s, -torch.inf, dtype=work)),
    "the rank's own share of the table's gradient": (
        gradients,
        "sum_over_ranks",
        lambda tensors, group: list(tensors),
    ),
    "gradients of other ranks' keys dropped": (
        gradients.Gradients,
        "_add_keys",
        lambda self, chunk, payload: None,
    ),
    "lse that lost the sum": (tile, "TRUSTED", float("inf")),
    "what finfo.min swallows counts again": (tile, "SWALLOWS", float("inf")),
    "blocks of the first queries": (blocks.BlockParts, "part", _part_of_other_rows),
    "chunks hidden of which blocks are shown": (blocks.BlockParts, "hidden", _all_but_the_first),
    "lse of another row in backward": (tile.Lse, "rows", _of_the_last_tile),
}


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plant the fault, or none; clear cached plans before and after."""
    plan.ring_plan.cache_clear()
    with contextlib.nullcontext() if fault is None else mock.patch.object(*FAULTS[fault]):
        yield
    plan.ring_plan.cache_clear()
