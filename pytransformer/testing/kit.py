# SPDX-License-Identifier: Apache-2.0
"""What tests and benchmarks need of one family; the files of `ops/` each hold one, by the name KIT."""

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
    """Random problems: ``draw(seed, case)``, and ``examine(seed, case, backends, repeat)``, which judges each backend on one.

    ``features``: each is in at least a tenth of the problems drawn; ``rare``: each is in some."""

    draw: Callable[[int, int], Any]
    examine: Callable[[int, int, list[str], bool], tuple[Any, Verdicts]]
    features: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutants:
    """Wrong backends of ``ops`` that the fuzzer must find. ``applies``: whether a problem runs on them."""

    ops: tuple[str, ...]
    faults: Mapping[str, Fault]
    backward_faults: Mapping[str, BackwardFault]
    applies: Callable[[Any], bool] = lambda problem: True


@dataclass(frozen=True)
class Calibration:
    """How the constants of the bounds were found: other kernels, and ours, on problems of the fuzzer.

    ``problem(seed, case)``: one that they can do, or None; ``peers``: their results by name; ``ours(problem, backend)``;
    ``columns``: the results that the table shows; ``limits(problem)``: (row of the limits, limits)."""

    problem: Callable[[int, int], Any | None]
    solve: Callable[[Any], Solution]
    peers: Mapping[str, Callable[[Any], Results]]
    ours: Callable[[Any, str], Results]
    columns: tuple[str, ...]
    limits: Callable[[Any], tuple[str, Limits]]


@dataclass(frozen=True)
class Kit:
    """One family's named problems, their exact answers, and what is optional beside them.

    ``cases(size)``: of the dimensions in ``cases.SIZES``. ``solve(op, named, grads)``: the outputs of the public op and, given upstream
    gradients of them, the gradients in float64; ``named`` has its arguments. ``limits``: the constants of its error bounds.
    ``rows_of(shape, named, seed)``: which query rows of a problem too large are compared, or None; ``solve_rows(named, grads, rows)``
    then is the answer of those."""

    cases: Callable[[Mapping[str, int]], Iterable[Case]]
    solve: Callable[[str, Mapping[str, Any], list[Tensor] | None], Solution]
    limits: Limits = field(default_factory=lambda: LIMITS)
    fuzzer: Fuzzer | None = None
    mutants: Mutants | None = None
    calibration: Calibration | None = None
    rows_of: Callable[[Mapping[str, int], Mapping[str, Any], int], Tensor | None] = lambda shape, named, seed: None
    solve_rows: Callable[[Mapping[str, Any], list[Tensor] | None, Tensor], Solution] | None = None
