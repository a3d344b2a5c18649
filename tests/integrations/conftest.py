# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the integration tests: forced backends, registered transformers, no leaks."""

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
    """Force each backend of attention: an unsupported call fails the test."""
    with pt.use_backend(attention=backend):
        yield backend


@pytest.fixture(autouse=True)
def never_left_active() -> Iterator[None]:
    """Check that a test does not leave PyTorch's attention replaced."""
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
