# SPDX-License-Identifier: Apache-2.0
"""Random problems on the interpreted kernels, through the public API, against float64."""

from __future__ import annotations

import pytest
from checks import DRAWN, examine, numbers


@pytest.mark.parametrize("op", DRAWN)
def test_random_problems_within_the_bound(op: str) -> None:
    report = examine(op, range(DRAWN[op].few))
    assert not report.failures, "\n".join(report.failures)


@pytest.mark.slow
@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize("op", DRAWN)
def test_many_random_problems_within_the_bound(op: str, quarter: int) -> None:
    report = examine(op, range(DRAWN[op].few + quarter, DRAWN[op].many, 4))
    assert not report.failures, "\n".join(report.failures)


@pytest.mark.slow
@pytest.mark.parametrize("op", DRAWN)
def test_enough_random_problems_are_supported(op: str) -> None:
    assert len(numbers(op, range(DRAWN[op].many))) >= DRAWN[op].wanted
