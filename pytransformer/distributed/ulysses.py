# SPDX-License-Identifier: Apache-2.0
"""Ulysses attention: the sequence is split over ranks, except in attention, which splits heads.

An all-to-all gives each rank all rows of Hq / n heads, attention runs as in one process, and
another all-to-all returns each rank's rows of all heads. It sends fewer bytes than a ring if n is
large, but n must divide the heads, and each rank holds full rows of a mask. See
docs/distributed.md.

Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ..ops._attention_arguments import dense_term, integers
from ..ops._core.tensors import autocast, empty_in_order
from ..ops.attention import attention_op
from ..ops.masks import AlibiBias, RelativePositionBias
from ..ops.options import AttentionOptions
from .blocks import BlockParts
from .group import check_call, outside_graphs, seed_of_the_first, sum_over_ranks
from .layout import (
    Layout,
    check_layout,
    check_length,
    chunk_ranges,
    chunks_of_a_rank,
    gather_sequence,
    in_order,
)

OP = "ulysses_attention"


@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    sum_gradients: bool = True,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    sum_gradients: bool = True,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@outside_graphs
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    sum_gradients: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`pytransformer.attention` of a split sequence; each rank computes some heads.

    The dropout mask equals one process's. Every rank must call forward and backward.

    Args:
        query: (B, Hq, Lq / n, D), this rank's rows; n must divide Hq.
        key, value: (B, Hkv, Lk / n, D), (B, Hkv, Lk / n, Dv), this rank's rows; n must divide Hkv
            or Hkv divide n.
        group, layout, sum_gradients, return_lse: as in :func:`ring_attention`.
        options: as in :func:`ring_attention`. If ``dropout_seed`` is None, the first rank draws it.

    Returns:
        (B, Hq, Lq / n, Dv) in query's dtype and memory order; with return_lse a pair.

    Raises:
        TypeError, ValueError: as in ring_attention, and if the heads do not split.
    """
    named = dict(query=query, key=key, value=value, layout=layout, sum_gradients=sum_gradients)
    rank, ranks = check_call(OP, group, {**named, **options})
    check_layout(OP, layout)
    heads, key_heads = query.shape[1], key.shape[1]
    _check_split(query, key, ranks, layout, options)
    swap = _Swap(group, rank, ranks, layout, sum_gradients, heads)
    whole = {name: swap.option(name, t, query, key) for name, t in options.items()}
    q, k, v = autocast(query.device, query, key, value)
    if key_heads < ranks:
        k, v = (t.repeat_interleave(ranks // key_heads, 1) for t in (k, v))
    a, backend, strict = attention_op.prepare(*(swap.to_heads(t) for t in (q, k, v)), **whole)
    if a.dropout_seed is not None:
        a = a._replace(head_start=swap.head_range.start)
        if options.get("dropout_seed") is None and ranks > 1:
            a = a._replace(dropout_seed=seed_of_the_first(a.dropout_seed, group))
    out, lse = attention_op(a, backend, strict)
    out = swap.to_rows(out, q)
    return (out, swap.to_rows(lse[..., None], q)[..., 0]) if return_lse else out


def _check_split(
    query: torch.Tensor, key: torch.Tensor, ranks: int, layout: str, options: dict[str, Any]
) -> None:
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % ranks or (key_heads % ranks and ranks % max(key_heads, 1)):
        raise ValueError(
            f"{OP}: {ranks} ranks must divide query's heads, and key's heads or be a multiple of"
            f" them, got {heads} and {key_heads}: use fewer ranks, or ring_attention"
        )
    for name, t in (("query", query), ("key", key)):
        check_length(
            OP,
            name,
            t.shape[2],
            chunks_of_a_rank(layout),
            f"with layout={layout!r} the length on each rank",
        )


@dataclasses.dataclass(frozen=True)
class _Swap:
    """The exchange between this rank's rows of all heads and all rows of this rank's heads."""

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    layout: Any
    sum_gradients: bool
    heads: int

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        swapped: torch.Tensor = _ToHeads.apply(x, self)
        return swapped

    def to_rows(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, in the memory order of ``like``."""
        swapped: torch.Tensor = _ToRows.apply(x, self, like)
        return swapped

    def option(self, name: str, t: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
        """Return an attention option for this rank's heads."""
        if name in ("query_segments", "key_segments") and t is not None:
            of = query if name[0] == "q" else key
            return self._rows(integers(name, t, (of.shape[0], of.shape[2]), query), 1)
        if name == "sinks" and isinstance(t, torch.Tensor):
            return self._own_heads(t, 0)
        if name == "bias" and isinstance(t, AlibiBias):
            return AlibiBias(self._own_heads(t.slopes, 0))
        if name == "bias" and isinstance(t, RelativePositionBias):
            return dataclasses.replace(t, table=self._own_heads(t.table, 1))
        if name in ("attn_mask", "bias") and isinstance(t, torch.Tensor):
            return self._dense(name, t, query, key)
        if (
            name == "attn_mask"
            and (blocks := BlockParts.of(t)) is not None
            and blocks.mask.shape[1] > 1
        ):
            self._check_heads(blocks.mask.shape[1], blocks.mask.shape)
            return blocks.part(heads=self.head_range)
        return t

    def _dense(
        self, name: str, t: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Return all rows of a mask for this rank's heads, from this rank's rows for all heads."""
        x = dense_term(name, t, (*query.shape[:3], key.shape[2] * self.ranks), query)
        assert x is not None
        if x.shape[2] == 1 and query.shape[2] == 1 and self.ranks > 1:
            raise ValueError(
                f"{OP}: with one query on each rank {name} of one row may be this rank's or all"
                " ranks': give more queries"
            )
        if x.shape[2] == 1:
            return self._own_heads(x, 1) if x.shape[1] > 1 else _alike(x, self)
        return self.to_heads(x) if x.shape[1] > 1 else self._rows(x, 2)

    def _rows(self, t: Any, dim: int) -> torch.Tensor:
        return gather_sequence(t, group=self.group, dim=dim, layout=self.layout)

    def _own_heads(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's heads of a replicated tensor."""
        self._check_heads(t.shape[dim], t.shape)
        return _alike(t, self).narrow(dim, self.head_range.start, len(self.head_range))

    @property
    def head_range(self) -> range:
        """Return the heads that this rank computes."""
        size = self.heads // self.ranks
        return range(self.rank * size, (self.rank + 1) * size)

    def _check_heads(self, entries: int, shape: Sequence[int]) -> None:
        if entries != self.heads:
            raise ValueError(
                f"{OP}: expected one entry for each of query's {self.heads} heads, got shape"
                f" {tuple(shape)}"
            )


def _all_to_all(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Exchange (n, …): part r goes to rank r, and part r of the result comes from rank r."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _heads_from_rows(x: torch.Tensor, swap: _Swap) -> torch.Tensor:
    parts = x.unflatten(1, (swap.ranks, -1)).movedim(1, 0).contiguous()
    return in_order(_all_to_all(parts, swap.group).unbind(0), 2, swap.layout)


def _rows_from_heads(x: torch.Tensor, swap: _Swap) -> torch.Tensor:
    ranges = chunk_ranges(swap.layout, swap.ranks, x.shape[2])
    parts = torch.stack(
        [torch.cat([x[:, :, c.start : c.stop] for c in of_rank], 2) for of_rank in ranges]
    )
    return _all_to_all(parts, swap.group).movedim(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, swap: _Swap) -> torch.Tensor:
        ctx.swap = swap
        return _heads_from_rows(x, swap)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rows_from_heads(grad, ctx.swap), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, swap: _Swap, like: torch.Tensor) -> torch.Tensor:
        ctx.swap = swap
        rows = _rows_from_heads(x, swap)
        return empty_in_order(like, rows.shape, rows.dtype).copy_(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _heads_from_rows(grad, ctx.swap), None, None


def _alike(t: torch.Tensor, swap: _Swap) -> torch.Tensor:
    """Return a replicated tensor whose gradient is summed over the ranks."""
    same: torch.Tensor = _Alike.apply(t, swap) if swap.sum_gradients else t
    return same


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, swap: _Swap) -> torch.Tensor:
        ctx.swap = swap
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_over_ranks([grad], ctx.swap.group)[0], None
