# SPDX-License-Identifier: Apache-2.0
"""Selects the benchmark problems: named cases of pytransformer.testing at a given size.

suites.py has the fixed lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pytransformer.cli import UsageError
from pytransformer.cli.providers import MODES, of_family
from pytransformer.testing.cases import APART
from pytransformer.testing.cases import Case as Case
from pytransformer.testing.cases import case as case
from pytransformer.testing.cases import cases as cases
from pytransformer.testing.kits import kits
from pytransformer.testing.kits import ops as all_ops

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64,
    "fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64,
}  # fmt: skip
DIRECTIONS = {"fwd": "fwd", "bwd": "bwd", "fwd+bwd": "both"}  # by mode
OPS = all_ops()


@dataclass(frozen=True)
class Step:
    """One problem for every implementation; `left_out` maps absent ones to reasons."""

    case: Case
    dtype: torch.dtype
    mode: str
    cold: bool = False  # empty the caches before each call
    sustained: float = 0.0  # seconds of calls without a rest, after the bursts
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.case.op} {self.case.name} {dtype_name(self.dtype)} {self.mode}"

    @property
    def weight(self) -> float:
        """Return the approximate cost in units of the smallest step, for time budgeting."""
        return 1.0 + self.case.flops(DIRECTIONS[self.mode]) / 1e10 + self.sustained


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


QUICK_MODES = MODES


def quick(ops: Sequence[str], modes: Sequence[str]) -> list[Step]:
    """Return the steps of `bench --quick`, for all ops or those named.

    They cover every kind of mask and bias. The sizes fit a minute on two cores, are long enough to
    show a quadratic cost, and keep naive code's backward to some tens of milliseconds.
    """
    rows = [row for family in kits() for row in of_family(family, "QUICK", ())]
    return [
        Step(found, DTYPES[dtype], mode)
        for row in rows
        if (found := resized(case(row.case, "medium"), dict(row.shape))).op in ops
        for dtype in row.dtypes
        for mode in modes
        if mode == "fwd" or not found.forward_only
    ]


def chosen(
    ops: Sequence[str],
    names: Sequence[str],
    size: str,
    shape: dict[str, int],
    dtypes: Sequence[str],
    modes: Sequence[str],
) -> list[Step]:
    """Return the steps of the named cases; without names, each op's core cases."""
    everything = [c for op in ops for c in (*cases(op, size), *cases(op, size, {APART}))]
    known = {c.name for c in everything}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"--case: no case {', '.join(unknown)}; {', '.join(ops)} have"
            f" {', '.join(sorted(known))}"
        )
    picked = [
        c
        for c in everything
        if (c.name in names if names else "core" in c.tags and APART not in c.tags)
    ]
    steps = [
        Step(resized(c, shape), DTYPES[d], m)
        for c in picked
        for d in dtypes
        for m in modes
        if m == "fwd" or not c.forward_only
    ]
    if not steps and picked:
        raise UsageError(
            f"--mode: {', '.join(c.name for c in picked)} take no gradient; the mode must be fwd"
        )
    return steps


def resized(found: Case, shape: dict[str, int]) -> Case:
    """Return the case at another shape; dimensions that it lacks are ignored."""
    return found.resize(
        **{name: size for name, size in shape.items() if name in found.shape or name == "Dv"}
    )


def tiny(found: Case) -> Case:
    """Return a tiny version of the problem, which loads the code before memory is measured."""
    limits = {"B": 1, "Lq": 16, "Lk": 16, "D": 32, "rows": 8, "d": 64, "hidden": 64, "classes": 64}
    return found.resize(
        **{name: min(size, limits[name]) for name, size in found.shape.items() if name in limits}
    )
