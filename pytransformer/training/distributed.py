# SPDX-License-Identifier: Apache-2.0
"""The process of a training run among others: started by `torchrun`, alone otherwise."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .mesh import Mesh


TIMEOUT = 600.0  # seconds


class LostProcess(RuntimeError):
    """Another process of the run has ended or does not answer."""


class World(NamedTuple):
    """This process among others. With a mesh some of them share a batch; without, each has its own."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    mesh: Mesh | None = None

    @property
    def first(self) -> bool:
        """The one process that writes files and prints."""
        return self.rank == 0

    @property
    def parts(self) -> int:
        """How many batches are computed at a time."""
        return self.size if self.mesh is None else self.mesh.data

    @property
    def part(self) -> int:
        """Which of them is this process's."""
        return self.rank if self.mesh is None else self.mesh.part

    @property
    def replicas(self) -> int:
        """How many gradients DDP and FSDP take the mean of."""
        return self.size if self.mesh is None else self.mesh.replicas

    @property
    def splits(self) -> bool:
        """Whether processes have parts of parameters."""
        return self.mesh is not None and self.mesh.splits

    @property
    def rows(self) -> tuple[int, ...]:
        """Which rows of a batch's sequences are this process's, if they are split and these are not the first."""
        return () if self.mesh is None or self.mesh.place == 0 else (self.mesh.place,)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the processes with other batches, which `value` becomes."""
        if self.parts > 1:
            _all_reduce(value, None if self.mesh is None else self.mesh.data_group)
        return value


def _all_reduce(value: torch.Tensor, group: dist.ProcessGroup | None, seconds: float = 10.0) -> None:
    """The sum over the group, in place; returns when gloo has let go of `value` too.

    Its threads let go of a tensor after the collective has ended, and take the interpreter's lock for it: an interpreter that ends
    in between aborts the process (pytorch/pytorch#190489), which for torchrun is a failed run.
    """
    references = sys.getrefcount(value)
    dist.all_reduce(value, group=group)
    end = time.monotonic() + (seconds if dist.get_backend() == "gloo" else 0.0)
    while sys.getrefcount(value) > references and time.monotonic() < end:
        time.sleep(1e-4)


@contextmanager
def distributed(
    device: str | None = None, *, mesh: Mapping[str, int] | None = None, shard: bool = False, timeout: float | None = None
) -> Iterator[World]:
    """Joins the processes that `torchrun` started, with NCCL on GPUs and gloo on CPUs; leaves them at the end.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one. With several processes each takes the GPU of its local rank.
        mesh: how many processes in each dimension, among `data`, `context` and `tensor`; None: all have other batches.
        shard: split parameters and optimizer state over the data too.
        timeout: seconds that a process waits for another; longer than the longest evaluation and writing of a checkpoint.

    Raises:
        ValueError: sizes that do not multiply to the number of processes.
        LostProcess: another process ended, or did not answer in time.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        if others := {name: n for name, n in (mesh or {}).items() if n != 1}:
            raise ValueError(
                f"mesh: {others} wants several processes, and this is one: start them with torchrun --nproc-per-node"
            )
        yield World(device=torch.device(kind))
        return
    where = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(where)
    wait = TIMEOUT if timeout is None else timeout
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=datetime.timedelta(seconds=wait))
    try:
        made = None
        if mesh is not None or shard:
            from .mesh import Mesh, make_mesh

            made = Mesh(make_mesh(mesh or {}, size, kind), shard=shard, timeout=wait)
        yield World(dist.get_rank(), size, where, made)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        told = str(error).partition("\n")[0]
        raise LostProcess(f"another process of the run has ended, or did not answer within {wait:g} s ({told})") from error
    finally:
        dist.destroy_process_group()
