"""Faults planted in the kernels' sources: compiled apart, and run by a script of problems in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SCHEDULES = (1, 2)
CAUGHT = 3  # exit code of run_problem_texts.py


class Fault(NamedTuple):
    name: str
    file: str  # below csrc/cuda
    old: str  # wherever it occurs
    new: str
    problem: str = ""  # the name of one that shows it; empty: all are run
    message: str = ""  # that the emulator must give; empty: a wrong number will do
    slow: bool = True


def parameters(faults: Sequence[Fault]) -> list[Any]:
    return [pytest.param(f, marks=[pytest.mark.slow] * f.slow, id=f.name.replace(" ", "-")) for f in faults]


def check_texts(faults: Sequence[Fault]) -> None:
    """Each text to be replaced is in its file, or the fault would be none."""
    for fault in faults:
        assert fault.old in (CSRC / "cuda" / fault.file).read_text(), fault.name
    assert len({fault.name for fault in faults}) == len(faults)


def check_caught(
    fault: Fault,
    problems: str,
    stem: str,
    builder: ModuleType,
    directory: Path,
    only: str = "",
    path: str = "portable",
    variant: Fault | None = None,
) -> None:
    """A module of problems finds the fault in a library of that op alone, whatever the schedule.

    only: a pattern of the files to compile, if not all of the op's; path: PYTRANSFORMER_CUDA_PATH; variant: what the sources are changed to
    first, which is no fault.
    """
    shutil.copytree(CSRC / "cuda", directory / "cuda")
    for change in filter(None, (variant, fault)):
        changed = directory / "cuda" / change.file
        changed.write_text(changed.read_text().replace(change.old, change.new))
    library = builder.library(directory / "build", directory, stem, only)
    environment = os.environ | {"PYTRANSFORMER_EMULATE": str(library), "PYTRANSFORMER_CUDA_PATH": path}
    script = str(Path(__file__).with_name("run_problem_texts.py"))
    told = []
    for schedule in SCHEDULES:
        command = [sys.executable, script, problems, str(schedule), *filter(None, [fault.problem])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == CAUGHT, f"schedule {schedule}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        assert fault.message in done.stdout, done.stdout
        told.append(done.stdout.splitlines()[-1])
    print(fault.name, *told, sep="\n    ")
