# SPDX-License-Identifier: Apache-2.0
"""Fallbacks of the backend ``cpu`` and the memory of failures.

Triton's and CUDA's fallbacks are in tests/triton and tests/emulator.
"""

from __future__ import annotations

import dataclasses
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import dispatch as _fallbacks
from pytransformer.ops._core import fast_path, native
from pytransformer.ops._core.dispatch import NotLaunched
from pytransformer.ops._core.registry import OPS
from support.way_down import WAYS, attention, check, failing, preferred

pytestmark = pytest.mark.falls_back
BEFORE = {
    "refused": NotLaunched("the CPU has no such instructions"),
    "no kernel": NotImplementedError("Could not run 'pytransformer_C::attention_fwd'"),
}


def plant(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    op = OPS["attention"]
    fail = failing(lambda: error)
    cpu = dataclasses.replace(op.backends["cpu"], forward=fail, infer=fail, backward=fail)
    monkeypatch.setattr(op, "backends", {**op.backends, "cpu": cpu})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BEFORE)
def test_failures_fall_back_to_the_next_backend(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    want = WAYS[way]()
    plant(monkeypatch, BEFORE[name])
    with preferred("cpu"):
        check(way, want, "cpu", str(BEFORE[name]))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        RuntimeError("boom"),
        ValueError("wrong"),
        torch.OutOfMemoryError("no room"),
    ],
)
def test_other_errors_are_raised_unchanged(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    plant(monkeypatch, error)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(type(error)) as caught:
            pt.attention(*(torch.ones(1, 1, 2, 8, requires_grad=True) for _ in "qkv"))
        assert caught.value is error and not pt.fallbacks()


def test_a_library_that_fails_to_load_falls_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    want = attention()
    (tmp_path / native.LIBRARY_NAME).write_bytes(b"not a library")
    native.why_not.cache_clear(), native._why_not_loaded.cache_clear()
    monkeypatch.setattr(native, "PACKAGE", tmp_path)
    try:
        with (
            warnings.catch_warnings(record=True) as output,
            fast_path.off(),
        ):  # the fast path resolved the library when it was loaded
            warnings.simplefilter("always")
            results = [attention() for _ in range(2)]
    finally:
        monkeypatch.undo()
        native.why_not.cache_clear(), native._why_not_loaded.cache_clear()
    for got in results:
        torch.testing.assert_close(got, want)
    (warning,) = output
    assert "does not load" in str(warning.message)


def test_threads_share_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, BEFORE["refused"])
    query = torch.ones(1, 1, 2, 8)
    with warnings.catch_warnings(record=True) as output, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        results = list(pool.map(lambda _: pt.attention(query, query, query), range(64)))
    assert all(torch.equal(r, query) for r in results)
    assert len(output) == 1 and sum(f.count for f in pt.fallbacks()) == 64


def test_one_message_per_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, BEFORE["refused"])
    query = torch.ones(1, 1, 2, 8)
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        pt.attention(query, query, query)
        pt.attention(query, query, query)
    assert len(output) == 1 and len({f.call_site for f in pt.fallbacks()}) == 2


def test_compiled_code_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.randn(1, 1, 2, 8)
    want = pt.attention(query, query, query)
    plant(monkeypatch, BEFORE["refused"])
    compiled = torch.compile(pt.attention, backend="aot_eager", fullgraph=True)
    with pytest.warns(RuntimeWarning, match="did not run: NotLaunched"):
        torch.testing.assert_close(compiled(query, query, query), want)


def test_failure_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fallbacks, "MOST_FAILURES", 3)
    plant(monkeypatch, BEFORE["refused"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (8, 16, 24, 32, 40):
            pt.attention(*(torch.ones(1, 1, 2, size) for _ in "qkv"))
    assert [kind[3] for kind in _fallbacks.failures] == [24, 32, 40]
