# SPDX-License-Identifier: Apache-2.0
"""Per-rank functions for the tests of pytransformer.distributed, besides the fuzzer's problems."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from pytransformer.distributed import gather_sequence, shard_sequence, ulysses, ulysses_attention
from pytransformer.distributed.call import prepare
from pytransformer.ops.attention import attention_op

from .attention_problem import Problem
from .ring_faults import planted
from .split_attention import SCHEMES, attend, rows_of


def attend_with(
    rank: int, group: dist.ProcessGroup, fault: str | None, *args: Any, **options: Any
) -> dict[str, Any]:
    """Run :func:`attend` with a planted fault."""
    with planted(fault):
        return attend(rank, group, *args, **options)


def outputs(
    rank: int,
    group: dist.ProcessGroup,
    scheme: str,
    layout: str,
    q: Any,
    k: Any,
    v: Any,
    **options: Any,
) -> Any:
    """Return out of this rank's rows, without gradients."""
    shards = [
        t.index_select(2, rows_of(t.shape[2], dist.get_world_size(group), rank, layout))
        for t in (q, k, v)
    ]
    return SCHEMES[scheme](*shards, group=group, layout=layout, **options)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes that this process sends, by operation."""
    sent: Counter[str] = Counter()

    def point_to_point(calls: list[dist.P2POp]) -> Any:
        sent["isend"] += sum(c.tensor.nbytes for c in calls if c.op is dist.isend)
        return batch(calls)

    def to_all(received: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        sent["all_gather"] += tensor.nbytes * (len(received) - 1)
        return all_gather(received, tensor, **options)

    def single(received: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
        ranks = dist.get_world_size(options.get("group"))
        sent["all_to_all"] += tensor.nbytes // ranks * (ranks - 1)
        return all_to_all(received, tensor, **options)

    batch, all_gather, all_to_all = dist.batch_isend_irecv, dist.all_gather, dist.all_to_all_single
    with (
        mock.patch.object(dist, "batch_isend_irecv", point_to_point),
        mock.patch.object(dist, "all_gather", to_all),
        mock.patch.object(dist, "all_to_all_single", single),
    ):
        yield sent


def bytes_sent(
    rank: int, group: dist.ProcessGroup, problem: Problem, scheme: str, layout: str
) -> dict[str, int]:
    """Return the bytes sent forward and backward, without the initial consistency check."""
    with counted() as sent, mock.patch("pytransformer.distributed.group.check_agreement"):
        attend(rank, group, problem, scheme, layout)
    return dict(sent)


def first_collectives(rank: int, group: dist.ProcessGroup, problem: Problem) -> list[str]:
    """Return this rank's collectives in two ring calls, with value checks off as on GPUs."""
    called: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(dist, name)

        def note(*args: Any, **options: Any) -> Any:
            called.append(name)
            return call(*args, **options)

        return mock.patch.object(dist, name, note)

    with (
        noted("all_reduce"),
        noted("batch_isend_irecv"),
        mock.patch("pytransformer.distributed.group.looks_at_values", return_value=False),
        mock.patch("pytransformer.distributed.group._MET", weakref.WeakKeyDictionary()),
    ):
        for _ in range(2):
            attend(rank, group, problem, "ring", "contiguous")
    return called


def peak_bytes(rank: int, group: dist.ProcessGroup, problem: Problem, layout: str) -> int:
    """Return this rank's peak tensor memory, forward and backward, without the full inputs."""
    shards = [
        t.index_select(
            2, rows_of(t.shape[2], dist.get_world_size(group), rank, layout)
        ).requires_grad_()
        for t in (problem.tensors["query"], problem.tensors["key"], problem.tensors["value"])
    ]
    tracker = MemTracker()
    tracker.track_external(*shards)
    with tracker:
        out = SCHEMES["ring"](*shards, group=group, layout=layout, **problem.keywords)
        torch.autograd.grad(out, shards, torch.ones_like(out))
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def refusal(
    rank: int, group: dist.ProcessGroup, scheme: str, shapes: list[Any], by_rank: list[Any]
) -> str:
    """Return the error of a call with options that differ by rank; "" for none."""
    options = {"group": group, **by_rank[rank]}
    try:
        SCHEMES[scheme](*(torch.zeros(options.pop("shape", shape)) for shape in shapes), **options)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def seed_drawn(rank: int, group: dist.ProcessGroup, scheme: str) -> int:
    """Return the dropout seed drawn by default, with generators that differ by rank."""
    torch.manual_seed(rank)
    x = torch.zeros(1, dist.get_world_size(group), 4, 8)
    if scheme == "ulysses":
        with mock.patch.object(ulysses, "attention_op", wraps=attention_op) as op:
            ulysses_attention(x, x, x, group=group, dropout_p=0.5)
        return int(op.call_args.args[0].dropout_seed)
    call, _ = prepare(x, x, x, group, "zigzag", True, {"dropout_p": 0.5})
    assert call.a.dropout_seed is not None
    return int(call.a.dropout_seed)


def there_and_back(
    rank: int, group: dist.ProcessGroup, x: torch.Tensor, dim: int, layout: Any
) -> tuple[torch.Tensor, ...]:
    """Return this rank's rows, the gathered tensor, and a gradient through shard and gather.

    The upstream gradient is rank + 1.
    """
    leaf = x.clone().requires_grad_()
    shard = shard_sequence(leaf, group=group, dim=dim, layout=layout)
    whole = gather_sequence(shard, group=group, dim=dim, layout=layout)
    (grad,) = torch.autograd.grad(whole, leaf, torch.full_like(whole, rank + 1.0))
    return shard.detach().clone(), whole.detach(), grad
