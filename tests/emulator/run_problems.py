# SPDX-License-Identifier: Apache-2.0
"""Run a module's problems in the emulator: for planted faults and for kernel variants.

    PYTRANSFORMER_EMULATE=<library> python tests/emulator/run_problems.py MODULE SCHEDULE [PROBLEM]

The command prints the first error and exits with 3, because Python exits with 1 if the script
fails. PROBLEM selects one problem.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pytransformer.ops._backends.cuda import library as cuda_library

Share = Callable[[Iterable[Any]], list[Any]]  # the type of conftest's fixture
PRELOADED = ["pytransformer.testing", "support"]  # by the process that forks others: torch with it


def first_wrong(module: str, schedule: int, only: str = "") -> str:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # fill fresh memory, the library's scratch included, with NaN
    script = importlib.import_module(module)
    assert (reason := cuda_library.why_not(script.RAW_OP, torch.device("cpu"))) is None, (
        reason
    )  # loads the library
    torch.ops.pytransformer_C.emulator_schedule(schedule)
    problems = (problem for problem in script.problems() if not only or problem.name == only)
    wrong = ((problem, script.wrong(problem)) for problem in problems)
    return next((f"{problem}\n{found[0]}" for problem, found in wrong if found), "")


def send_first_wrong(
    sender: Connection, environment: dict[str, str], module: str, schedule: int, only: str
) -> None:
    os.environ.update(environment)
    sender.send(first_wrong(module, schedule, only))


def main() -> int:
    module, schedule, *only = sys.argv[1:]
    here = Path(__file__).parent
    sys.path += [str(here), str(here.parent / "support")]  # under PYTHONSAFEPATH neither is there
    if found := first_wrong(module, int(schedule), *only):
        print(found)
    return 3 if found else 0


if __name__ == "__main__":
    sys.exit(main())
