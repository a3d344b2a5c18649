# SPDX-License-Identifier: Apache-2.0
"""docs/one-call.md: the functions that a call runs, traced, and the files that it names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import fast_path, native

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "one-call.md").read_text(encoding="utf-8")
FILES = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()


class Step(NamedTuple):
    """A row of the page's tables: function names, and the files that the row names."""

    section: str
    names: tuple[str, ...]
    files: tuple[str, ...]


def is_file(text: str) -> bool:
    return re.search(r"\.(py|h|cpp|cuh|cu)$", text) is not None


def steps() -> list[Step]:
    """Return the rows; one with "the same file" has the files of the row before."""
    rows: list[Step] = []
    for section in PAGE.split("\n## ")[1:]:
        title, *lines = section.splitlines()
        for line in lines:
            if not line.startswith("| ") or line.startswith("| function"):
                continue
            cell = line.split("|")[1]
            quoted = re.findall(r"`([^`]+)`", cell)
            files = tuple(text for text in quoted if is_file(text))
            if "the same file" in cell:
                files = rows[-1].files
            rows.append(Step(title, tuple(t for t in quoted if not is_file(t)), files))
    return rows


def part(title: str) -> list[Step]:
    found = [step for step in steps() if step.section.startswith(title)]
    assert found, title
    return found


def function(name: str) -> str:
    """Return the last name of "A::b", "A.b", "a<T>(…)" or "MACRO(b)"."""
    macro = re.fullmatch(r"[A-Z_]+\((\w+)\)", name)
    return macro[1] if macro else re.findall(r"\w+", re.sub(r"[<(].*?[>)]", "", name))[-1]


def traced(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return (function, file) of each call of this package's Python code, in order."""
    calls: list[tuple[str, str]] = []

    def see(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "pytransformer"):
            calls.append((frame.f_code.co_name, path.relative_to(ROOT).as_posix()))

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def attention() -> torch.Tensor:
    query, mask = torch.randn(1, 2, 64, 32, requires_grad=True), torch.rand(64, 64) > 0.1
    return pt.attention(query, query, query, attn_mask=mask, causal="top_left")


needs_native = pytest.mark.skipif(
    native.why_not("attention_fwd") is not None, reason="needs the native CPU library"
)


@pytest.mark.skipif(fast_path.why_not() is not None, reason="needs the C++ fast path")
def test_fast_path_runs_one_python_function() -> None:
    (name, file), *rest = traced(attention)
    first = part("Fast path")[0]
    assert (name,) == first.names and file.endswith(first.files)
    # The suite traces raw ops, and the fast path reports each to it.
    assert {Path(file).name for _, file in rest} <= {"registry.py", "scopes.py"}


@needs_native
def test_python_path_runs_the_listed_functions_in_order() -> None:
    cpu = [step for step in part("cpu") if step.files and step.files[0].endswith(".py")]
    rows = [*part("Python path"), *cpu]
    assert len(rows) == 8
    with fast_path.off():
        calls = iter(traced(attention))
    for row in rows:
        name = function(row.names[0])
        assert any(n == name and file.endswith(row.files) for n, file in calls), row


def test_every_step_exists_in_the_named_file() -> None:
    """A name stands in a file of its row; a row without a file names a function of an earlier."""
    missing, earlier = [], ""
    for row in steps():
        paths = [f for f in FILES for end in row.files if f == end or f.endswith("/" + end)]
        texts = "".join((ROOT / f).read_text(encoding="utf-8") for f in paths)
        earlier = texts + earlier
        if row.files and not paths:
            missing.append((row.section, row.files))
        for name in row.names:
            if not re.search(rf"\b{function(name)}\b", texts if row.files else earlier):
                missing.append((row.section, name))
    assert missing == []
