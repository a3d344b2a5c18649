# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the model tests: quiet and offline Hugging Face, one thread, strict backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _quick_and_strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread, fastest for these sizes, and make unsupported calls raise."""
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


@pytest.fixture(scope="session")
def hugging_face() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers to compare with")
    transformers.utils.logging.set_verbosity_error()
    return transformers


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
