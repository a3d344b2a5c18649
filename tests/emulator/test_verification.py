# SPDX-License-Identifier: Apache-2.0
"""A fault in the CUDA kernel itself: the check at the first call finds it in a process of its own,
and the next backend computes.
Emulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytransformer.ops._core import checking
from pytransformer.ops._core.registry import OPS, trace
from support.planted_backend import check_told_once, checked_apart
from support.way_down import WAYS

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("emulated")]


@pytest.mark.parametrize("fault", ["", "one_key_too_many"])
def test_broken_kernel_is_found_and_reported_once(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of text_faults.py is planted where the check runs; without it the backend is used."""
    way = WAYS["attention"]
    want = way()
    monkeypatch.setitem(checking.ENVIRONMENT, "PYTRANSFORMER_FAULT", fault)
    with checked_apart(OPS["attention"].backends["cuda"], "", tmp_path, seconds=120):
        if fault:
            check_told_once(way, want, "cuda", "verify: wrong here: ")
            return
        with trace() as by:
            way()
    assert {backend for _, backend in by} == {"cuda"}
