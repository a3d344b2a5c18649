# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels are those that tests show to be caught, and no others."""

from __future__ import annotations

from pathlib import Path

import planted
import pytest


def test_every_fault_is_in_a_list() -> None:
    modules = sorted(path.stem for path in Path(__file__).parent.glob("test_*mutants.py"))
    assert planted.hooks() == {fault.name for module in modules for fault in planted.listed(module)}


def test_an_unknown_fault_is_an_error(emulated: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="no_such_fault: exit code 2"):
        planted.found(emulated, "sm90_problems", "no_such_fault", 1, "one tile", "sm90")


def test_without_a_fault_nothing_is_found(emulated: Path) -> None:
    assert planted.found(emulated, "sm90_problems", "", 1, "one tile", "sm90") == ""
