# SPDX-License-Identifier: Apache-2.0
"""The kernel layer without torch on several threads, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++17", "-I", str(CSRC), "-DPT_ISA=generic", "-fno-math-errno", "-Wno-psabi"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CSRC.is_dir(), reason="the sources are not here: the tests run outside a clone"
    ),
]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )


@pytest.mark.parametrize("sanitizer", ("thread", "address,undefined"))
@pytest.mark.parametrize("op", ("attention", "feed_forward"))
def test_four_threads_have_no_data_race(op: str, sanitizer: str, tmp_path: Path) -> None:
    """Forward and backward have no stray access and give the bits of one thread."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    found = subprocess.run(
        [compiler, f"-fsanitize={sanitizer}", str(probe), "-o", str(tmp_path / "probe")],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(
            f"g++ cannot link with -fsanitize={sanitizer}: {found.stderr.strip().splitlines()[-1]}"
        )
    program = tmp_path / "threads_test"
    sources = [
        ROOT / "tests" / "cpu" / f"{op}_threads_test.cpp",
        CSRC / "cpu" / op / "kernels.cpp",
        CSRC / "cpu" / "core" / "arena.cpp",
    ]
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1", "-g1", "-pthread"]
    run([compiler, *options, *FLAGS, *map(str, sources), "-o", str(program)])
    # ThreadSanitizer cannot map its shadow under the address randomization of recent kernels.
    fixed = ["setarch", os.uname().machine, "-R"] if shutil.which("setarch") else []
    run([*fixed, str(program)])
