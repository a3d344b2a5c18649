# SPDX-License-Identifier: Apache-2.0
"""Checks shared by the tests of every op of the Triton backend: random problems, planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_mutants import mutated

from support import (
    draw_attention,
    fuzz_cross_entropy,
    fuzz_feed_forward,
    fuzz_layer_norm,
    fuzz_rotary,
)
from support.fuzz import Report, fuzz

FAULT_SIGNS = ("WRONG", "two runs differ", "StrayWrite")


class Drawn(NamedTuple):
    """Random problems of one op: ``few`` numbers in every run, ``many`` in a long one."""

    draw: Callable[[int, int], Any]
    seed: int
    few: int
    many: int
    wanted: int  # min supported problems in a long run


DRAWN = {
    "attention": Drawn(draw_attention.draw, seed=5, few=24, many=360, wanted=300),
    "layer_norm": Drawn(fuzz_layer_norm.draw, seed=3, few=40, many=240, wanted=100),
    "feed_forward": Drawn(fuzz_feed_forward.draw, seed=6, few=40, many=240, wanted=100),
    "cross_entropy": Drawn(fuzz_cross_entropy.draw, seed=4, few=40, many=240, wanted=100),
    "rotary": Drawn(fuzz_rotary.draw, seed=8, few=40, many=240, wanted=100),
}


def every_third(names: Iterable[str]) -> list[Any]:
    """Return parameters: one in three runs in `make test`; the others are slow tests.

    A fault takes the interpreter seconds.
    """
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, name in enumerate(names)
    ]


def numbers(op: str, among: Iterable[int]) -> list[int]:
    """Return the numbers of problems in other dtypes than float64, which is not supported."""
    return [n for n in among if DRAWN[op].draw(DRAWN[op].seed, n).dtype != torch.float64]


def examine(op: str, among: Iterable[int], stop_after: int = 5) -> Report:
    """Check a problem with guarded, poisoned memory, odd strides and equal bits twice."""
    report = fuzz(op, ["triton"], DRAWN[op].seed, numbers(op, among), stop_after=stop_after)
    print(report.table(), f"\n{report.cases} cases, seed {DRAWN[op].seed}, {report.seconds:.0f} s")
    return report


def check_found(family: str, fault: tuple[str, str, str], folder: Path, feature: str = "") -> None:
    """Assert that a random problem fails with this fault planted in kernels/<family>.

    The failure is a wrong value, unequal bits or a write outside its tensors; a crash does not
    count. With a feature, only problems that have it run, the smallest first.
    """
    chosen = numbers(family, range(DRAWN[family].many))
    if feature:
        drawn = {n: DRAWN[family].draw(DRAWN[family].seed, n) for n in chosen}
        chosen = sorted(
            (n for n in chosen if feature in drawn[n].features),
            key=lambda n: sum(t.numel() for t in drawn[n].tensors.values()),
        )
    with mutated(family, *fault, folder):
        report = examine(family, chosen, stop_after=1)
    assert report.failures, f"{fault} survived {report.cases} cases"
    assert any(sign in report.failures[0] for sign in FAULT_SIGNS), report.failures[0]
