# SPDX-License-Identifier: Apache-2.0
"""This process of a training run: one of several under `torchrun`, single otherwise."""

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
    """This process and its peers.

    With a mesh, some processes share a batch; without, each has a different one.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    mesh: Mesh | None = None

    @property
    def first(self) -> bool:
        """Return True in the one process that writes files and prints."""
        return self.rank == 0

    @property
    def parts(self) -> int:
        """Return the number of batches computed at a time."""
        return self.size if self.mesh is None else self.mesh.data

    @property
    def part(self) -> int:
        """Return the index of this process's batch among them."""
        return self.rank if self.mesh is None else self.mesh.part

    @property
    def replicas(self) -> int:
        """Return the number of gradients that DDP and FSDP average."""
        return self.size if self.mesh is None else self.mesh.replicas

    @property
    def splits(self) -> bool:
        """Return True if processes hold parts of parameters."""
        return self.mesh is not None and self.mesh.splits

    @property
    def rows(self) -> tuple[int, ...]:
        """Return (place,) if sequences are split and this process lacks the first rows, else ()."""
        return () if self.mesh is None or self.mesh.place == 0 else (self.mesh.place,)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Sum `value` in place over the processes with other batches."""
        if self.parts > 1:
            _all_reduce(value, None if self.mesh is None else self.mesh.data_group)
        return value


def _all_reduce(
    value: torch.Tensor, group: dist.ProcessGroup | None, seconds: float = 10.0
) -> None:
    """Sum over the group in place; return once gloo has released `value` too.

    gloo's threads release a tensor after the collective has ended and take the GIL for it. If the
    interpreter exits in between, the process aborts (pytorch/pytorch#190489) and torchrun reports a
    failed run.
    """
    references = sys.getrefcount(value)
    dist.all_reduce(value, group=group)
    end = time.monotonic() + (seconds if dist.get_backend() == "gloo" else 0.0)
    while sys.getrefcount(value) > references and time.monotonic() < end:
        time.sleep(1e-4)


@contextmanager
def distributed(
    device: str | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    shard: bool = False,
    timeout: float | None = None,
) -> Iterator[World]:
    """Join the processes that `torchrun` started, with NCCL on GPUs and gloo on CPUs.

    Args:
        device: "cpu" or "cuda"; None: a GPU if available. With several processes, each uses the GPU
            of its local rank.
        mesh: processes per dimension, among `data`, `context` and `tensor`; None: each has other
            batches.
        shard: split parameters and optimizer state over the data dimension too.
        timeout: seconds to wait for another process; longer than the longest evaluation and
            checkpoint write.

    Raises:
        ValueError: no GPU for "cuda", or the sizes do not multiply to the number of processes.
        LostProcess: another process ended, or did not answer in time.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device: torch sees no CUDA GPU here; use cpu (`pytransformer doctor` has the reason)"
        )
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        if others := {name: n for name, n in (mesh or {}).items() if n != 1}:
            raise ValueError(
                f"mesh: {others} needs several processes, got one: start them with torchrun"
                " --nproc-per-node"
            )
        yield World(device=torch.device(kind))
        return
    where = (
        torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    )
    if kind == "cuda":
        torch.cuda.set_device(where)
    wait = TIMEOUT if timeout is None else timeout
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", timeout=datetime.timedelta(seconds=wait)
    )
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
        raise LostProcess(
            f"another process of the run has ended, or did not answer within {wait:g} s ({told})"
        ) from error
    finally:
        dist.destroy_process_group()
