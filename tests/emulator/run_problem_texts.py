"""Runs a module's problems in the emulator, one after another, for planted faults.

PYTRANSFORMER_EMULATE=<library> python tests/emulator/run_problems.py MODULE SCHEDULE [PROBLEM]

Prints the first thing wrong and exits with 3 (1 is what Python exits with if it is the script that fails). PROBLEM: the only one to run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from pytransformer.ops import _cuda


def main() -> int:
    module, schedule, *only = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent))  # under PYTHONSAFEPATH it is not there
    torch.set_num_threads(1)
    script = importlib.import_module(module)
    assert (reason := _cuda.why_not(script.RAW_OP, torch.device("cpu"))) is None, reason  # loads the library
    torch.ops.pytransformer_C.emulator_schedule(int(schedule))
    for problem in script.problems():
        if only and problem.name not in only:
            continue
        if found := script.wrong(problem):
            print(f"{problem}\n{found[0]}")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
