# SPDX-License-Identifier: Apache-2.0
"""Splits of a call over one dimension of a device mesh, and their selection by placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclasses.dataclass(frozen=True)
class Start:
    """The absolute index where a rank's part of this dimension starts, times ``step``."""

    argument: str
    dim: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class Way:
    """One split of a call.

    Args:
        name: for messages.
        arguments: the split dimension of each split argument; others are replicated.
        outputs: the split dimension of each differentiable output; None: the result is a sum over
            the ranks.
        once: replicated arguments that only the first rank adds. Their gradient is full; the
            gradient of other replicated arguments is a sum over the ranks.
        even: arguments whose split dimension must be a multiple of the number of ranks.
        starts: the raw op's start arguments that differ between ranks.
        refused: why this call cannot use the split, and a hint; None: it can.
    """

    name: str
    arguments: Mapping[str, int]
    outputs: tuple[int | None, ...]
    once: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    starts: Mapping[str, Start] = dataclasses.field(default_factory=dict)
    refused: str | None = None

    def argument(self, name: str) -> Placement:
        return Shard(self.arguments[name]) if name in self.arguments else Replicate()

    def gradient(self, name: str) -> Placement:
        """Return the placement of the gradient that each rank's computation produces."""
        whole = name in self.once or not self.arguments
        return (
            Shard(self.arguments[name])
            if name in self.arguments
            else Replicate()
            if whole
            else Partial()
        )

    def output(self, i: int) -> Placement:
        dim = self.outputs[i] if self.arguments else None
        return Replicate() if not self.arguments else Partial() if dim is None else Shard(dim)


WHOLE = Way("none", {}, ())


def mesh_of(op: str, tensors: Mapping[str, object]) -> DeviceMesh:
    """Return the mesh that all DTensors of a call share."""
    meshes = {name: t.device_mesh for name, t in tensors.items() if isinstance(t, DTensor)}
    (first, mesh), *others = meshes.items()
    for name, other in others:
        if other != mesh:
            raise ValueError(
                f"{op}: {name} lies on {other}, {first} on {mesh}: distribute both over the same"
                " mesh, or hand over local tensors"
            )
    return mesh


def ways_of(
    op: str, tensors: Mapping[str, object], mesh: DeviceMesh, ways: Sequence[Way]
) -> list[Way]:
    """Return the split that the placements imply for each dimension of the mesh.

    Raises:
        ValueError: no split matches, sizes do not divide, or this call cannot be split; the message
            has a hint.
    """
    chosen, shares = [], dict[str, int]()
    for place in range(mesh.ndim):
        way = _way(op, _given(op, tensors, place), ways)
        if way.refused is not None and mesh.size(place) > 1:
            raise ValueError(f"{op}: split by {way.name}: {way.refused}")
        for name in (n for n in way.arguments if n in way.even):
            shares[name] = shares.get(name, 1) * mesh.size(place)
            size = tensors[name].shape[way.arguments[name]]  # type: ignore[attr-defined]
            if size % shares[name]:
                raise ValueError(
                    f"{op}: split by {way.name}: {name} has {size}, which {shares[name]} ranks do"
                    " not divide: use fewer ranks, or redistribute to Replicate()"
                )
        chosen.append(way)
    return chosen


def starts_of(
    tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, chosen: Sequence[Way]
) -> dict[str, int]:
    """Return this rank's starts, by name.

    If several mesh dimensions split a dimension, they apply in order, as in Shard.
    """
    found, sizes = dict[str, int](), dict[str, int]()
    for place, way in enumerate(chosen):
        for name, start in way.starts.items():
            size = sizes.get(name, tensors[start.argument].shape[start.dim])
            share = -(-size // mesh.size(place))
            first = min(share * mesh.get_local_rank(place), size)
            found[name] = found.get(name, 0) + start.step * first
            sizes[name] = min(share, size - first)
    return found


def _given(op: str, tensors: Mapping[str, object], place: int) -> dict[str, int]:
    """Return the dimension of each argument that this mesh dimension splits."""
    given = {}
    for name, t in tensors.items():
        placement = t.placements[place] if isinstance(t, DTensor) else Replicate()
        if type(placement) is Shard:
            given[name] = placement.dim
        elif not isinstance(placement, (Partial, Replicate)):
            raise ValueError(
                f"{op}: {name} is placed as {placement}: redistribute it to Shard or Replicate"
                " first"
            )
    return given


def _way(op: str, given: dict[str, int], ways: Sequence[Way]) -> Way:
    if not given:
        return WHOLE
    for way in ways:
        if given.items() <= way.arguments.items():
            return way
    told = ", ".join(f"{name} by dimension {dim}" for name, dim in given.items())
    known = "; ".join(
        f"{w.name} ({', '.join(f'{n} {d}' for n, d in w.arguments.items())})" for w in ways
    )
    raise ValueError(
        f"{op}: cannot compute with {told} split. It can be split by {known or 'nothing'}:"
        " redistribute to one of these, or to Replicate()"
    )
