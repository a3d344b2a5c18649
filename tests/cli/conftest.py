# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as a person does: in a process of its own, outside the repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytransformer.cli.benchmark import clock

ROOT = Path(__file__).resolve().parents[2]


class Watch:
    """A clock that only sleeping moves on: on a busy machine, too, a sleep takes what it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The benchmark's clock, stopped but for its own `sleep`."""
    stopped = Watch()
    monkeypatch.setattr(clock, "time", stopped)
    return stopped


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's clock counts what this process has of the processor, not what others leave it
    waiting."""
    monkeypatch.setattr(
        clock, "time", SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    )


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of a command: this checkout first, no terminal's width, and nothing inherited
    that changes output."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("COLUMNS", "FORCE_COLOR", "PYTRANSFORMER_CPU_ISA")
    }
    paths = [str(ROOT), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}


@pytest.fixture
def cli(
    tmp_path: Path, environment: dict[str, str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`cli("bench", "--quick")`: the finished process, its output as text."""

    def run(*arguments: str, expect: int = 0, **changes: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytransformer", *arguments],
            cwd=tmp_path,
            env={**environment, **changes},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == expect, (
            f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run


@pytest.fixture
def hide(tmp_path: Path, environment: dict[str, str]) -> Callable[..., dict[str, str]]:
    """`hide("rich")`: changes to the environment under which these modules cannot be found, as if
    never installed."""

    def changes(*modules: str) -> dict[str, str]:
        folder = tmp_path / "site"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            "from importlib.machinery import PathFinder\nfind = PathFinder.find_spec\ndef"
            " without(name, path=None, target=None):\n    return None if name.partition('.')[0] in"
            f" {modules!r} else find(name, path, target)\nPathFinder.find_spec = without\n"
        )
        return {"PYTHONPATH": os.pathsep.join([str(folder), environment["PYTHONPATH"]])}

    return changes


@pytest.fixture
def tool() -> Callable[[str], ModuleType]:
    """`tool("performance")`: the module bench/tools/performance.py, loaded anew."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "tools" / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
