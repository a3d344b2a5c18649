# SPDX-License-Identifier: Apache-2.0
"""Agreement checks between the ranks of a group, and sums over ranks in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ..ops._core.tensors import check_same, check_tensor, is_sharded, looks_at_values
from .blocks import BlockParts

Function = TypeVar("Function", bound=Callable[..., Any])


def check_group(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the group and the group's size."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{op}: torch.distributed is not initialized: start the processes with torchrun and"
            " call torch.distributed.init_process_group first"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = (
            "; of a mesh give mesh.get_group(name)" if type(group).__name__ == "DeviceMesh" else ""
        )
        raise ValueError(
            f"{op}: group must be a ProcessGroup or None, got {type(group).__name__}{hint}"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"{op}: this process, rank {dist.get_rank()}, is not in group: only its members may"
            " call"
        )
    return rank, dist.get_world_size(group)


def check_call(
    op: str, group: dist.ProcessGroup | None, arguments: Mapping[str, Any]
) -> tuple[int, int]:
    """Return (rank, ranks) of a call after the checks that ring and Ulysses attention share."""
    rank, ranks = check_group(op, group)
    if is_sharded(list(arguments.values())):
        raise ValueError(
            f"{op}: takes this rank's rows as plain tensors: give to_local() of DTensors that are"
            " split by the sequence"
        )
    query = arguments["query"]
    for name in ("key_scale", "value_scale"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{op}: {name} is for one process; give each rank its keys and values in query's"
                " dtype"
            )
    for name in ("query", "key", "value"):
        check_tensor(op, name, arguments[name], floating=True, ndim=4)
        check_same(op, "query", query, name, arguments[name])
    if arguments.get("page_table") is not None:
        raise ValueError(
            f"{op}: page_table is for one process; give each rank its keys and values themselves"
        )
    check_agreement(op, group, query.device, arguments)
    return rank, ranks


def outside_graphs(function: Function) -> Function:
    """Exclude ``function`` from torch.compile's graphs without importing torch._dynamo.

    torch.compiler.disable would import it. That import evaluates defaults like
    ``group=dist.group.WORLD`` in torch.distributed.nn.functional. After init_process_group they
    keep the group, and gloo's threads, alive past destroy_process_group, and a rank may then abort
    while Python exits.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return cast(Function, call)


_MET: weakref.WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = weakref.WeakKeyDictionary()


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Run one collective of all ranks on their first call on a device.

    If the first call of a group is `batch_isend_irecv`, NCCL requires all ranks in it (torch 2.13,
    its docstring). In a ring whose first step is hidden for some ranks, they would be missing.
    """
    members = dist.group.WORLD if group is None else group
    assert members is not None  # check_group has verified that torch.distributed is initialized
    known = _MET.setdefault(members, set())
    if device not in known:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        known.add(device)


def check_agreement(
    op: str, group: dist.ProcessGroup | None, device: torch.device, arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError on every rank if the ranks call with different arguments.

    Otherwise they would deadlock or use wrong rows. The ranks exchange a checksum, and descriptions
    only if checksums differ. The check runs only if reading the values of lengths and seeds is
    allowed.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return
    if not looks_at_values(device):
        meet(group, device)
        return
    description = {name: describe(value) for name, value in arguments.items()}
    text = json.dumps(description).encode()
    own = torch.tensor([zlib.crc32(text), len(text)], dtype=torch.int64, device=device)
    sums = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(sums, own, group=group)
    found = torch.stack(sums).cpu()
    if bool((found == found[0]).all()):
        return
    width = int(found[:, 1].max())
    padded = torch.tensor(list(text.ljust(width)), dtype=torch.uint8, device=device)
    texts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(texts, padded, group=group)
    told = [json.loads(bytes(t.tolist())) for t in texts]
    for name in description:
        values = [d.get(name) for d in told]
        if any(v != values[0] for v in values):
            listed = ", ".join(f"{v} on rank {r}" for r, v in enumerate(values))
            raise ValueError(
                f"{op}: every rank of the group must call with the same {name}, got {listed}"
            )
    raise ValueError(f"{op}: the ranks of the group call with different arguments: {told}")


def describe(value: Any) -> Any:
    """Return the part of an argument that must be equal on every rank.

    It is the shape, dtype and requires_grad of tensors, and the values of lengths and seeds.
    """
    if isinstance(value, torch.Tensor):
        numbers = value.tolist() if value.dim() <= 1 and not value.is_floating_point() else ""
        gradient = " with gradient" if value.requires_grad else ""
        return f"{str(value.dtype)[6:]}{list(value.shape)}{gradient} {numbers}".rstrip()
    if (blocks := BlockParts.of(value)) is not None:
        return (
            f"block mask of {blocks.mask.shape}, blocks of {blocks.mask.block_size}, checksum"
            f" {blocks.checksum:x}"
        )
    if dataclasses.is_dataclass(value):
        return {
            field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return (
        repr(value) if isinstance(value, (str, int, float, tuple, list)) else type(value).__name__
    )


def sum_over_ranks(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Return the sums over the group, bitwise equal on every rank.

    They are added in rank order, which all_reduce does not guarantee.
    """
    ranks = dist.get_world_size(group)
    if not tensors:
        return list(tensors)
    flat = torch.cat([t.flatten() for t in tensors])
    shares = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(shares, flat, group=group)
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return [
        piece.view(t.shape) for piece, t in zip(total.split([t.numel() for t in tensors]), tensors)
    ]


def seed_of_the_first(seed: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the seed of the group's first rank on all ranks, for one dropout mask."""
    seed = seed.clone()
    dist.broadcast(seed, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return seed
