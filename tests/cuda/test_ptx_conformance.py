# SPDX-License-Identifier: Apache-2.0
"""Compare each PTX function in the emulator and on a GPU for random inputs.

This is the first step of any GPU run. The GPU machine uses the program in build/conformance if nvcc
built it in advance, or builds it:

    python tests/cuda/test_ptx_conformance.py            build it on any machine with nvcc
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pytransformer.cli import machine

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "conformance"
COMPILE = ("nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-I", ROOT / "csrc", "-x", "cu")
SEEDS = (1, 2, 3)
SECONDS = 30  # seconds per program
# ex2, lg2 and rcp.approx: the manual's bounds are 2 ulp, and an absolute 2^-22.6 if the logarithm
# is small.
APPROXIMATE = {"approximate": (2.0**-21, 2.0**-21)}
FLOATS = {
    "arithmetic": (0, 1, 2, 5, 6, 7, 8)
}  # the float32 columns of 10; a NaN's bits are undefined


def build(capability: tuple[int, int]) -> Path:
    """Return the program for GPUs of this compute capability; compile it if missing."""
    number = "{}{}".format(*capability)
    hopper = capability == (9, 0)
    program = DIRECTORY / f"conformance_sm_{number}"
    newest = max(
        path.stat().st_mtime
        for path in (*ROOT.glob("csrc/cuda/**/*.cuh"), *ROOT.glob("tests/cuda/conformance*"))
    )
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    if shutil.which("nvcc") is None:
        if program.exists():
            return program
        pytest.skip(f"there is no {program}, and no nvcc to build it")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    arch = f"-gencode=arch=compute_{number}{'a' * hopper},code=sm_{number}{'a' * hopper}"
    command = [
        *COMPILE,
        arch,
        *["-DPT_HOPPER"] * hopper,
        ROOT / "tests/cuda/conformance.cpp",
        "-o",
        program,
    ]
    subprocess.run(list(map(str, command)), check=True)
    return program


def emulated(name: str = "conformance", more: tuple[str, ...] = ()) -> Path:
    spec = importlib.util.spec_from_file_location(
        "emulator_build", ROOT / "csrc" / "emulator" / "build.py"
    )
    assert spec and spec.loader
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    if reason := builder.why_not():
        pytest.skip(f"the emulator cannot be built: {reason}")
    return builder.program(name, [ROOT / "tests" / "cuda" / "conformance.cpp"], more=more)


def words(program: Path, seed: int) -> dict[str, torch.Tensor]:
    """Return the program's output.

    On a failure or hang, raise an error that names the last case.
    """
    with subprocess.Popen(
        [program, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            output, complaint = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            output, complaint = running.communicate()
            complaint += f"it hangs: {SECONDS} s"
    reached = output.splitlines()[-1].split()[0] if output else "nothing"
    assert running.returncode == 0, f"after {reached}: {complaint}"
    lines = (line.split() for line in output.splitlines())
    return {
        name: torch.tensor([int(word, 16) for word in rest], dtype=torch.int64)
        for name, *rest in lines
    }


def differences(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], exact: bool = False
) -> list[str]:
    """Return the differences of two runs, one line per name; with `exact`, approximations too."""
    found = [f"{name}: only one of the two ran it" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if name in APPROXIMATE and not exact:
            relative, absolute = APPROXIMATE[name]
            x, y = (t.to(torch.uint32).view(torch.float32) for t in (a, b))
            wrong = ~torch.isclose(x, y, rtol=relative, atol=absolute, equal_nan=True)
        else:
            wrong = a != b
            for column in FLOATS.get(name, ()):
                both = [
                    t.view(-1, 10)[:, column].to(torch.uint32).view(torch.float32).isnan()
                    for t in (a, b)
                ]
                wrong.view(-1, 10)[:, column] &= ~(both[0] & both[1])
        if wrong.any():
            at = int(wrong.nonzero()[0])
            found.append(
                f"{name}: {int(wrong.sum())} of {len(a)} words differ, first word {at}: {a[at]:#x},"
                f" {b[at]:#x}"
            )
    return found


def test_comparison_detects_differences() -> None:
    """A wrong bit and a missing case count.

    NaN bits and the last bit of an approximation do not.
    """
    nan, one = 0x7FC00000, 0x3F800000
    ours = {
        "memory": torch.tensor([1, 2]),
        "arithmetic": torch.full((10,), nan),
        "approximate": torch.tensor([one, one]),
    }
    same = {
        **ours,
        "arithmetic": ours["arithmetic"] + (torch.arange(10) == 0) * 2**31,
        "approximate": torch.tensor([one, one + 1]),
    }
    assert differences(ours, same) == []
    assert (
        "first word 1: 0x2, 0x3" in differences(ours, {**ours, "memory": torch.tensor([1, 3])})[0]
    )
    assert (
        "1 of 2 words"
        in differences(ours, {**ours, "approximate": torch.tensor([one, one + 64])})[0]
    )
    assert (
        "only one"
        in differences(ours, {"memory": ours["memory"], "arithmetic": ours["arithmetic"]})[0]
    )


@pytest.mark.parametrize(
    "end, told", [("exec sleep 60", "it hangs"), ("echo lost >&2; exit 1", "lost")]
)
def test_failing_programs_report_their_progress(
    end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SECONDS", 1)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho memory 1 2\necho in:mbarrier 3\n{end}\n")
    program.chmod(0o755)
    with pytest.raises(AssertionError, match=f"after in:mbarrier: .*{told}"):
        words(program, 1)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or "fma" not in machine.cpu_features(),
    reason="needs a CPU with FMA3",
)
def test_contraction_changes_no_input() -> None:
    """nvcc fuses a product and a sum; g++ does so only with a flag.

    The choice must not affect the comparison or the inputs of the approximate functions.
    """
    contracted = words(emulated("contracted", ("-mfma", "-ffp-contract=fast")), 1)
    assert differences(words(emulated(), 1), contracted, exact=True) == []


def contractions(ptx: str) -> list[str]:
    """Return float instructions outside inline PTX that nvcc contracted or ptxas may.

    Each comes with its kernel.
    """
    found, kernel = [], ""
    for line in re.sub(
        r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL
    ).splitlines():
        kernel = m[1] if (m := re.search(r"\.entry (\w+)", line)) else kernel
        if re.search(r"\b(?:fma|mad|mul)(?:\.\w+)*\.f(?:16|32|64)", line):
            found.append(f"{kernel}: {line.strip()}")
    return found


def test_nvcc_contracts_nothing(tmp_path: Path) -> None:
    """All products of the program are explicit: only csrc/cuda/ptx has mul or fma."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc was not found")
    (tmp_path / "planted.cu").write_text(
        '#include "cuda/ptx/arithmetic.cuh"\n'
        "__global__ void planted(float* x) { x[0] = x[1] * x[2] + x[3]; }\n"
        "__global__ void fine(float* x) { x[0] = pt::ptx::fma_rn(x[1], x[2], x[3]); }\n"
    )
    for source, wrong in (
        (tmp_path / "planted.cu", ["planted"]),
        (ROOT / "tests/cuda/conformance.cpp", []),
    ):
        flags = [*COMPILE, "-DPT_HOPPER", "-arch=compute_90a", "-ptx", "-o", tmp_path / "out.ptx"]
        subprocess.run([*map(str, flags), source], check=True)
        found = contractions((tmp_path / "out.ptx").read_text())
        assert [re.sub(r"_Z7|Pf:.*", "", line) for line in found] == wrong


# They change nothing that a program could compare.
NOTHING_TO_SHOW = {"opaque", "grid_size", "fence_operand"}


def test_program_covers_every_ptx_function() -> None:
    """A kernel of conformance*.cuh calls each function of csrc/cuda/ptx, or csrc/cuda/tile does."""
    headers = "".join(path.read_text() for path in (ROOT / "csrc/cuda/ptx").glob("*.cuh"))
    functions = set(re.findall(r"PT_DEVICE (?:constexpr )?\w+ (\w+)\(", headers)) - NOTHING_TO_SHOW
    users = [
        *ROOT.glob("tests/cuda/conformance*.cuh"),
        *(ROOT / "csrc/cuda/tile" / f"{n}.cuh" for n in ("block_counter", "ring", "warpgroup")),
    ]
    called = set(re.findall(r"ptx::(\w+)[<(]", "".join(path.read_text() for path in users)))
    assert len(functions) > 50 and functions - called == set()


def test_program_compiles_for_hopper() -> None:
    """Without nvcc the test skips."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc was not found")
    assert build((9, 0)).exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("seed", SEEDS)
def test_emulator_and_gpu_agree(seed: int) -> None:
    capability = torch.cuda.get_device_capability()
    theirs = words(build(capability), seed)
    ours = words(emulated(), seed)
    if capability != (9, 0):
        ours = {name: value for name, value in ours.items() if name in theirs}
    found = differences(ours, theirs)
    assert not found, "\n".join(found)


if __name__ == "__main__":
    for text in sys.argv[1:] or ["9.0"]:
        print(build(tuple(map(int, text.split(".")))))  # type: ignore[arg-type]
