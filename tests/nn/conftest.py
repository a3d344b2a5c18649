# SPDX-License-Identifier: Apache-2.0
"""What tests of modules share: one thread, fused backends or an error."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick_and_strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules this small are fastest on one thread. What a fused backend cannot do raises."""
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")
