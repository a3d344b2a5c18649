# SPDX-License-Identifier: Apache-2.0
"""Test and benchmark support of one op family; each file of `ops/` defines one as KIT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .bounds import LIMITS, Check, Limits
from .case import Case
from .faults import BackwardFault, Fault
from .oracle import Solution

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
class Kit:
    """One family's named problems, exact solutions and optional parts.

    ``cases(size)`` has the dimensions of ``cases.SIZES``. ``solve(op, named, grads)`` returns the
    outputs of the public op and, given upstream gradients, the gradients in float64; ``named`` has
    its arguments. ``limits`` are the constants of its error bounds. ``rows_of(shape, named, seed)``
    returns the query rows to compare in a large problem, or None; ``solve_rows(named, grads,
    rows)`` returns their solution.
    """

    cases: Callable[[Mapping[str, int]], Iterable[Case]]
    solve: Callable[[str, Mapping[str, Any], list[Tensor] | None], Solution]
    limits: Limits = field(default_factory=lambda: LIMITS)
    fuzzer: Fuzzer | None = None
    mutants: Mutants | None = None
    calibration: Calibration | None = None
    rows_of: Callable[[Mapping[str, int], Mapping[str, Any], int], Tensor | None] = (
        lambda shape, named, seed: None
    )
    solve_rows: Callable[[Mapping[str, Any], list[Tensor] | None, Tensor], Solution] | None = None
