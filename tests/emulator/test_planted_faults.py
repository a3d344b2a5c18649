# SPDX-License-Identifier: Apache-2.0
"""A problem detects every planted fault: arithmetic (text_faults.py), call sites (sites.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import planted
import pytest
import sites
from sites import SiteFault
from text_faults import FAULTS, TextFault

LISTED = sites.listed()
UNSEEN = sites.unseen()
PTX = re.compile(
    r"^(?:PT_DEVICE|inline) .*?(\w+)\([^()]*(?:\([^()]*\)[^()]*)*PT_(?:ONLY_)?SITE\)", re.M
)


def some(faults: Iterable[Any], every: int) -> list[Any]:
    """Return parameters: one in ``every`` runs in `make test`; the others are slow tests."""
    name = lambda fault: fault.name if isinstance(fault, TextFault) else str(fault)
    return [
        pytest.param(f, marks=[pytest.mark.slow] * (i % every > 0), id=name(f))
        for i, f in enumerate(faults)
    ]


@pytest.mark.parametrize("fault", some(FAULTS, 4))
def test_arithmetic_faults_are_detected(fault: TextFault, emulated: Path) -> None:
    assert planted.found(emulated, fault.problems, fault.name, 1, fault.problem, fault.path), (
        "not found"
    )


@pytest.mark.parametrize("fault", some(sorted(LISTED), 24))
def test_call_site_faults_are_detected(fault: SiteFault, emulated: Path) -> None:
    assert sites.finds(emulated, fault, LISTED[fault]), f"not found by {LISTED[fault]}"


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) <= 60
    assert all(f"PT_FAULT({fault.name})" in fault.faulty for fault in FAULTS)


def test_sources_contain_no_faults() -> None:
    texts = {
        path: path.read_text()
        for path in planted.CSRC.rglob("*")
        if path.suffix in (".h", ".cuh", ".cu", ".cpp")
    }
    assert [path.name for path, text in texts.items() if "PT_FAULT" in text] == ["fault.h"]


def test_fault_texts_must_match_once(builder: ModuleType, tmp_path: Path) -> None:
    for text in ("no such text", "return"):
        with pytest.raises(ValueError, match=r"is there \d+ times"):
            builder.copies(tmp_path, [FAULTS[0]._replace(text=text)])


def test_every_ptx_call_is_listed() -> None:
    """Each file and line has a fault with its problem, or the reason why no problem shows it."""
    names = set(
        PTX.findall(
            "".join(path.read_text() for path in (planted.CSRC / "cuda" / "ptx").glob("*.cuh"))
        )
    )
    assert {"syncthreads", "wgmma_ss", "ld_shared_v4", "mbarrier_try_wait"} <= names
    call = re.compile(rf"ptx::({'|'.join(sorted(names))})\b")
    listed = {(fault.file, fault.text) for fault in (*LISTED, *UNSEEN)}
    files = [path for path in (planted.CSRC / "cuda").rglob("*.cu*") if path.parent.name != "ptx"]
    calls = {
        (str(path.relative_to(planted.CSRC)), line)
        for path in files
        for line in sites.lines(path)
        if call.search(line)
    }
    handed_on = {
        (file, line) for file, line in calls if "PT_HERE" in line or "PT_ONLY_HERE" in line
    }
    assert sorted(calls - handed_on - listed) == []


def test_every_listed_line_exists() -> None:
    assert [str(fault) for fault in (*LISTED, *UNSEEN) if fault.planted() is None] == []
    assert sites.TO_EXPLAIN not in UNSEEN.values()


@pytest.mark.parametrize("name", ["no_such_fault", "drop", "turn@cuda/tile/ring.cuh:1"])
def test_unknown_faults_raise(name: str, emulated: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        planted.found(emulated, "sm90_problems", name, 1, "one tile", "sm90")


@pytest.mark.parametrize(("problems", "path"), sites.RUNS)
def test_unmodified_kernels_pass(problems: str, path: str, emulated: Path) -> None:
    """Only each module's first problem runs; each op's tests run the others."""
    first = next(run for run in sites.problems() if run.problems == problems)
    assert planted.found(emulated, problems, "", 1, first.problem, path) == ""
