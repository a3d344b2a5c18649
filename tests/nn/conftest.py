"""Modules this small are fastest on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(one_thread: None) -> None:
    pass
