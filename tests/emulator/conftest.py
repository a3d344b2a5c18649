# SPDX-License-Identifier: Apache-2.0
"""Build and load the emulator (csrc/emulator) for these tests: one to two minutes, once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pytransformer as pt

sys.path.append(str(Path(__file__).parent))  # for planted and the problems
from text_faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
SHARED = 3  # schedules that share a test's problems
SCHEDULES = [
    *range(1, SHARED + 1),
    *(pytest.param(n, marks=pytest.mark.slow) for n in range(SHARED + 1, SHARED + 20)),
]


def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "emulator_build", ROOT / "csrc" / "emulator" / "build.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    module = _builder()
    if reason := module.why_not():
        pytest.skip(f"the emulator cannot be built: {reason}")
    return module


@pytest.fixture(scope="module")  # not longer: later modules would see another backend
def emulated(builder: ModuleType) -> Iterator[Path]:
    """Load the library of emulated ops; the backend "cuda" then accepts CPU tensors."""
    library = builder.library(faults=FAULTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTRANSFORMER_EMULATE", str(library))
        pt.explain("layer_norm", torch.zeros(1, 8), 8)  # loads it
        yield library


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a GPU with the instructions of sm_90a."""
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "sm90")


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest, emulated: Path) -> int:
    """Set the order in which the emulator runs threads; results are reproducible.

    The first three schedules share the problems (see ``share``); with slow tests each problem runs
    under 20.
    """
    torch.ops.pytransformer_C.emulator_schedule(1_000_000 * request.param)
    return request.param


@pytest.fixture
def share(schedule: int) -> Callable[[Iterable[Any]], list[Any]]:
    """Return a function that selects this schedule's problems.

    It selects a third, or all under the schedules of slow tests.
    """
    return lambda problems: (
        list(problems)[schedule - 1 :: SHARED] if schedule <= SHARED else list(problems)
    )


@pytest.fixture(scope="session")
def answers(builder: ModuleType) -> dict[str, torch.Tensor]:
    """Return the conformance program's results in the emulator: name -> words, as int64."""
    program = builder.program("conformance", [ROOT / "tests" / "cuda" / "conformance.cpp"])
    done = subprocess.run([program, "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (line.split() for line in done.stdout.splitlines())
    return {name: torch.tensor([int(word, 16) for word in words]) for name, *words in lines}
