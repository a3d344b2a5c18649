# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels (csrc/common/fault.h): each is run by a module of problems in a process of its own.

A server imports torch once and forks a process for each run, which loads the emulator's library with PYTRANSFORMER_FAULT set: a fault costs
no compiling and no start of Python, and may crash or hang.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import re
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from run_problems import PRELOADED, send_first_wrong

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LIMIT = 120  # seconds that a run may take
HOOK = re.compile(r"\bPT_FAULT\((\w+)\)")


class Fault(NamedTuple):
    name: str  # as in PT_FAULT(name)
    problem: str = ""  # the name of one that shows it; empty: all are run
    message: str = ""  # that the emulator must give; empty: a wrong number will do
    slow: bool = False
    schedule: int = 1


def parameters(faults: Sequence[Fault], every: int = 6) -> list[Any]:
    """Each fault under two schedules; but for every sixth under the first they are slow tests: all 520 would take `make test` 4 minutes."""
    again = (fault._replace(schedule=2, slow=True) for fault in faults)
    once = (fault._replace(slow=i % every > 0) for i, fault in enumerate(faults))
    name = lambda f: f.name if f.schedule == 1 else f"{f.name}-{f.schedule}"
    return [pytest.param(f, marks=[pytest.mark.slow] * f.slow, id=name(f)) for f in (*once, *again)]


def hooks() -> set[str]:
    """The names in the kernels' sources; those of the lane are listed by tests/ops/test_lane_mutants.py."""
    kernels = (path for path in CSRC.rglob("*") if path.relative_to(CSRC).parts[0] != "lane" and path.name != "fault.h")
    sources = (path for path in kernels if path.suffix in (".h", ".cuh", ".cu", ".cpp"))
    return {name for path in sources for name in HOOK.findall(path.read_text())}


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def found(library: Path, problems: str, fault: str, schedule: int, problem: str = "", path: str = "portable") -> str:
    """What a module of problems tells of the library with this fault planted; nothing if it finds nothing wrong.

    path: PYTRANSFORMER_CUDA_PATH.

    Raises:
        RuntimeError: the run crashed, or took too long.
    """
    environment = {"PYTRANSFORMER_EMULATE": str(library), "PYTRANSFORMER_CUDA_PATH": path, "PYTRANSFORMER_FAULT": fault}
    receiver, sender = _server().Pipe(duplex=False)
    process = _server().Process(target=send_first_wrong, args=(sender, environment, problems, schedule, problem))
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


def listed(module: str) -> list[Fault]:
    """Those of all of a test module's lists."""
    values = vars(importlib.import_module(module)).values()
    return [fault for value in values if isinstance(value, tuple) for fault in value if isinstance(fault, Fault)]


def check_names(faults: Sequence[Fault]) -> None:
    """Each name is in the list once, and in the sources."""
    assert {f.name for f in faults} <= hooks()
    assert len({f.name for f in faults}) == len(faults)


def check_caught(fault: Fault, problems: str, library: Path, path: str = "portable") -> None:
    """A module of problems finds the fault; path: PYTRANSFORMER_CUDA_PATH."""
    message = found(library, problems, fault.name, fault.schedule, fault.problem, path)
    assert message, "not caught"
    assert fault.message in message
    print(fault.name, message.splitlines()[-1], sep="\n    ")
