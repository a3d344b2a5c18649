# SPDX-License-Identifier: Apache-2.0
"""Shared by verification tests: an empty cache, result files, the backend of a call."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import verification
from pytransformer.ops._core.registry import trace

CPU = torch.device("cpu")


def write(folder: Path, checks: list[dict[str, Any]], **more: Any) -> Path:
    path = verification.update_file(CPU, lambda _: {"checks": checks, **more})
    assert path is not None and path.parent == folder
    verification.forget()
    verification.prepare_cpu()  # in a new process the fast path does it at its first call
    return path


def line(outcome: str, *, size: int = 64, **changes: Any) -> dict[str, Any]:
    return {
        "op": "attention", "backend": "cpu", "dtype": "float32", "case": "full", "size": size,
        "outcome": outcome, "detail": "out[0] = 1", **changes,
    }  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set up an empty cache and enable its results."""
    monkeypatch.setenv("PYTRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")
    verification.forget()
    yield tmp_path
    monkeypatch.undo()
    verification.forget()


def backend_of(**keywords: Any) -> str | None:
    dtype = keywords.pop("dtype", torch.float32)
    last = keywords.pop("last", 16)
    q, k, v = (torch.randn(1, 2, 30, last).to(dtype) for _ in "qkv")
    with trace() as ran, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pt.attention(q, k, v, **keywords)
    assert ran or not verification.watched, "the fast path ran"
    return ran[0][1] if ran else "cpu"
