# SPDX-License-Identifier: Apache-2.0
"""The instruction set amx_bf16 without AMX, by csrc/cpu/core/tiles_in_software.h.

The tile instructions are compared bit by bit with the manual's order of operations, the micro-
kernel with double loops. The slow tests run full ops under the address sanitizer, which detects a
tile access beyond its operand.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytransformer.cli import machine

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PROGRAMS = ROOT / "tests" / "cpu" / "standalone"
SET = "amx_bf16"
COMMON = [
    "-O1",
    "-std=c++17",
    "-pthread",
    "-I",
    str(CSRC),
    f"-DPT_ISA={SET}",
    "-DPT_TILES_IN_SOFTWARE",
    "-fno-math-errno",
]
SANITIZED = ["-g", "-fsanitize=address"]

pytestmark = pytest.mark.skipif(
    not CSRC.is_dir(), reason="the sources are not here: the tests run outside a clone"
)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    """Return the compiler with the set's flags in the build; its programs run here."""
    isas = runpy.run_path(str(CSRC / "toolchain.py"))["ISAS"]
    isa = next(isa for isa in isas if isa.name == SET)
    found = shutil.which("g++")
    if platform.machine() not in isa.machines or not machine.cpu_features().get("avx512_bf16"):
        pytest.skip("this CPU has no avx512_bf16, which all but the tiles of amx_bf16 needs")
    if found is None:
        pytest.skip("no g++ here")
    probe = subprocess.run(
        [found, *isa.flags, "-x", "c++", "-fsyntax-only", "-"],
        input=isa.probe,
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        pytest.skip(f"this g++ does not know AMX: {probe.stderr.strip()[:200]}")
    return [found, *COMMON, *isa.flags, "-Wall", "-Wextra", "-Wno-psabi"]


def judge(program: Path) -> None:
    lines = run([str(program)]).splitlines()
    assert len(lines) >= 3 and all(": ok, " in line for line in lines), lines


def test_tile_instructions_and_micro_kernel_equal_loops(
    compiler: list[str], tmp_path: Path
) -> None:
    program = tmp_path / "tiles"
    run([*compiler, str(PROGRAMS / "tiles.cpp"), "-o", str(program)])
    judge(program)


@pytest.mark.slow
@pytest.mark.parametrize("op", ("attention", "feed_forward", "cross_entropy"))
def test_ops_run_on_software_tiles(op: str, compiler: list[str], tmp_path: Path) -> None:
    program = tmp_path / op
    sources = [
        PROGRAMS / f"{op}.cpp",
        CSRC / "cpu" / op / "kernels.cpp",
        CSRC / "cpu" / "core" / "arena.cpp",
    ]
    run([*compiler, *SANITIZED, *map(str, sources), "-o", str(program)])
    judge(program)


PLAN = """
import sys
sys.path.insert(0, sys.argv[1])
import native_build
plan = native_build.make_plan("0")
info = plan.build_info()["cpu"]["tiles_in_software"]
print("-DPT_TILES_IN_SOFTWARE" in plan.flags, plan.directory.name, info)
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "False native-release False"),
        ({"PYTRANSFORMER_SOFTWARE_TILES": "1"}, "True native-release-software-tiles True"),
        (
            {"PYTRANSFORMER_SOFTWARE_TILES": "1", "PYTRANSFORMER_MANYLINUX": "2_28"},
            "for tests here",
        ),
    ],
)
def test_software_tiles_are_opt_in_and_in_no_wheel(options: dict[str, str], told: str) -> None:
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTRANSFORMER_", "DEBUG"))
    }
    environment = (
        others | {"PYTRANSFORMER_CUDA": "0", "PYTRANSFORMER_CPU_ISAS": "generic"} | options
    )
    done = subprocess.run(
        [sys.executable, "-c", PLAN, str(CSRC)], env=environment, capture_output=True, text=True
    )
    assert told in done.stdout + done.stderr
    assert done.returncode == ("MANYLINUX" in "".join(options)), done.stderr


@pytest.mark.parametrize(
    ("software", "told"), [(False, "amx_bf16"), (True, f"amx_bf16, {machine.SOFTWARE_TILES}")]
)
def test_results_record_software_tiles(
    software: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = SimpleNamespace(
        default_isa=lambda: "amx_bf16", build_info=lambda: {"cpu": {"tiles_in_software": software}}
    )
    monkeypatch.setattr(machine, "introspection", lambda: (built, None))
    assert machine.active_isa() == told
