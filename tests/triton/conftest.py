# SPDX-License-Identifier: Apache-2.0
"""Run kernels interpreted on CPU tensors: TRITON_INTERPRET=1 pytest tests/triton.

Tests marked gpu run compiled.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import interpreter

sys.path.append(str(Path(__file__).parent))  # for kernel_mutants


def pytest_report_header() -> str:
    return f"triton {triton.__version__} from {Path(triton.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        here = os.path.dirname(__file__)
        for item in items:
            if str(item.path).startswith(here) and not item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason="needs TRITON_INTERPRET=1 set before pytest starts")
                )


@pytest.fixture(scope="session", autouse=True)
def _language_replaced_once_a_launch() -> Iterator[None]:
    """Replace triton.language once per launch.

    Triton's interpreter searches it at each function call for replacements that the launch has made
    already: more than half of the time of these tests.
    """
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[tuple[bool, bool]] = set()

    def replace_once(fn: Any) -> Any:
        modules = fn.__globals__.values()
        languages = (
            any(m is triton.language for m in modules),
            any(m is triton.language.core for m in modules),
        )
        if languages in replaced:
            return None  # functions, unlike launches, do not need it
        replaced.add(languages)
        return replace(fn)

    def launch(*arguments: Any, **options: Any) -> None:
        replaced.clear()
        run(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the computed products of tiles."""
    counted: Counter[str] = Counter()
    inner = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, *args: Any) -> Any:
        counted["tiles"] += 1
        return inner(self, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    yield counted


@pytest.fixture
def integers_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Limit int32 loads of kernels to the tensors of the block mask.

    A load outside them raises.
    """
    allowed: list[Tensor] = []
    inner = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        if pointers.get_element_ty() == interpreter.tl.int32:
            addresses = pointers.data[
                numpy.broadcast_to(mask.data != 0, pointers.data.shape)
            ].astype("uint64")
            inside = sum(
                (addresses >= t.data_ptr()) & (addresses < t.data_ptr() + t.nbytes) for t in allowed
            )
            assert bool((inside == 1).all()), (
                f"int32 read at {addresses[inside != 1][:4]}: outside the tensors of the block mask"
            )
        return inner(self, pointers, mask, *args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", create_masked_load)
    yield allowed
