# SPDX-License-Identifier: Apache-2.0
"""A call of ring attention: its checked arguments, lowered once, and those of each tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..ops._attention_arguments import integers
from ..ops._core.tensors import autocast, check_same, empty_in_order, looks_at_values, shape_of
from ..ops._problem.blocks import BLOCK_TENSORS
from ..ops.attention import attention_op
from .blocks import BlockParts
from .exchange import Payload
from .group import check_call, seed_of_the_first
from .layout import check_layout, check_length, chunk_ranges, chunks_of_a_rank
from .plan import Pattern, RingPlan, ring_plan

OP = "ring_attention"
# The differentiable arguments of the raw op, in order.
PLACES = ("query", "key", "value", "mask", "bias", "slopes", "table", "sinks")
# Replicated arguments; each rank computes a share of their gradients.
ALIKE = ("slopes", "table", "sinks")


@dataclasses.dataclass(frozen=True)
class RingCall:
    """The checked arguments and the plan of one call.

    ``a`` are the arguments of the raw op. Query, key, value and segments are this rank's rows; mask
    and bias are its rows of all keys.
    """

    a: Any
    plan: RingPlan
    group: dist.ProcessGroup | None
    rank: int
    backend: str | None
    strict: bool
    sum_gradients: bool
    blocks: BlockParts | None = None

    def with_tensors(self, tensors: Sequence[torch.Tensor | None]) -> RingCall:
        return dataclasses.replace(self, a=type(self.a)(*tensors, *self.a[len(tensors) :]))

    def rows(self, i: int) -> tuple[int, int]:
        """Return the row range of query chunk i in this rank's shard."""
        return _within(self.plan.queries[self.rank], i)

    def key_rows(self, j: int) -> tuple[int, int]:
        return _within(self.plan.keys[self.rank], j)

    @property
    def queries_within(self) -> torch.Tensor | None:
        """Return bool (B, 1, Lq / n), True before query_lengths; None: all."""
        lengths = self.a.query_lengths
        if lengths is None:
            return None
        places = [
            torch.arange(c.start, c.stop, device=lengths.device)
            for c in self.plan.queries[self.rank]
        ]
        return torch.cat(places) < lengths[:, None, None]

    def own_keys(self, j: int, *, to_send: bool = False) -> Payload:
        """Return chunk j of this rank's key, value and segments (if any)."""
        first, last = self.key_rows(j)
        of_keys = [self.a.key[:, :, first:last], self.a.value[:, :, first:last]]
        if self.a.key_segments is not None:
            of_keys.append(self.a.key_segments[:, first:last])
        return tuple(t.contiguous() if to_send else t for t in of_keys)

    def empty_keys(self, j: int) -> Payload:
        return tuple(
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.own_keys(j)
        )

    def tile(self, i: int, j: int, step: int, keys: Payload) -> Any:
        """Return the raw op's arguments for query chunk i and key chunk j of the step's owner.

        Positions are absolute: query_start and key_start, with lengths clamped to the tile's ends.
        The alignment's offset moves the start that stays non-negative; :func:`prepare` excludes
        dropout with an offset.
        """
        a, queries, of_keys = self.a, *self._ranges(i, j, step)
        down, right = max(self.plan.pattern.offset, 0), max(-self.plan.pattern.offset, 0)
        first, last = self.rows(i)
        segments = None
        if a.query_segments is not None:
            segments = a.query_segments[:, first:last].contiguous()
        blocks = {}
        if self.blocks is not None:
            blocks = dict(
                zip(BLOCK_TENSORS, self.blocks.part(queries=queries, keys=of_keys).blocks)
            )
        return a._replace(
            **blocks,
            query=a.query[:, :, first:last],
            key=keys[0],
            value=keys[1],
            mask=None if a.mask is None else self.part_of("mask", a.mask, i, j, step),
            bias=None if a.bias is None else self.part_of("bias", a.bias, i, j, step),
            sinks=None,
            query_lengths=_cut(a.query_lengths, down, queries),
            key_lengths=_cut(a.key_lengths, right, of_keys),
            prefix_lengths=_cut(a.prefix_lengths, right, of_keys),
            query_segments=segments,
            key_segments=keys[2].contiguous() if segments is not None else None,
            causal="none" if a.causal == "none" else "top_left",
            global_keys=a.global_keys + right if a.global_keys else 0,
            query_start=queries.start + down,
            key_start=of_keys.start + right,
        )

    def part_of(self, name: str, t: torch.Tensor, i: int, j: int, step: int) -> torch.Tensor:
        """Return a tile's part of an argument with rows or keys, or of its gradient."""
        if name == "query":
            return t[:, :, slice(*self.rows(i))]
        if name not in ("mask", "bias"):
            return t
        of_keys = self._ranges(i, j, step)[1]
        t = t if t.shape[2] == 1 else t[:, :, slice(*self.rows(i))]
        return t if t.shape[3] == 1 else t[..., of_keys.start : of_keys.stop]

    def is_alike(self, name: str) -> bool:
        """Return whether the argument is replicated, with a share of the gradient per rank."""
        return name in ALIKE or (name in ("mask", "bias") and getattr(self.a, name).shape[2] == 1)

    def empty_out(self) -> torch.Tensor:
        query, value_dim = self.a.query, self.a.value.shape[3]
        return empty_in_order(
            query, None if value_dim == query.shape[3] else (*query.shape[:3], value_dim)
        )

    def _ranges(self, i: int, j: int, step: int) -> tuple[range, range]:
        return self.plan.queries[self.rank][i], self.plan.keys[self.plan.owner(self.rank, step)][j]


def _within(chunks: Sequence[range], i: int) -> tuple[int, int]:
    before = sum(len(c) for c in chunks[:i])
    return before, before + len(chunks[i])


def _cut(lengths: torch.Tensor | None, shift: int, rows: range) -> torch.Tensor | None:
    """Return absolute lengths clamped to the tile's end, as the raw op expects."""
    return None if lengths is None else (lengths + shift).clamp(max=rows.stop + shift)


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | None,
    layout: str,
    sum_gradients: bool,
    options: Mapping[str, Any],
) -> tuple[RingCall, tuple[torch.Tensor | None, ...]]:
    """Return the checked call and the tensors among its arguments."""
    named = dict(query=query, key=key, value=value, layout=layout, sum_gradients=sum_gradients)
    rank, ranks = check_call(OP, group, {**named, **options})
    check_layout(OP, layout)
    if key.shape[2] != value.shape[2]:
        raise ValueError(
            f"{OP}: key and value must have the same length, got {shape_of(key)} and"
            f" {shape_of(value)}"
        )
    query, key, value = autocast(query.device, query, key, value)
    for name, t in (("query", query), ("key", key)):
        check_length(
            OP,
            name,
            t.shape[2],
            chunks_of_a_rank(layout),
            f"with layout={layout!r} the length on each rank",
        )
    options = dict(options)
    blocks = BlockParts.of(options.get("attn_mask"))
    segments = _segments(query, key, options)
    totals = query.shape[2] * ranks, key.shape[2] * ranks
    if blocks is not None:
        options["attn_mask"] = None
        _check_blocks(blocks, query, totals)
    # Masks are checked against these shapes.
    whole = [t[:, :, :1].expand(-1, -1, totals[1], -1) for t in (key, value)]
    a, backend, strict = attention_op.prepare(query, *whole, **options)
    a = a._replace(key=key, value=value, query_segments=segments[0], key_segments=segments[1])
    if a.dropout_seed is not None and options.get("dropout_seed") is None and ranks > 1:
        a = a._replace(dropout_seed=seed_of_the_first(a.dropout_seed, group))
    _check_rows(a, ranks)
    of_queries, of_keys = (chunk_ranges(layout, ranks, total) for total in totals)
    hidden = (
        blocks.hidden(sum(of_queries, ()), sum(of_keys, ())) if blocks is not None else frozenset()
    )
    pattern = Pattern(
        a.causal != "none",
        a.left,
        a.right,
        a.global_keys,
        _offset(a, totals),
        *_most(a, totals),
        hidden,
    )
    plan = ring_plan(pattern, of_queries, of_keys)
    count = attention_op.num_tensors
    return RingCall(a, plan, group, rank, backend, strict, bool(sum_gradients), blocks), a[:count]


def _segments(
    query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Remove the segments from the options and return them; they are split like query and key."""
    given = [options.pop(name, None) for name in ("query_segments", "key_segments")]
    if (given[0] is None) != (given[1] is None):
        raise ValueError(f"{OP}: query_segments and key_segments go together; give both or neither")
    return (
        integers("query_segments", given[0], (query.shape[0], query.shape[2]), query),
        integers("key_segments", given[1], (key.shape[0], key.shape[2]), query),
    )


def _check_blocks(blocks: BlockParts, query: torch.Tensor, totals: tuple[int, int]) -> None:
    shape, wanted = blocks.mask.shape, (*query.shape[:2], *totals)
    if any(n not in (1, m) for n, m in zip(shape[:2], wanted)) or shape[2:] != wanted[2:]:
        raise ValueError(
            f"{OP}: attn_mask must be a block mask of the full sequence, (B or 1, Hq or 1, Lq, Lk)"
            f" of {wanted}, got {shape}"
        )
    check_same(OP, "query", query, "attn_mask", blocks.mask.blocks.offsets)


def _check_rows(a: Any, ranks: int) -> None:
    """Raise ValueError if a mask's single row could be this rank's only query or all ranks'."""
    for name in ("mask", "bias"):
        t = getattr(a, name)
        if ranks > 1 and t is not None and t.requires_grad and a.query.shape[2] == 1:
            raise ValueError(
                f"{OP}: with one query on each rank the gradient of"
                f" {'attn_mask' if name == 'mask' else name} may be this rank's row or a share of"
                " what all ranks have: give it detached, or more queries"
            )


def _offset(a: Any, totals: tuple[int, int]) -> int:
    """Return the alignment's offset, which must be equal for all sequences."""
    if a.causal != "bottom_right":
        return 0
    given = a.query_lengths, a.key_lengths
    if given[0] is None and given[1] is None:
        offset = totals[1] - totals[0]
    elif given[0] is given[1]:
        offset = 0
    else:
        ends = [
            t if t is not None else a.key.new_full((a.key.shape[0],), n, dtype=torch.int64)
            for t, n in zip(given, totals)
        ]
        offsets = (ends[1] - ends[0]).unique().tolist()
        if len(offsets) > 1:
            raise ValueError(
                f'{OP}: causal="bottom_right" needs key_lengths - query_lengths to be the same for'
                f" every sequence, got {offsets}: call once for each group of sequences that have"
                " it in common"
            )
        offset = offsets[0] if offsets else 0
    if offset and a.dropout_p:
        raise ValueError(
            f'{OP}: dropout goes by the index of the query, which causal="bottom_right" with'
            f' {offset:+d} keys more than queries moves: use causal="top_left", or no dropout'
        )
    return int(offset)


def _most(a: Any, totals: tuple[int, int]) -> tuple[int, int, int]:
    """Return the longest prefix, queries and keys.

    They are exact on the CPU. On other devices, where reading would synchronize, they are upper
    bounds.
    """

    def longest(name: str, most: int) -> int:
        t = getattr(a, name)
        if t is None or not t.numel() or not looks_at_values(t.device):
            return most
        low, high = int(t.min()), int(t.max())
        if low < 0 or high > most:
            raise ValueError(
                f"{OP}: {name} must be between 0 and {most}, got {low if low < 0 else high}"
            )
        return high

    prefix = 0 if a.prefix_lengths is None else totals[1]
    return (
        longest("prefix_lengths", prefix),
        longest("query_lengths", totals[0]),
        longest("key_lengths", totals[1]),
    )
