# SPDX-License-Identifier: Apache-2.0
"""The process of a training run among others: started by `torchrun`, alone otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist


class World(NamedTuple):
    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """The one process that writes files and prints."""
        return self.rank == 0

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, which `value` becomes."""
        if self.size > 1:
            _all_reduce(value)
        return value


def _all_reduce(value: torch.Tensor, seconds: float = 10.0) -> None:
    """The sum over all processes, in place; returns when gloo has let go of `value` too.

    Its threads let go of a tensor after the collective has ended, and take the interpreter's lock for it: an interpreter that ends
    in between aborts the process (pytorch/pytorch#190489), which for torchrun is a failed run.
    """
    references = sys.getrefcount(value)
    dist.all_reduce(value)
    end = time.monotonic() + (seconds if dist.get_backend() == "gloo" else 0.0)
    while sys.getrefcount(value) > references and time.monotonic() < end:
        time.sleep(1e-4)


@contextmanager
def distributed(device: str | None = None) -> Iterator[World]:
    """Joins the processes that `torchrun` started, with NCCL on GPUs and gloo on CPUs; leaves them at the end.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one. With several processes each takes the GPU of its local rank.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(device=torch.device(kind))
        return
    where = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, where)
    finally:
        dist.destroy_process_group()
