# SPDX-License-Identifier: Apache-2.0
"""The emulator reports operations that the PTX ISA leaves undefined: see messages.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_emulator_reports_undefined_operations(seed: int, builder: ModuleType) -> None:
    program = builder.program("messages", [Path(__file__).with_name("messages.cpp")])
    done = subprocess.run([program, str(seed)], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) > 40, (
        "\n".join(line for line in lines if not line.startswith("ok")) + done.stderr
    )
