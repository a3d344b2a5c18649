# SPDX-License-Identifier: Apache-2.0
"""Faults of calls split over a device mesh, each of which the tests must detect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pytransformer.distributed.sharding import call, cross_entropy, ways


def _no_sum_of_gradients(way: ways.Way, name: str) -> Placement:
    found = GRADIENT(way, name)
    return Replicate() if isinstance(found, Partial) else found


def _no_sum_of_outputs(way: ways.Way, i: int) -> Placement:
    found = OUTPUT(way, i)
    return Replicate() if isinstance(found, Partial) else found


def _of_the_next_rank(dim: int, size: int) -> Callable[..., Any]:
    """Return a to_local that gives per-head vectors or tables the next rank's part."""

    def to_local(t: Any, mesh: Any, placements: Any, gradient: Any) -> torch.Tensor:
        local = TO_LOCAL(t, mesh, placements, gradient)
        if placements[0] != Shard(dim) or t.dim() != size or not isinstance(t, DTensor):
            return local
        rank, ranks = mesh.get_local_rank(0), mesh.size(0)
        parts = t.full_tensor().detach().chunk(ranks, dim)
        return local + (parts[(rank + 1) % ranks] - local).detach()

    return to_local


def _own_lse(shares: torch.Tensor) -> torch.Tensor:
    return torch.cat([shares[0, :2], shares[:, 2:].sum(0)])


def _counted_twice(shares: torch.Tensor) -> torch.Tensor:
    merged = MERGED(shares)
    merged[2] *= shares.shape[0]
    return merged


MERGED = cross_entropy._merged
GRADIENT, OUTPUT, TO_LOCAL = ways.Way.gradient, ways.Way.output, call.to_local
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "gradients of what is whole are not added up": (ways.Way, "gradient", _no_sum_of_gradients),
    "results are not added up": (ways.Way, "output", _no_sum_of_outputs),
    "b2 on every rank": (call.OnFirst, "forward", staticmethod(lambda ctx, t, first: t.view_as(t))),
    "lse of the rank's own classes": (cross_entropy, "_merged", _own_lse),
    "targets of the first rank's classes": (
        cross_entropy,
        "_own_classes",
        lambda n, mesh, places: range(-(-n // mesh.size(0))),
    ),
    "the target's logit from every rank": (cross_entropy, "_merged", _counted_twice),
    "dropout counts from the rank's own start": (
        call,
        "starts_of",
        lambda tensors, mesh, chosen: {},
    ),
    "slopes of other heads": (call, "to_local", _of_the_next_rank(0, 1)),
    "columns of the table of other heads": (call, "to_local", _of_the_next_rank(1, 2)),
}


@contextlib.contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Plant the fault, or none."""
    with contextlib.nullcontext() if fault is None else mock.patch.object(*FAULTS[fault]):
        yield
