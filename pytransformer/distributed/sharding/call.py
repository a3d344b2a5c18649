# SPDX-License-Identifier: Apache-2.0
"""A call on DTensors: each rank runs the plain op on its share; placements combine the shares.

If a mesh dimension splits nothing, all its ranks compute the same. A plain tensor among DTensors is
replicated. If the first argument is plain, the results are plain and full on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ...ops._core.op import Op
from .ways import Start, Way, mesh_of, starts_of, ways_of

Rule = Callable[[Any], Sequence[Way]]
DROPOUT = (
    "dropout goes by the number of the row, and the rows of a rank do not follow each other:"
    " redistribute to Shard(0) or Replicate(), or use no dropout"
)


def run_split(
    op: Op, a: Any, backend: str | None, strict: bool, ways: Sequence[Way]
) -> tuple[torch.Tensor, ...]:
    """Return the differentiable outputs of the op."""
    tensors = tensors_of(op, a)
    mesh = mesh_of(op.name, tensors)
    chosen = ways_of(op.name, tensors, mesh, ways)
    local: dict[str, Any] = starts_of(tensors, mesh, chosen)
    for name, t in tensors.items():
        if name == "dropout_seed":
            local[name] = seed_of_the_first(t, mesh)
            continue
        placed = [way.argument(name) for way in chosen], [way.gradient(name) for way in chosen]
        local[name] = to_local(t, mesh, *placed)
        if any(name in way.once for way in chosen):
            first = all(
                mesh.get_local_rank(i) == 0 for i, way in enumerate(chosen) if name in way.once
            )
            local[name] = OnFirst.apply(local[name], first)
    outputs = op(a._replace(**local), backend, strict)[: len(op.grad_names)]
    results = []
    for i, t in enumerate(outputs):
        shape = list(t.shape)
        for dim, size in (
            (w.outputs[i], tensors[n].shape[d]) for w in chosen for n, d in w.arguments.items()
        ):
            if dim is not None:
                shape[dim] = size
        results.append(from_local(t, mesh, [way.output(i) for way in chosen], shape))
    return tuple(results if isinstance(a[0], DTensor) else map(whole, results))


def tensors_of(op: Op, a: Any) -> dict[str, torch.Tensor]:
    return {name: t for name, t in zip(a._fields[: op.num_tensors], a) if t is not None}


def to_local(
    t: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    gradient: Sequence[Placement],
) -> torch.Tensor:
    """Return this rank's part under ``placements``; its gradient gets the ``gradient`` ones."""
    if not isinstance(t, DTensor):
        t = from_local(t, mesh, [Replicate()] * mesh.ndim)
    if tuple(t.placements) != tuple(placements):
        t = t.redistribute(placements=placements)
    local: torch.Tensor = FirstOrder.apply(t.to_local(grad_placements=gradient))
    return local


def from_local(
    t: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None = None,
) -> DTensor:
    """Return the DTensor with this local part.

    Args:
        shape: of the full tensor, if ranks may have parts of different sizes.
    """
    if shape is None:
        return DTensor.from_local(t, mesh, placements, run_check=False)
    stride, step = [0] * t.dim(), 1
    # The memory order of the part.
    for dim in sorted(range(t.dim()), key=lambda d: (t.stride(d), -d)):
        stride[dim], step = step, step * shape[dim]
    return DTensor.from_local(
        t, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def whole(t: torch.Tensor) -> torch.Tensor:
    """Return the full tensor on this rank; its gradient is the same on all ranks."""
    if not isinstance(t, DTensor):
        return t
    replicated = [Replicate()] * t.device_mesh.ndim
    local: torch.Tensor = t.redistribute(placements=replicated).to_local(grad_placements=replicated)
    return local


def seed_of_the_first(seed: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the seed of the mesh's first rank on all ranks, for one dropout mask."""
    seed = (seed.to_local() if isinstance(seed, DTensor) else seed).clone()
    for place in range(mesh.ndim):
        group = mesh.get_group(place)
        dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return seed


class FirstOrder(torch.autograd.Function):
    """Identity that raises on double backward.

    Some of torch's placements drop out of the graph of a backward.
    """

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "second derivatives of calls with DTensors are not supported: differentiate without"
                " create_graph=True"
            )
        return grad


class OnFirst(torch.autograd.Function):
    """Identity on the first rank, zeros on other ranks, so a sum over ranks has it once.

    The gradient passes on every rank.
    """

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, first: bool) -> torch.Tensor:
        return t.view_as(t) if first else torch.zeros_like(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def named(names: Mapping[str, int], a: Any) -> dict[str, int]:
    """Return the given arguments among these names."""
    return {name: dim for name, dim in names.items() if getattr(a, name) is not None}


def rows_from(a: Any, dim: int, lead: int) -> dict[str, Any]:
    """Return the row start for dropout of a split along one of x's ``lead`` row dimensions.

    Dropout depends on a row's index among all rows. One start suffices only if a rank's rows are
    consecutive.
    """
    if not a.dropout_p:
        return {}
    if math.prod(a.x.shape[:dim]) == 1:
        return {"starts": {"row_start": Start("x", dim, math.prod(a.x.shape[dim + 1 : lead]))}}
    return {"refused": DROPOUT}
