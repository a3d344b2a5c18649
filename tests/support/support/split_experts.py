# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts split over ranks: per-rank test functions and planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytransformer.distributed import experts
from pytransformer.nn.blocks import Block
from pytransformer.nn.experts import Experts, MixtureOfExperts
from pytransformer.nn.parallel import gathered

from .split_calls import mesh_of
from .split_models import Batch, make, train

D_MODEL, HIDDEN, BALANCE = 6, 10, 0.3


def mixture(options: Mapping[str, Any], dtype: torch.dtype) -> MixtureOfExperts:
    """Return the same mixture in every process."""
    torch.manual_seed(0)
    return MixtureOfExperts(D_MODEL, HIDDEN, **options).to(dtype).train()


def results(
    m: MixtureOfExperts, tokens: torch.Tensor, grad: torch.Tensor, share: float
) -> dict[str, torch.Tensor]:
    """Return out, the balance loss and gradients; ``share`` weights the balance loss."""
    x = tokens.clone().requires_grad_()
    out = m(x)
    assert m.balance_loss is not None
    ((out * grad).sum() + BALANCE * share * m.balance_loss).backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad, "balance": share * m.balance_loss.detach()}
    return found | gathered(m, {n: p.grad for n, p in m.named_parameters() if p.grad is not None})


def _room_of_its_own(counts: torch.Tensor, capacity: int) -> torch.Tensor:
    return counts.clamp(max=capacity)


def _no_gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return grad.new_zeros(sum(ctx.way[0]), grad.shape[1]), None, None, None


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "every rank and choice has all the room": (experts, "_with_room", _room_of_its_own),
    "rows in the order in which they came": (
        experts,
        "_by_expert",
        lambda counts: torch.arange(int(counts.sum())),
    ),
    "gradients of rows not sent back": (experts._Exchange, "backward", staticmethod(_no_gradient)),
}


def mixed(
    rank: int,
    group: dist.ProcessGroup,
    options: Mapping[str, Any],
    tokens: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    fault: str | None = None,
) -> dict[str, Any]:
    """Return :func:`results` of this rank's tokens, and the row bytes sent to other ranks."""
    m, sent = mixture(options, tokens[0].dtype), 0
    m.parallelize(group)

    def counted(
        out: torch.Tensor, rows: torch.Tensor, received: list[int], counts: list[int], **given: Any
    ) -> Any:
        nonlocal sent
        sent += (sum(counts) - counts[rank]) * rows.shape[1] * rows.element_size()
        return all_to_all(out, rows, received, counts, **given)

    all_to_all = dist.all_to_all_single
    planted = contextlib.nullcontext() if fault is None else mock.patch.object(*FAULTS[fault])
    with planted, mock.patch.object(dist, "all_to_all_single", counted):
        found = results(m, tokens[rank], grads[rank], len(tokens[rank]) / sum(map(len, tokens)))
    return {**{n: t.clone() for n, t in found.items()}, "bytes": sent}


def refusal(rank: int, group: dist.ProcessGroup, options: Mapping[str, Any], given: Any) -> str:
    try:
        mixture(options, torch.float32).parallelize(group if given is None else given)
    except ValueError as error:
        return str(error)
    return ""


def trained(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    batches: Sequence[Batch],
) -> list[torch.Tensor]:
    """Train a model with split experts, the rest under FSDP2 on the same ranks; return losses."""
    model, data = make(*made), mesh_of(group, (dist.get_world_size(group),))
    apart: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.parallelize(group, mean=True)
        if isinstance(module, Experts):
            apart |= set(module.parameters())
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=data, ignored_params=apart)
    fully_shard(model, mesh=data, ignored_params=apart)
    losses = train(
        model,
        [{n: t.chunk(data.size())[rank] for n, t in batch.items()} for batch in batches],
        clip=None,
    )
    for loss in losses:
        dist.all_reduce(loss, group=group)
        loss /= data.size()
    return losses
