# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the module tests: one thread, and errors for calls without a fused backend."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick_and_strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, fastest for these sizes, and make unsupported calls raise."""
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")
