# SPDX-License-Identifier: Apache-2.0
"""The mesh of a training run: which ranks have other batches, other rows, or other heads.

This module and torch.distributed.device_mesh load on first use, because a single process needs
neither.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Adjacent ranks share a batch, because tensor parallelism communicates most.
AXES = ("data", "context", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """Parse sizes such as ``data=2,tensor=2``.

    Raises:
        ValueError: another form, an unknown or repeated name, or a size below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (p.strip() for p in part.partition("="))
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"a mesh is written as data=2,tensor=2: each of {', '.join(AXES)} at most once,"
                f" with a size of at least 1; got {text!r}"
            )
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: Mapping[str, int], ranks: int, device: str) -> DeviceMesh:
    """Return a device mesh of all ranks with a dimension for each of AXES.

    If `data` has no size, it gets the remaining ranks.

    Raises:
        ValueError: an unknown name, or sizes that do not multiply to the number of ranks.
    """
    if unknown := [name for name in sizes if name not in AXES]:
        raise ValueError(f"mesh: dimensions are among {', '.join(AXES)}, got {', '.join(unknown)}")
    others = math.prod(size for name, size in sizes.items() if name != "data")
    shape = tuple(sizes.get(name, ranks // others if name == "data" else 1) for name in AXES)
    if math.prod(shape) != ranks:
        told = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh: {told} is a mesh of"
            f" {math.prod(shape) if 'data' in sizes else f'a multiple of {others}'} ranks, and"
            f" there are {ranks}: start as many with torchrun --nproc-per-node, or change the sizes"
        )
    return init_device_mesh(device, shape, mesh_dim_names=AXES)


class Mesh:
    """A device mesh for training.

    A *replica* is a group of ranks with a full model. Each replica computes its gradient from
    another batch or from other rows of one, and the gradients are summed.

    Args:
        mesh: has all ranks and dimensions named after AXES, in any order. A missing dimension has
            size 1.
        shard: split parameters, gradients and optimizer state over the replicas (FSDP2) instead of
            storing them in each.
        timeout: seconds to wait for another rank; None: torch's default, half an hour, which a
            mesh's built-in groups always have.

    Attributes:
        data, context, tensor: the sizes.
        part, place: this rank's index in the dimensions data and context.
        data_group: the ranks with other batches, the same rows and the same part of the model.
        context_group: the ranks with other rows of the same batch.
        replica_group: both, the ranks with the same part of the model.
        wrapping: the same ranks by ("replica", "shard", "tensor"), for `fully_shard` and
            `parallelize_module`.

    Raises:
        ValueError: unknown dimensions, missing ranks, or both context and tensor.
    """

    def __init__(
        self, mesh: DeviceMesh, *, shard: bool = False, timeout: float | None = None
    ) -> None:
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - set(AXES):
            raise ValueError(
                f"mesh: expected dimensions among {', '.join(AXES)}, got"
                f" {', '.join(names) or 'none with a name'}: init_device_mesh(device, shape,"
                f" mesh_dim_names={AXES})"
            )
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"mesh: it must have all {dist.get_world_size()} ranks, got {mesh.size()}"
            )
        sizes = dict(zip(names, mesh.mesh.shape))
        ranks = mesh.mesh.permute([names.index(name) for name in AXES if name in names])
        self.data, self.context, self.tensor = (sizes.get(name, 1) for name in AXES)
        if self.context > 1 and self.tensor > 1:
            raise ValueError(
                "mesh: context and tensor both split attention: use one of them, with data"
            )
        self.shard = shard
        ranks = ranks.reshape(self.data, self.context, self.tensor)
        shape = (1, self.replicas, self.tensor) if shard else (self.replicas, 1, self.tensor)
        self.wrapping = _mesh_with_timeout(
            mesh.device_type, ranks.reshape(shape), ("replica", "shard", "tensor"), timeout
        )
        self.replica_group = self.data_group = self.wrapping.get_group(
            "shard" if shard else "replica"
        )
        self.context_group: dist.ProcessGroup | None = None
        if self.context > 1:
            self.data_group, self.context_group, _ = _groups(ranks, timeout)
        self.part = dist.get_rank(self.data_group)
        self.place = 0 if self.context_group is None else dist.get_rank(self.context_group)

    @property
    def replicas(self) -> int:
        return self.data * self.context

    @property
    def splits(self) -> bool:
        """Return True if a rank has less than a full copy of some parameter."""
        return self.tensor > 1 or (self.shard and self.replicas > 1)

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name in AXES if (size := getattr(self, name)) > 1]
        return ", ".join(sizes or ["one rank"]) + (
            ", parameters over the data" if self.shard else ""
        )


def _mesh_with_timeout(
    device: str, ranks: torch.Tensor, names: tuple[str, ...], timeout: float | None
) -> DeviceMesh:
    """Return a device mesh with groups whose collectives have a timeout."""
    return DeviceMesh.from_group(_groups(ranks, timeout), device, mesh=ranks, mesh_dim_names=names)


def _groups(ranks: torch.Tensor, timeout: float | None) -> list[dist.ProcessGroup]:
    """Return this rank's group in each dimension."""
    wait = None if timeout is None else datetime.timedelta(seconds=timeout)
    own = []
    for dim in range(ranks.dim()):
        lines = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]).tolist()
        # Every rank must create all groups in this order.
        made = [dist.new_group(line, timeout=wait) for line in lines]
        own.append(next(group for group, line in zip(made, lines) if dist.get_rank() in line))
    return own
