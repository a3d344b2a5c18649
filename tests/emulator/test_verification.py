# SPDX-License-Identifier: Apache-2.0
"""The check at first use detects a fault in the emulated CUDA kernel in its own process.

The next backend then computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytransformer.ops._core import checking
from pytransformer.ops._core.registry import OPS, trace
from support.planted_backend import check_told_once, checked_apart
from support.way_down import WAYS

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("emulated")]


@pytest.mark.parametrize("fault", ["", "one_key_too_many"])
def test_broken_kernel_is_detected_and_reported_once(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check plants a fault of text_faults.py; without the fault the backend is used."""
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
