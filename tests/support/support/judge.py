# SPDX-License-Identifier: Apache-2.0
"""Runs one drawn problem on one backend and checks every result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds, oracle

from .poison import StrayWrite

Results = dict[str, "Tensor | None"]
Run = Callable[[], tuple[Results, list[tuple[str, str]]]]  # (results by name, the raw ops that ran)


def data_of(problem: Any) -> str:
    """Return the limits' row; a float64 "exact" result errs as much as ours."""
    return "zero_mean" if problem.data == "zero_mean" and problem.dtype != torch.float64 else "any"


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
    """Return every comparison with float64 and the list of faults.

    `repeat` runs the problem twice and compares bits. ``solve`` gets the results, for parts that
    are exact given them. ``special`` removes results without a number to compare and returns their
    faults.
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
