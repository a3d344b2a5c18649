# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group have to agree on, and sums over them in a fixed order."""

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

from ..ops._core.sharded import is_sharded
from ..ops._core.tensors import check_same, check_tensor, looks_at_values
from .blocks import BlockParts

Function = TypeVar("Function", bound=Callable[..., Any])


def check_group(op: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(this process's rank in the group, the group's size)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{op}: torch.distributed is not initialized: start the processes with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "; of a mesh give mesh.get_group(name)" if type(group).__name__ == "DeviceMesh" else ""
        raise ValueError(f"{op}: group must be a ProcessGroup or None, got {type(group).__name__}{hint}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"{op}: this process, rank {dist.get_rank()}, is not in group: only its members may call")
    return rank, dist.get_world_size(group)


def check_call(op: str, group: dist.ProcessGroup | None, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """(rank, ranks) of a call with query, key, value and more, after what every scheme checks of it."""
    rank, ranks = check_group(op, group)
    if is_sharded(list(arguments.values())):
        raise ValueError(
            f"{op}: takes this rank's rows as plain tensors: give to_local() of DTensors that are split by the sequence"
        )
    query = arguments["query"]
    for name in ("key_scale", "value_scale"):
        if arguments.get(name) is not None:
            raise ValueError(f"{op}: {name} is for one process; give each rank its keys and values in query's dtype")
    for name in ("query", "key", "value"):
        check_tensor(op, name, arguments[name], floating=True, ndim=4)
        check_same(op, "query", query, name, arguments[name])
    if arguments.get("page_table") is not None:
        raise ValueError(f"{op}: page_table is for one process; give each rank its keys and values themselves")
    check_agreement(op, group, query.device, arguments)
    return rank, ranks


def outside_graphs(function: Function) -> Function:
    """Keep ``function`` out of torch.compile's graphs, as torch.compiler.disable does, but without importing torch._dynamo.

    That import evaluates defaults like ``group=dist.group.WORLD`` in torch.distributed.nn.functional. After init_process_group they
    keep the group, and gloo's threads, alive past destroy_process_group, and a rank may then abort while Python exits.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return cast(Function, call)


_MET: weakref.WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = weakref.WeakKeyDictionary()


def meet(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """One collective of all ranks, the first time that they meet on a device.

    NCCL wants all ranks in the first call of a group if that is `batch_isend_irecv` (torch 2.13, its docstring): in a ring whose first
    step is hidden for some, these would be missing.
    """
    members = dist.group.WORLD if group is None else group
    assert members is not None  # torch.distributed is initialized: check_group has seen to it
    known = _MET.setdefault(members, set())
    if device not in known:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        known.add(device)


def check_agreement(op: str, group: dist.ProcessGroup | None, device: torch.device, arguments: Mapping[str, Any]) -> None:
    """ValueError on every rank if the ranks do not call with the same: else they would wait for each other, or compute with the wrong rows.

    A checksum goes round; the descriptions only where checksums differ. Only where the values of lengths and seeds may be looked at.
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
            raise ValueError(f"{op}: every rank of the group must call with the same {name}, got {listed}")
    raise ValueError(f"{op}: the ranks of the group call with different arguments: {told}")


def describe(value: Any) -> Any:
    """What must be the same on every rank of an argument: of tensors the shape, dtype and need of a gradient, of lengths and seeds the
    numbers too."""
    if isinstance(value, torch.Tensor):
        numbers = value.tolist() if value.dim() <= 1 and not value.is_floating_point() else ""
        return f"{str(value.dtype)[6:]}{list(value.shape)}{' with gradient' if value.requires_grad else ''} {numbers}".rstrip()
    if (blocks := BlockParts.of(value)) is not None:
        return f"block mask of {blocks.mask.shape}, blocks of {blocks.mask.block_size}, checksum {blocks.checksum:x}"
    if dataclasses.is_dataclass(value):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value) if isinstance(value, (str, int, float, tuple, list)) else type(value).__name__


def sum_over_ranks(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The sums over the group, on every rank the same bits: added in the order of ranks, which all_reduce does not promise."""
    ranks = dist.get_world_size(group)
    if not tensors:
        return list(tensors)
    flat = torch.cat([t.flatten() for t in tensors])
    shares = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(shares, flat, group=group)
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return [piece.view(t.shape) for piece, t in zip(total.split([t.numel() for t in tensors]), tensors)]


def seed_of_the_first(seed: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The seed that the group's first rank drew, for all: one dropout mask."""
    seed = seed.clone()
    dist.broadcast(seed, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return seed
