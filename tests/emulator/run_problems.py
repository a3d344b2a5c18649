"""Runs a module's problems in the emulator, one after another, for planted faults."""

from __future__ import annotations

import importlib
import os
from multiprocessing.connection import Connection

import torch

from pytransformer.ops import _cuda

PRELOADED = ["run_problems", "pytransformer.testing"]


def run(sender: Connection, environment: dict[str, str], module: str, schedule: int, only: str) -> None:
    """Sends the first thing wrong, or nothing; `only`: the name of the only problem to run."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    script = importlib.import_module(module)
    assert (reason := _cuda.why_not(script.RAW_OP, torch.device("cpu"))) is None, reason  # loads the library
    torch.ops.pytransformer_C.emulator_schedule(schedule)
    problems = (problem for problem in script.problems() if only in ("", problem.name))
    wrong = ((problem, script.wrong(problem)) for problem in problems)
    sender.send(next((f"{problem}\n{found[0]}" for problem, found in wrong if found), ""))
