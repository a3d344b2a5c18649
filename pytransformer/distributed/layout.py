# SPDX-License-Identifier: Apache-2.0
"""The rows of a sequence that each rank of a group has.

``contiguous``: n chunks; rank r has chunk r. ``zigzag``: 2n chunks; rank r has chunks r and 2n - 1
- r, in this order. With causal attention, zigzag gives every rank the same number of visible pairs;
with contiguous, the last rank has 2n - 1 times the first rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.distributed as dist

from .group import check_group

Layout = Literal["contiguous", "zigzag"]


def check_layout(op: str, layout: object) -> None:
    if layout not in get_args(Layout):
        raise ValueError(
            f"{op}: layout must be one of {', '.join(map(repr, get_args(Layout)))}, got {layout!r}"
        )


def chunks_of_a_rank(layout: str) -> int:
    return 2 if layout == "zigzag" else 1


def chunk_ranges(layout: str, ranks: int, length: int) -> tuple[tuple[range, ...], ...]:
    """Return each rank's absolute rows, by chunk, in the order of its shard."""
    size = length // (ranks * chunks_of_a_rank(layout))

    def chunk(i: int) -> range:
        return range(i * size, (i + 1) * size)

    if layout == "zigzag":
        return tuple((chunk(r), chunk(2 * ranks - 1 - r)) for r in range(ranks))
    return tuple((chunk(r),) for r in range(ranks))


def check_length(op: str, name: str, length: int, pieces: int, what: str) -> None:
    if length % pieces:
        padded = -(-length // pieces) * pieces
        raise ValueError(
            f"{op}: {what} of {name} must be a multiple of {pieces}, got {length}: pad the sequence"
            f" to {padded} and give query_lengths and key_lengths"
        )


def shard_sequence(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = 2,
    layout: Layout = "zigzag",
) -> torch.Tensor:
    """Return this rank's rows of a sequence that every rank has in full.

    Args:
        x: any tensor with the sequence in ``dim``: (B, H, L, D) with 2, (B, L) or (B, L, D) with 1.
        group: the ranks that share the sequence; None means the default group.
        layout: ``"contiguous"`` or ``"zigzag"``, as in ring_attention.

    Returns:
        A view if the layout allows it, else a copy. Differentiable; the gradient of ``x`` is zero
            outside these rows.

    Raises:
        ValueError: the length is not a multiple of the number of chunks; pad it and pass lengths.
    """
    check_layout("shard_sequence", layout)
    rank, ranks = check_group("shard_sequence", group)
    length = x.shape[dim]
    check_length(
        "shard_sequence", f"dimension {dim}", length, ranks * chunks_of_a_rank(layout), "the length"
    )
    pieces = [x.narrow(dim, c.start, len(c)) for c in chunk_ranges(layout, ranks, length)[rank]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def gather_sequence(
    x: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    dim: int = 2,
    layout: Layout = "zigzag",
) -> torch.Tensor:
    """Return the full sequence on every rank, the inverse of :func:`shard_sequence`.

    Differentiable: each rank gets the gradient of its rows, summed over the ranks in order, because
    each rank may use the full sequence.
    """
    check_layout("gather_sequence", layout)
    _, ranks = check_group("gather_sequence", group)
    check_length(
        "gather_sequence", f"dimension {dim}", x.shape[dim], chunks_of_a_rank(layout), "the length"
    )
    gathered: torch.Tensor = _Gather.apply(x, group, dim, layout, ranks)
    return gathered


def in_order(shards: Sequence[torch.Tensor], dim: int, layout: str) -> torch.Tensor:
    """Return the full sequence of the ranks' shards."""
    if layout == "contiguous":
        return torch.cat(list(shards), dim)
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([*(a for a, _ in halves), *(b for _, b in reversed(halves))], dim)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, dim, layout, ranks):  # type: ignore[no-untyped-def]
        ctx.rest = group, dim, layout, ranks
        shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(shards, x.contiguous(), group=group)
        return in_order(shards, dim, layout)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        group, dim, layout, ranks = ctx.rest
        rank = dist.get_rank(group)
        ranges = chunk_ranges(layout, ranks, grad.shape[dim])
        shares = [
            torch.cat([grad.narrow(dim, c.start, len(c)) for c in ranges[r]], dim).contiguous()
            for r in range(ranks)
        ]
        received = [torch.empty_like(shares[rank]) for _ in range(ranks)]
        dist.all_to_all(received, shares, group=group)
        total = received[0]
        for share in received[1:]:
            total = total + share
        return total, None, None, None, None
