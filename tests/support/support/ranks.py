# SPDX-License-Identifier: Apache-2.0
"""Processes that act as ranks, started once for all tests.

Starting a process costs seconds, a call milliseconds. Smaller groups use the pool's first
processes.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60  # for one call, and the timeout of a rank that waits for a failed one

START = 300  # for all processes to start on a busy machine


class Failed(AssertionError):
    """The errors, by rank."""


class Pool:
    """``pool.run(ranks, function, *args)`` returns each rank's ``function(rank, group, *args)``."""

    def __init__(self, size: int, *smaller: int) -> None:
        self.size, self.sizes = size, (*smaller, size)
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        folder = tempfile.mkdtemp()
        self._pipes, self._processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.sizes, os.path.join(folder, "store"), theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers(self.size, START)

    def run(
        self, ranks: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, args, options))
        return self._answers(ranks)

    def _answers(self, ranks: int, seconds: int = SECONDS) -> list[Any]:
        found, wrong = [], []
        for rank, pipe in enumerate(self._pipes[:ranks]):
            answer, error = pipe.recv() if pipe.poll(seconds) else (None, "no answer")
            found.append(answer)
            if error:
                wrong.append(f"rank {rank} of {ranks}: {error}")
        if wrong:
            self.close()  # processes may have half-sent messages
            self._start()
            raise Failed("\n".join(wrong))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, sizes: tuple[int, ...], store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=sizes[-1])
    groups = {n: dist.new_group(list(range(n)), timeout=wait) for n in sizes}
    pipe.send((None, ""))
    while True:
        try:
            ranks, function, args, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(rank, groups[ranks], *args, **options), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
