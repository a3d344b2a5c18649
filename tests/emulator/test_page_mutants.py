# SPDX-License-Identifier: Apache-2.0
"""Faults planted where keys are found in pages, each of which must be caught by page_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, found, parameters

FAULTS = (
    Fault("page_of_the_next_key", "pages of 16, tiles of queries"),
    Fault("rows_counted_across_pages", "pages of 7, tiles of queries", "other bits"),
    Fault("pages_of_the_first_sequence", "pages of 7, tiles of queries"),
    Fault("entries_of_pages_not_clamped", "entries outside the pool"),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "page_problems", emulated)


def test_without_a_fault_nothing_is_found(emulated: Path) -> None:
    assert found(emulated, "page_problems", "", 1) == ""
