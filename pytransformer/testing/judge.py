# SPDX-License-Identifier: Apache-2.0
"""One drawn problem on one backend: run it, and judge everything about the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .poison import StrayWrite

Results = dict[str, "Tensor | None"]
Run = Callable[[], tuple[Results, list[tuple[str, str]]]]  # (results by name, the raw ops that ran)


def data_of(problem: Any) -> str:
    """The row of the limits that holds: for float64 the exact result is float64 itself, and errs as much."""
    return "zero_mean" if problem.data == "zero_mean" and problem.dtype != torch.float64 else "any"


def exact(results: dict[str, oracle.Result]) -> oracle.Solution:
    """The solution of an op that has no rows without a pair."""
    return oracle.Solution(results, 1, torch.empty(0), torch.empty(0))


def judge(
    run: Run,
    solve: Callable[[Results], oracle.Solution],
    backend: str,
    repeat: bool,
    *,
    dtype: torch.dtype,
    data: str,
    limits: bounds.Limits,
    special: Callable[[oracle.Solution, Results], list[str]] = lambda solution, results: [],
) -> tuple[list[bounds.Check], list[str]]:
    """(every comparison with float64, what is wrong); `repeat` runs it twice and compares bits.

    ``solve`` gets the results, for what is exact given them. ``special`` takes out of them what has no number to compare, and says
    what is wrong with that.
    """
    checks: list[bounds.Check] = []
    try:
        results, record = run()
        kept = dict(results)
        solution = solve(results)
        wrong = special(solution, results)
        checks = bounds.check(solution, results, dtype, data, limits)
        wrong += [str(c) for c in checks if not c.ok]
        if {b for _, b in record} != {backend}:
            wrong.append(f"ran {record}, {backend} was forced")
        if repeat and (differing := bounds.other_bits(kept, run()[0])):
            wrong.append(f"two runs differ in {', '.join(differing)}")
    except (StrayWrite, AssertionError, ValueError, TypeError, RuntimeError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return checks, wrong
