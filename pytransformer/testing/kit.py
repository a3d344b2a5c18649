# SPDX-License-Identifier: Apache-2.0
"""Named cases and exact results of one op family; each file of `ops/` defines one as KIT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .bounds import LIMITS, Limits
from .case import Case
from .oracle import Solution


@dataclass(frozen=True)
class Kit:
    """One family's named problems and exact solutions.

    ``cases(size)`` has the dimensions of ``cases.SIZES``. ``solve(op, named, grads)`` returns the
    outputs of the public op and, given upstream gradients, the gradients in float64; ``named`` has
    its arguments. ``limits`` are the constants of its error bounds. ``rows_of(shape, named, seed)``
    returns the query rows to compare in a large problem, or None; ``solve_rows(named, grads,
    rows)`` returns their solution.
    """

    cases: Callable[[Mapping[str, int]], Iterable[Case]]
    solve: Callable[[str, Mapping[str, Any], list[Tensor] | None], Solution]
    limits: Limits = field(default_factory=lambda: LIMITS)
    rows_of: Callable[[Mapping[str, int], Mapping[str, Any], int], Tensor | None] = (
        lambda shape, named, seed: None
    )
    solve_rows: Callable[[Mapping[str, Any], list[Tensor] | None, Tensor], Solution] | None = None
