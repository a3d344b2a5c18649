"""These tests run the kernels interpreted, on CPU tensors: TRITON_INTERPRET=1 pytest tests/triton. Those marked gpu do not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

sys.path.append(str(Path(__file__).parent))  # for kernel_mutants


def pytest_report_header() -> str:
    return f"triton {triton.__version__} from {Path(triton.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        here = os.path.dirname(__file__)
        for item in items:
            if str(item.path).startswith(here) and not item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 set before pytest starts"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
