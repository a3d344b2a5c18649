# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests: a forced backend, transformers with our implementation
registered, nothing left active."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import pytransformer as pt

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture
def backend(backend: str) -> Iterator[str]:
    """Each backend of attention, forced: a call it cannot do fails the test."""
    with pt.use_backend(attention=backend):
        yield backend


@pytest.fixture(autouse=True)
def never_left_active() -> Iterator[None]:
    """No test may leave PyTorch's attention replaced."""
    from pytransformer import drop_in

    yield
    assert not drop_in.is_active()
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.fixture(scope="session")
def hugging_face() -> ModuleType:
    transformers = pytest.importorskip(
        "transformers", reason='transformers is not installed (the extra "hf")'
    )
    pt.integrations.transformers.register()
    return transformers
