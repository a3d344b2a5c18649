# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that do not compile or launch fall back; failures of running kernels raise.

The kernels are interpreted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import triton.runtime.build
from triton.compiler.errors import CompilationError
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError
from triton.runtime.interpreter import GridExecutor

import pytransformer as pt
from support.way_down import FAULTS, REFUSED, WAYS, attention, check, failing, preferred

pytestmark = [
    pytest.mark.falls_back,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1, set before Python starts",
    ),
]


def no_compiler() -> Exception:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC", raising=False)
        patch.setenv("PATH", "")
        triton.runtime.build._build("launcher", "launcher.c", "/nowhere", [], [], [], [])
    raise AssertionError("something was built without a compiler")


def no_driver() -> Exception:
    repr(triton.runtime.driver.active.get_current_target())
    raise AssertionError("this machine has a GPU")


def of_cuda(text: str) -> Callable[[], Exception]:
    return lambda: RuntimeError(f"Triton Error [CUDA]: {text}")


BEFORE: dict[str, tuple[Callable[[], Exception], str]] = {
    "compilation": (
        lambda: CompilationError("x = tl.dot(a)\n" * 40, None, "dot() missing b"),
        "dot() missing b",
    ),
    "resources": (
        lambda: OutOfResources(200_000, 101_376, "shared memory"),
        "Hardware limit: 101376",
    ),
    "ptxas": (lambda: PTXASError("Unsupported .version 9.0"), "Unsupported .version 9.0"),
    "no compiler": (no_compiler, "Failed to find C compiler"),
    "no driver": (no_driver, "active drivers"),
    **{text: (of_cuda(text), text) for text in REFUSED},
}
AFTER: dict[str, Callable[[], Exception]] = {
    **{text: of_cuda(text) for text in FAULTS},
    "PyTorch's memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "interpreter": lambda: InterpreterError("index out of range"),
    "wrong value": lambda: ValueError("attention: key_lengths holds 12"),
    "our own mistake": lambda: AttributeError("module has no attribute"),
}


def lost_context() -> Exception:
    """Raise PyTorch's error when Triton's launcher reads the current device."""
    called_there = {"__name__": "triton.backends.nvidia.driver", "torch": torch}
    exec(
        "def ask():\n    raise torch.AcceleratorError('CUDA error: device-side assert triggered')",
        called_there,
    )
    called_there["ask"]()
    raise AssertionError


@pytest.fixture
def launches(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Callable[[], Exception]], None]]:
    """Make every launch of an interpreted kernel raise."""
    yield lambda error: monkeypatch.setattr(GridExecutor, "__call__", failing(error))


@pytest.mark.parametrize("then", ["cpu", "reference"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BEFORE)
def test_failures_fall_back_to_the_next_backend(
    launches: Callable[..., None], name: str, way: str, then: str
) -> None:
    error, says = BEFORE[name]
    want = WAYS[way]()
    with preferred("triton", then=then):
        launches(error)
        check(way, want, "triton", says)


@pytest.mark.parametrize("way", WAYS)
def test_failing_backward_falls_back(way: str) -> None:
    want = WAYS[way]()
    with preferred("triton", only_backward=OutOfResources(200_000, 101_376, "shared memory")):
        check(way, want, "triton", "shared memory", fails="attention_bwd")


@pytest.mark.parametrize("name", AFTER)
def test_failures_of_running_kernels_are_raised_unchanged(
    launches: Callable[..., None], name: str
) -> None:
    error = AFTER[name]()
    with preferred("triton"), pytest.raises(type(error)) as caught:
        launches(lambda: error)
        attention()
    assert caught.value is error and not pt.fallbacks()


def test_lost_context_is_not_a_backend_failure(launches: Callable[..., None]) -> None:
    launches(lost_context)
    with preferred("triton"), pytest.raises(torch.AcceleratorError, match="device-side assert"):
        attention()


def test_forced_and_strict_calls_raise(
    launches: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OutOfResources(200_000, 101_376, "shared memory")
    launches(lambda: error)
    with preferred("triton"):
        for _ in range(2):  # every call tries it
            with (
                pt.use_backend(attention="triton"),
                pytest.raises(pt.BackendError, match="forced but did not run") as caught,
            ):
                attention()
            assert caught.value.__cause__ is error
        monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")
        for way in ("attention", "activated"):
            for _ in range(2):  # at the failure, and from memory
                with pytest.raises(pt.BackendError, match=r"strict mode.*shared memory"):
                    WAYS[way]()
            pt.clear_fallbacks()


def test_failures_are_remembered_per_problem_class(
    launches: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head dim 16 in float32 fails.

    Head dim 8, bfloat16 and dropout are tried; other lengths are not.
    """
    tried: list[tuple[torch.dtype, int]] = []

    def launch(grid: object, *args: torch.Tensor, **options: object) -> None:
        tried.append((args[0].dtype, args[0].shape[-1]))
        raise OutOfResources(200_000, 101_376, "shared memory")

    monkeypatch.setattr(GridExecutor, "__call__", launch)

    def call(dtype: torch.dtype, size: int, length: int, **options: float) -> None:
        pt.attention(*(torch.zeros(1, 1, length, size, dtype=dtype) for _ in "qkv"), **options)

    with preferred("triton"), pytest.warns(RuntimeWarning, match="shared memory"):
        for dtype, size in ((torch.float32, 16), (torch.float32, 8), (torch.bfloat16, 16)):
            for length in (4, 70, 5):
                call(dtype, size, length)
        assert len(tried) == 3
        call(torch.float32, 16, 4, dropout_p=0.1)
        assert len(tried) == 4
        explained = pt.explain("attention", *(torch.zeros(1, 1, 3, 16) for _ in "qkv"))
        assert explained.backend == "cpu" and "did not run: OutOfResources" in str(
            explained.reasons["triton"]
        )
        pt.clear_fallbacks()
        call(torch.float32, 16, 4)
        assert len(tried) == 5, "clear_fallbacks() gives another try"
