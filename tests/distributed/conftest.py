# SPDX-License-Identifier: Apache-2.0
"""Processes shared by the tests of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    processes = Pool(4, 2, 3)
    yield processes
    processes.close()
