# SPDX-License-Identifier: Apache-2.0
"""Many model types, each in a child process with limits on time and memory."""

from __future__ import annotations

import multiprocessing
import os
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

CPU_SECONDS, SECONDS, BYTES = 30, 600, 6 << 30  # other work may use the CPU, hence two time limits
Rows = dict[str, dict[str, Any]]


class Child(NamedTuple):
    model_type: str
    process: BaseProcess
    answer: Connection


def child(model_type: str, rows: Callable[[str], Rows], answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    quiet()
    answer.send(rows(model_type))


def quiet() -> None:
    """Silence transformers' messages about the tiny configs."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def prepare() -> None:
    """Import shared modules and register, before any thread starts."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    import pytransformer as pt

    torch.set_num_threads(1)
    pt.integrations.transformers.register()


def start(model_type: str, rows: Callable[[str], Rows]) -> Child:
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=child, args=(model_type, rows, there), daemon=True
    )
    process.start()
    there.close()
    return Child(model_type, process, here)


def finish(running: Child) -> Rows:
    """Return the child's rows, or a row with the reason if it died or timed out."""
    reason = f"took longer than {SECONDS} s"
    try:
        if running.answer.poll():
            return running.answer.recv()
        running.process.kill()
    except EOFError:
        running.process.join()
        reason = f"its process ended with code {running.process.exitcode}"
    finally:
        running.process.join()
        running.answer.close()
    return {running.model_type: {"verdict": "not built", "reason": reason}}


def sweep(
    model_types: Sequence[str], jobs: int = 1, rows: Callable[[str], Rows] | None = None
) -> Iterator[tuple[str, Rows]]:
    """Yield (model type, its rows) in order, `jobs` at a time.

    `rows` replaces the rows of transformers' model types.
    """
    prepare()
    from . import compare

    judged = rows or compare.rows
    for first in range(0, len(model_types), jobs):
        batch = [start(model_type, judged) for model_type in model_types[first : first + jobs]]
        for running in batch:
            wait([running.answer], SECONDS)
            yield running.model_type, finish(running)
