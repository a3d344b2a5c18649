# SPDX-License-Identifier: Apache-2.0
"""README says what is so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pytransformer.ops._core import native

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(native.why_not("attention_fwd") is not None, reason=f"{native.why_not('attention_fwd')}")
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("pytransformer.kernels") is None,
    reason="needs Triton and an installed pytransformer.kernels, to ask the Triton backend",
)
def test_support_table_is_what_the_registry_says():
    script = ROOT / "bench" / "tools" / "support_table.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd="/")
    readme = (ROOT / "README.md").read_text()
    assert done.stdout.strip() in readme, "run: python bench/tools/support_table.py --write"
