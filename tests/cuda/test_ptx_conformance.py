"""Each PTX function in the emulator and on a GPU with equal random inputs: the first step of any GPU run.

On the GPU's machine the program comes from build/conformance, where it is if nvcc built it beforehand, or from nvcc there:

    python tests/cuda/test_ptx_conformance.py            builds it, on any machine with nvcc
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "conformance"
SEEDS = (1, 2, 3)
SECONDS = 30  # that a program may take
# ex2, lg2 and rcp.approx: the manual's bounds are 2 ulp, and an absolute 2^-22.6 where the logarithm is small.
APPROXIMATE = {"approximate": (2.0**-21, 2.0**-21)}
FLOATS = {"arithmetic": (0, 1, 2, 5, 6, 7, 8)}  # columns of 9 that are float32; a NaN's bits are not defined


def build(capability: tuple[int, int]) -> Path:
    """The program for GPUs of this compute capability, compiled unless it is there."""
    number = "{}{}".format(*capability)
    hopper = capability == (9, 0)
    program = DIRECTORY / f"conformance_sm_{number}"
    newest = max(path.stat().st_mtime for path in (*ROOT.glob("csrc/cuda/**/*.cuh"), *ROOT.glob("tests/cuda/conformance.*")))
    if program.exists() and program.stat().st_mtime >= newest:
        return program
    if shutil.which("nvcc") is None:
        if program.exists():
            return program
        pytest.skip(f"there is no {program}, and no nvcc to build it")
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    arch = f"-gencode=arch=compute_{number}{'a' * hopper},code=sm_{number}{'a' * hopper}"
    command = [
        "nvcc",
        "-std=c++17",
        arch,
        "--expt-relaxed-constexpr",
        "-I",
        ROOT / "csrc",
        "-x",
        "cu",
        *["-DPT_HOPPER"] * hopper,
    ]
    subprocess.run([*map(str, command), str(ROOT / "tests/cuda/conformance.cpp"), "-o", str(program)], check=True)
    return program


def emulated() -> Path:
    spec = importlib.util.spec_from_file_location("emulator_build", ROOT / "csrc" / "emulator" / "build.py")
    assert spec and spec.loader
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    return builder.program("conformance", [ROOT / "tests" / "cuda" / "conformance.cpp"])


def words(program: Path, seed: int) -> dict[str, torch.Tensor]:
    """What it prints; where it fails or hangs, an error that says after what."""
    with subprocess.Popen([program, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            said, complaint = running.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            said, complaint = running.communicate()
            complaint += f"it hangs: {SECONDS} s"
    reached = said.splitlines()[-1].split()[0] if said else "nothing"
    assert running.returncode == 0, f"after {reached}: {complaint}"
    lines = (line.split() for line in said.splitlines())
    return {name: torch.tensor([int(word, 16) for word in rest], dtype=torch.int64) for name, *rest in lines}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """What differs between two runs, a line for each name."""
    found = [f"{name}: only one of the two ran it" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        a, b = ours[name], theirs[name]
        if name in APPROXIMATE:
            relative, absolute = APPROXIMATE[name]
            x, y = (t.to(torch.uint32).view(torch.float32) for t in (a, b))
            wrong = ~torch.isclose(x, y, rtol=relative, atol=absolute, equal_nan=True)
        else:
            wrong = a != b
            for column in FLOATS.get(name, ()):
                both = [t.view(-1, 9)[:, column].to(torch.uint32).view(torch.float32).isnan() for t in (a, b)]
                wrong.view(-1, 9)[:, column] &= ~(both[0] & both[1])
        if wrong.any():
            at = int(wrong.nonzero()[0])
            found.append(f"{name}: {int(wrong.sum())} of {len(a)} words differ, first word {at}: {a[at]:#x}, {b[at]:#x}")
    return found


def test_the_comparison_finds_differences() -> None:
    """A wrong bit, a missing case; not the bits of a NaN or the last of an approximation."""
    nan, one = 0x7FC00000, 0x3F800000
    ours = {"memory": torch.tensor([1, 2]), "arithmetic": torch.full((9,), nan), "approximate": torch.tensor([one, one])}
    same = {
        **ours,
        "arithmetic": ours["arithmetic"] + (torch.arange(9) == 0) * 2**31,
        "approximate": torch.tensor([one, one + 1]),
    }
    assert differences(ours, same) == []
    assert "first word 1: 0x2, 0x3" in differences(ours, {**ours, "memory": torch.tensor([1, 3])})[0]
    assert "1 of 2 words" in differences(ours, {**ours, "approximate": torch.tensor([one, one + 64])})[0]
    assert "only one" in differences(ours, {"memory": ours["memory"], "arithmetic": ours["arithmetic"]})[0]


@pytest.mark.parametrize("end, told", [("exec sleep 60", "it hangs"), ("echo lost >&2; exit 1", "lost")])
def test_it_says_how_far_a_program_came(end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SECONDS", 1)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho memory 1 2\necho in:mbarrier 3\n{end}\n")
    program.chmod(0o755)
    with pytest.raises(AssertionError, match=f"after in:mbarrier: .*{told}"):
        words(program, 1)


def test_it_compiles_for_hopper() -> None:
    """What a GPU will run; without nvcc here, skipped."""
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
