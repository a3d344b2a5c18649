# SPDX-License-Identifier: Apache-2.0
"""The CPU gemm prefetches: GCC 12 drops calls of a function that only prefetches.

No result shows the loss.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import pytransformer
from pytransformer.ops._core import native


def test_gemm_contains_prefetch_instructions() -> None:
    library = Path(pytransformer.__file__).parent / native.LIBRARY_NAME
    if not library.exists():
        pytest.skip("no CPU library was built here")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump here (Debian: binutils)")
    command = ["objdump", "-d", "--no-show-raw-insn", "--no-addresses", str(library)]
    asks: dict[str, bool] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        name = ""
        for line in process.stdout:
            if line.startswith("<"):
                name = line
                if "Matmul" in name and "tile_rows" in name and ".cold" not in name:
                    asks[name] = False
            elif name in asks and ("prefetch" in line or "prfm" in line):
                asks[name] = True
    assert len(asks) >= 10, "tile_rows() of core/matmul.h is not found under this name"
    silent = [name for name, found in asks.items() if not found]
    assert not silent, f"without any prefetch: {silent}"
