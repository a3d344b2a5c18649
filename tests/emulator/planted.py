# SPDX-License-Identifier: Apache-2.0
"""Run a module of problems with a planted fault in a process.

A server imports torch once and forks a process per run, which loads the emulator's library with
PYTRANSFORMER_FAULT set. A fault costs no compilation and no start of Python, and may crash or hang.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext
from pathlib import Path

from run_problems import PRELOADED, send_first_wrong

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIMIT = 120  # seconds per run


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def found(
    library: Path,
    problems: str,
    fault: str,
    schedule: int,
    problem: str = "",
    path: str = "portable",
    **environment: str,
) -> str:
    """Return the output of a module of problems with this fault planted; empty if all pass.

    fault: a name of text_faults.py, or a call site (csrc/emulator/sites.h). path:
    PYTRANSFORMER_CUDA_PATH.

    Raises:
        RuntimeError: the run crashed, or exceeded its time.
    """
    environment |= {
        "PYTRANSFORMER_EMULATE": str(library),
        "PYTRANSFORMER_CUDA_PATH": path,
        "PYTRANSFORMER_FAULT": fault,
    }
    receiver, sender = _server().Pipe(duplex=False)
    process = _server().Process(
        target=send_first_wrong, args=(sender, environment, problems, schedule, problem)
    )
    process.start()
    sender.close()
    try:
        if not receiver.poll(LIMIT):
            raise RuntimeError(f"{fault}: still running after {LIMIT} s")
        return str(receiver.recv())
    except EOFError:
        process.join()
        raise RuntimeError(f"{fault}: exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
