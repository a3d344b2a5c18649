# SPDX-License-Identifier: Apache-2.0
"""Fuzzer, mutants and calibration of an op family; each file of `ops/` defines them as CHECKS."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pytransformer.testing.bounds import Check, Limits
from pytransformer.testing.oracle import Solution

from . import ops as folder
from .faults import BackwardFault, Fault

Verdicts = dict[str, tuple[list[Check], list[str]]]
Results = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class Fuzzer:
    """Random problems of a family.

    ``draw(seed, case)`` returns one; ``examine(seed, case, backends, repeat)`` checks each backend
    on it. Each of ``features`` is in at least a tenth of the problems, and each of ``rare`` in
    some.
    """

    draw: Callable[[int, int], Any]
    examine: Callable[[int, int, list[str], bool], tuple[Any, Verdicts]]
    features: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutants:
    """Wrong backends of ``ops`` that the fuzzer must detect.

    ``applies`` returns True if a problem runs on them.
    """

    ops: tuple[str, ...]
    faults: Mapping[str, Fault]
    backward_faults: Mapping[str, BackwardFault]
    applies: Callable[[Any], bool] = lambda problem: True


@dataclass(frozen=True)
class Calibration:
    """Calibration of the bounds' constants: other kernels and ours on the fuzzer's problems.

    ``problem(seed, case)`` returns one that the kernels support, or None. ``peers`` returns their
    results by name and ``ours(problem, backend)`` ours. ``columns`` are the results in the table;
    ``limits(problem)`` returns (row of the limits, limits).
    """

    problem: Callable[[int, int], Any | None]
    solve: Callable[[Any], Solution]
    peers: Mapping[str, Callable[[Any], Results]]
    ours: Callable[[Any, str], Results]
    columns: tuple[str, ...]
    limits: Callable[[Any], tuple[str, Limits]]


@dataclass(frozen=True)
class Checks:
    """One family's fuzzer, mutants and calibration."""

    fuzzer: Fuzzer
    mutants: Mutants
    calibration: Calibration


@functools.cache
def families() -> dict[str, Checks]:
    """Return the families' checks by name."""
    names = sorted(entry.name for entry in pkgutil.iter_modules(folder.__path__))
    return {name: importlib.import_module(f"{folder.__name__}.{name}").CHECKS for name in names}
