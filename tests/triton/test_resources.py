"""The kernels compile ahead of time, and take what the committed table says. See resources.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("resources.py")


def _check(*architectures: int) -> None:
    # Its own process: here the kernels are interpreted.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--arch", *map(str, architectures)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_hopper() -> None:
    _check(90)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 100, 120])
def test_others(architecture: int) -> None:
    _check(architecture)
