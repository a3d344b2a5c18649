# SPDX-License-Identifier: Apache-2.0
"""Run the command line in a process outside the repository."""

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
    """A clock that only sleep advances, so a busy machine does not matter."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Replace the benchmark's clock by one that only its `sleep` advances."""
    stopped = Watch()
    monkeypatch.setattr(clock, "time", stopped)
    return stopped


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's clock count this process's CPU time."""
    monkeypatch.setattr(
        clock, "time", SimpleNamespace(perf_counter=time.process_time, sleep=time.sleep)
    )


@pytest.fixture
def environment() -> dict[str, str]:
    """Return an environment for a command.

    This checkout is first, the terminal has no width, and no inherited variable changes output.
    """
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
    """Return `cli("bench", "--quick")`: it runs a process and returns it with text output."""

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
    """Return `hide("matplotlib")`: the environment in which these modules are not importable."""

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
    """Return `tool("performance")`: the module bench/tools/performance.py, freshly loaded."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / "tools" / f"{name}.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
