# SPDX-License-Identifier: Apache-2.0
"""A test that corrupts the CUDA context fails alone: the hooks of tests/conftest.py.

No GPU is needed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).parents[1] / "conftest.py"
CONFTEST = f"""
import importlib.util
import pytest
spec = importlib.util.spec_from_file_location("shared", {str(SHARED)!r})
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
pytest_runtest_protocol = shared.pytest_runtest_protocol
pytest_runtest_logreport = shared.pytest_runtest_logreport

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
"""
TESTS = """
import pytest
import torch

pytestmark = pytest.mark.gpu

def test_right():
    pass

def test_spoils():
    def lost():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost
    assert not "its own message"

def test_after():
    assert not torch.cuda.is_initialized()
"""


def test_other_tests_run_in_another_worker(tmp_path: Path) -> None:
    """The failure is reported immediately."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_three.py").write_text(TESTS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "test_spoils lost the CUDA context: an illegal memory access" in output
    assert output.index("FAILED ") < output.index("= FAILURES =") and "its own message" in output
    assert "2 passed" in output


def test_run_ends_without_workers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("shared", SHARED)
    assert spec and spec.loader
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    request.node.add_marker("gpu")
    hook = shared.pytest_runtest_protocol(request.node)
    next(hook)
    with pytest.raises(
        pytest.exit.Exception, match="lost the CUDA context: an illegal memory access"
    ):
        hook.send(None)
    request.node.own_markers.clear()
