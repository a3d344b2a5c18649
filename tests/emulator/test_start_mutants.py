# SPDX-License-Identifier: Apache-2.0
"""Starts that dropout ignores, each of which must be caught by start_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, found, parameters

FAULTS = (
    Fault("dropout_of_the_first_sequences", "sequences and heads", "of sequences slice(1, 3, None)"),
    Fault("dropout_of_the_first_heads", "sequences and heads", "heads slice(2, 4, None)"),
    Fault("dropout_bits_of_the_first_sequences", "sequences and heads, bits", "of sequences slice(1, 3, None)"),
    Fault("dropout_bits_of_the_first_heads", "sequences and heads, bits", "heads slice(2, 4, None)"),
    Fault("dropout_of_the_first_rows", "rows", "row_start=5"),
    Fault("dropout_of_the_first_columns", "hidden", "row_start=5, column_start=32"),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "start_problems", emulated, "sm90")


def test_without_a_fault_nothing_is_found(emulated: Path) -> None:
    assert found(emulated, "start_problems", "", 1, path="sm90") == ""
