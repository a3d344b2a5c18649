# SPDX-License-Identifier: Apache-2.0
"""Damaged, concurrent and unwritable files of verification results break no call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pytransformer as pt
from pytransformer.ops._core import fast_path, verification
from pytransformer.testing import bounds
from support.planted_backend import inputs
from support.verification_support import CPU, backend_of, cache, line, write

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("one_thread")]
__all__ = ["cache"]


def test_results_of_another_build_are_ignored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(cache, [line("wrong")])
    text = path.read_text()
    path.write_text(text.replace('"sources": "', '"sources": "x'))
    verification.forget()
    verification.prepare_cpu()
    assert backend_of() == "cpu"
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "off")
    path.write_text(text)
    verification.forget()
    assert backend_of() == "cpu"


VALUES: tuple[Any, ...] = (
    None,
    5,
    -1.5,
    "x",
    [],
    {},
    [{}],
    [1],
    True,
    float("nan"),
    "y" * 2000,
    [["a"]],
    {"a": 1},
)


def damages(content: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield every field replaced by values of other types, removed, and damaged bytes."""
    text = json.dumps(content)
    places: list[tuple[Any, ...]] = [(name,) for name in content]
    places += [("checks", 0, name) for name in content["checks"][0]]
    places += [("key", name) for name in content["key"]]
    for place in places:
        for value in (*VALUES, "removed"):
            whole = json.loads(text)
            target: Any = whole
            for step in place[:-1]:
                target = target[step]
            if value == "removed":
                del target[place[-1]]
            else:
                target[place[-1]] = value
            yield f"{place} {value!r:.20}", json.dumps(whole).encode()
    encoded = text.encode()
    for cut in range(0, len(encoded), 7):
        yield f"cut at {cut}", encoded[:cut]
    for n in range(200):
        at, bit = (n * 7919) % len(encoded), n % 8
        flipped = bytes([encoded[at] ^ 1 << bit])
        yield f"bit {bit} of byte {at}", encoded[:at] + flipped + encoded[at + 1 :]
    yield "deep", b"[" * 200_000
    yield "binary", bytes(range(256))
    digits = b"9" * 6000
    yield "huge number", b'{"schema": 2, "key": {}, "checks": [], "x": ' + digits + b"}"
    yield "too large", b" " * (verification.MAX_BYTES + 1)


def test_damaged_files_break_no_call(cache: Path) -> None:
    """After each of over 500 damages the call is right; at most one warning names the file."""
    path = write(cache, [line("right")], complete=[["attention", "cpu", "float32"]], order={})
    content = json.loads(path.read_text())
    q, k, v = inputs()
    want = pt.attention(q, k, v)
    count, warned = 0, 0
    for name, damaged in damages(content):
        path.write_bytes(damaged)
        verification._warned.clear()
        verification.forget()
        with warnings.catch_warnings(record=True) as output, fast_path.off():
            warnings.simplefilter("always")
            for _ in range(2):
                got = pt.attention(q, k, v, backend=None)
                assert bounds.agree(got, want), name
        named = [w for w in output if "verification file" in str(w.message)]
        assert len(named) <= 1 and all(str(path) in str(w.message) for w in named), name
        count, warned = count + 1, warned + bool(named)
    pt.clear_fallbacks()
    assert count > 500 and warned > 300


@pytest.mark.parametrize("what", ["folder", "loop", "pipe", "endless", "unreadable folder"])
def test_paths_that_are_not_files_break_no_call(
    what: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(cache, [line("wrong")])
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.setenv("PYTRANSFORMER_CACHE", str(cache / "none" / "\0x"[1:]))
    verification.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verification.prepare_cpu()
    assert backend_of() == "cpu"


def test_no_home_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PYTRANSFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")
    verification.forget()
    assert verification.cache_folder() is None and verification.load_file(CPU) is None
    verification.add_checks(CPU, [line("wrong")])
    with verification.locked("check", 0.1) as held:
        assert not held
    assert backend_of() == "cpu"
    verification.forget()


WRITER = """
import sys, torch
from pytransformer.ops._core import verification as f
for n in range(20):
    line = {"op": "attention", "backend": "cpu", "dtype": "float32", "case": f"{sys.argv[1]} {n}"}
    f.add_checks(torch.device("cpu"), [line | {"size": 64, "outcome": "right", "detail": None}])
"""


def test_concurrent_writers_lose_no_checks(cache: Path) -> None:
    """They leave no temporary files and remove the one of a killed writer."""
    (cache / "verification-killed.tmp").write_text("{")
    command = [sys.executable, "-c", WRITER]
    writers = [subprocess.Popen([*command, str(n)], env=dict(os.environ)) for n in range(2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 2
    content = verification.load_file(CPU)
    assert content is not None and len(content["checks"]) == 40
    assert not list(cache.glob("*.tmp"))


def test_failed_writes_leave_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("replace", "fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
            assert verification.update_file(CPU, lambda _: {"checks": []}) is None
        assert not list(cache.glob("*.tmp"))
