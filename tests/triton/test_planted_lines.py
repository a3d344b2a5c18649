# SPDX-License-Identifier: Apache-2.0
"""Every planted fault of tests/triton replaces a line that its kernel file has.

``make test`` runs a third of the faults, and this test for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytransformer import kernels

HERE, KERNELS = Path(__file__).parent, Path(kernels.__path__[0])
TABLES = ("MUTANTS", "FAULTS", "EIGHT_BITS")


def planted(test_file: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, file, old text) of the module's faults; only some tables name files."""
    module = importlib.import_module(test_file)
    for table in TABLES:
        faults = getattr(module, table, {})
        for name, fault in faults.items() if isinstance(faults, dict) else ():
            if str(fault[0]).endswith(".py"):
                yield name, *fault[:2]


@pytest.mark.parametrize(
    "test_file", [f.stem for f in sorted(HERE.glob("test_*.py")) if f.stem != Path(__file__).stem]
)
def test_faulty_lines_exist(test_file: str) -> None:
    missing = {
        name: old
        for name, file, old in planted(test_file)
        if not any(old in found.read_text() for found in KERNELS.glob(f"*/{file}"))
    }
    assert not missing


def test_tables_are_found() -> None:
    assert sum(len(list(planted(f.stem))) for f in HERE.glob("test_[a-o]*.py")) > 60
