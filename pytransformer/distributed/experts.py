# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: dispatch of tokens to the ranks of their experts by all_to_all_single.

Every rank has local tokens and some of the experts. The ranks exchange how many of their tokens
chose each expert, so all know which tokens fit the capacity. First choices precede second choices,
and within a choice ranks are in order, as in one process with the tokens of all ranks concatenated.
Only accepted tokens are sent, and they arrive in the order of the one-process computation.

Source: Lepikhin et al., "GShard" (2021), section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """The destinations of all ranks' slots; a slot is a token with one of its choices.

    Attributes:
        kept: (choices, ranks, experts) int64, slots of each rank that an expert accepts.
        order: this rank's accepted slots, flattened (choice, token), sorted by expert.
    """

    group: dist.ProcessGroup | None
    rank: int
    kept: torch.Tensor
    order: torch.Tensor

    @property
    def own(self) -> slice:
        """Return this rank's experts."""
        size = self.kept.shape[2] // self.kept.shape[1]
        return slice(self.rank * size, (self.rank + 1) * size)

    def run(
        self, rows: torch.Tensor, experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return (slots of this rank, d), in ``order``, after their experts.

        Args:
            experts: receives rows and the start of each expert's rows.
        """
        sent = self.kept[:, self.rank].sum(0).unflatten(0, (self.kept.shape[1], -1)).sum(1).tolist()
        of_own = self.kept[:, :, self.own]
        received = of_own.sum((0, 2)).tolist()
        rows = exchange(rows, sent, received, self.group)
        order = _by_expert(of_own)
        starts = torch.nn.functional.pad(of_own.sum((0, 1)).cumsum(0), (1, 0)).int()
        out = experts(rows[order], starts)
        return exchange(out[order.argsort()], received, sent, self.group)


def dispatch(
    slots: torch.Tensor,
    choices: int,
    experts: int,
    capacity_of: Callable[[int], int],
    group: dist.ProcessGroup | None,
) -> Dispatch:
    """Return the destinations of this rank's slots.

    Args:
        slots: (choices * tokens,) the expert of each slot of this rank, first choices first;
            ``experts`` for unused slots.
        capacity_of: maps the number of tokens of all ranks to an expert's maximum number of slots.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tokens = len(slots) // choices
    key = slots * choices + torch.arange(choices, device=slots.device).repeat_interleave(tokens)
    key, order = key.sort(stable=True)
    starts = torch.searchsorted(key, torch.arange(experts * choices + 1, device=key.device))
    own = torch.cat([starts.diff(), starts.new_full((1,), tokens)])
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group=group)
    counts = (
        torch.stack([f[:-1].view(experts, choices) for f in found]).permute(2, 0, 1).contiguous()
    )  # [choices, ranks, experts]
    kept = _with_room(counts, capacity_of(sum(int(f[-1]) for f in found)))
    # Unused slots have none.
    room = torch.nn.functional.pad(kept[:, rank].T.flatten(), (0, choices))
    stays = (
        torch.arange(len(key), device=key.device) - starts[key.clamp(max=experts * choices)]
        < room[key]
    )
    return Dispatch(group, rank, kept, order[stays])


def _with_room(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return the accepted part of (choices, ranks, experts): by choice, then by rank."""
    before = counts.flatten(0, 1).cumsum(0).view_as(counts) - counts
    return torch.minimum((capacity - before).clamp(min=0), counts)


def _by_expert(counts: torch.Tensor) -> torch.Tensor:
    """Return the permutation of rows from (rank, expert, choice) order to (expert, choice, rank).

    Args:
        counts: (choices, ranks, experts).
    """
    keys = torch.arange(counts.shape[2] * counts.shape[0], device=counts.device).repeat(
        counts.shape[1]
    )
    return keys.repeat_interleave(counts.permute(1, 2, 0).flatten()).argsort(stable=True)


def exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the rows that the ranks sent here, in rank order; backward returns their gradients.

    Args:
        sent: number of rows to send to each rank.
        received: number of rows from each rank.
    """
    result: torch.Tensor = _Exchange.apply(rows, sent, received, group)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any
    ) -> torch.Tensor:
        ctx.way = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.way
        # A Function, so it can be differentiated twice.
        return _Exchange.apply(grad, received, sent, group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: Any
) -> torch.Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None
