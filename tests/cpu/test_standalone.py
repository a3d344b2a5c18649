# SPDX-License-Identifier: Apache-2.0
"""The kernel layers without torch against double loops: here, and for aarch64 in qemu.

Each program of `standalone/` links its op's kernels and checks them. The aarch64 build exists
twice, with NEON vectors and with scalars, and qemu runs it if installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PROGRAMS = ROOT / "tests" / "cpu" / "standalone"
OPS = sorted(path.parent.name for path in CSRC.glob("cpu/*/kernels.cpp"))
FLAGS = [
    "-O1",
    "-std=c++17",
    "-pthread",
    "-static",
    "-I",
    str(CSRC),
    "-DPT_ISA=generic",
    "-fno-math-errno",
    "-Wno-psabi",
]
CROSS = "aarch64-linux-gnu"
STRICT = ["-Wall", "-Wextra", "-Werror"]
AARCH64 = {"neon": "-march=armv8-a", "scalar": "-march=armv8-a+nosimd"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CSRC.is_dir(), reason="the sources are not here: the tests run outside a clone"
    ),
]


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def build(compiler: list[str], op: str, folder: Path) -> Path:
    program, kernels = folder / op, folder / "kernels.o"
    run([*compiler, *FLAGS, "-c", str(CSRC / "cpu" / op / "kernels.cpp"), "-o", str(kernels)])
    run(
        [
            *compiler,
            *FLAGS,
            str(PROGRAMS / f"{op}.cpp"),
            str(kernels),
            str(CSRC / "cpu/core/arena.cpp"),
            "-o",
            str(program),
        ]
    )
    return program


def judge(command: list[str]) -> None:
    lines = run(command).splitlines()
    assert len(lines) >= 3 and all(": ok, " in line for line in lines), lines


@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_loops_on_this_machine(op: str, tmp_path: Path) -> None:
    """The generic set uses the vectors of this machine's compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    judge([str(build([compiler], op, tmp_path))])


@pytest.mark.parametrize("vectors", AARCH64)
@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_loops_on_aarch64(op: str, vectors: str, tmp_path: Path) -> None:
    compiler, emulator = (
        shutil.which(f"{CROSS}-g++"),
        shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64"),
    )
    if compiler is None:
        pytest.skip(f"no {CROSS}-g++ here (Debian: g++-{CROSS})")
    program = build([compiler, AARCH64[vectors], *STRICT], op, tmp_path)
    code = run([f"{CROSS}-objdump", "-d", "--no-show-raw-insn", str(tmp_path / "kernels.o")])
    used = {
        word.split(".")[-1]
        for word in code.split()
        if word.startswith("v") and word[1:2].isdigit() and "." in word
    }
    assert any(lanes.startswith(("4s", "2d")) for lanes in used) == (vectors == "neon"), sorted(
        used
    )
    if emulator is None:
        pytest.skip("built, and not run: no qemu-aarch64 here (Debian: qemu-user-static)")
    judge([emulator, str(program)])
