# SPDX-License-Identifier: Apache-2.0
"""Build the release: the source distribution, and manylinux_2_28 wheels for all targets.

    python3 bench/tools/wheel.py [--archs sm_80,sm_90a] [--python python3.12 ...]      into dist/

Two wheels hold the same libraries. The one for every Python (py3-none) has only these; the one for
this Python adds the fast path of eager calls for its torch, and pip prefers it. Both are built in
this checkout, so a repeated run compiles only changes. `auditwheel repair` checks that they need
nothing newer than glibc 2.28 and libstdc++ 8 (csrc/manylinux.py ensures this) and sets the platform
tag.

Each wheel is then installed, without its dependencies, into a new environment of each named Python.
If that Python has torch, the wheel runs there: `pytransformer doctor`, and attention forward and
backward on the CPU backend.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = "2_28"
ARCHS = "sm_80,sm_90a,sm_100,sm_120"  # sm_80 as PTX too, for GPUs newer than these
# Loaded by torch first; never copied.
TORCH = ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so")
SMOKE = """
import sys, torch, pytransformer as pt
from pytransformer.testing import bounds
assert pt.__file__.startswith(sys.prefix), pt.__file__
q = torch.randn(2, 4, 64, 32, requires_grad=True)
with pt.use_backend(attention="cpu"):
    out = pt.attention(q, q, q, causal="top_left")
out.sum().backward()
expected = pt.reference.attention(q.detach(), q.detach(), q.detach(), causal="top_left")
assert bounds.agree(out, expected)
assert q.grad.isfinite().all()
print("attention, forward and backward: right")
"""


def say(text: str) -> None:
    print(f"wheel: {text}", flush=True)


def run(*command: object, **environment: str) -> None:
    words = [str(part) for part in command]
    kept = os.environ | {"PYTHONSAFEPATH": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment
    if subprocess.run(words, cwd=ROOT, env=kept).returncode:
        sys.exit(f"wheel: failed: {' '.join(words)}")


def source_distribution(out: Path) -> Path:
    run(sys.executable, "setup.py", "-q", "sdist", "-d", out, PYTRANSFORMER_CPU="0")
    return next(out.glob("*.tar.gz"))


def wheels(raw: Path, out: Path, archs: str, isas: str) -> Iterator[Path]:
    """Yield the wheel for every Python, then the one for this Python."""
    options = {
        "CPU": "1",
        "CPU_ISAS": isas,
        "CUDA": "1" if archs else "0",
        "CUDA_ARCHS": archs,
        "MANYLINUX": PLATFORM,
    }
    for bindings in ("0", "1"):
        start, folder = time.monotonic(), raw / bindings
        optional = {"BINDINGS": bindings, "FAST_PATH": bindings}
        environment = {
            f"PYTRANSFORMER_{name}": value for name, value in (options | optional).items()
        }
        say(
            "building the wheel for"
            f" {'this Python, with the C++ fast path' if bindings == '1' else 'every Python'}"
        )
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
            ".",
            **environment,
        )
        (built,) = folder.glob("*.whl")
        excluded = [part for name in TORCH for part in ("--exclude", name)]
        platform = ("--plat", f"manylinux_{PLATFORM}_x86_64", "--only-plat")
        run(
            sys.executable,
            "-m",
            "auditwheel",
            "repair",
            *platform,
            *excluded,
            "-w",
            folder / "repaired",
            built,
        )
        (repaired,) = (folder / "repaired").glob("*.whl")
        done = Path(shutil.copy2(repaired, out / repaired.name))
        say(f"{done.name}: {done.stat().st_size / 2**20:.1f} MB, {time.monotonic() - start:.0f} s")
        yield done


def try_out(artifact: Path, python: str, folder: Path) -> None:
    """Install a wheel beside `python`'s torch in a new environment and run it there."""
    ask = (
        "import importlib.util as u; s = u.find_spec('torch');"
        " print(next(iter(s.submodule_search_locations)) if s else '')"
    )
    torch = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    run(python, "-m", "venv", "--clear", folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    ours = folder / "bin" / "python"
    run(ours, "-m", "pip", "install", "-q", "--no-deps", artifact)
    if not torch:
        say(f"{artifact.name} installs with {python}, which has no torch to run it with")
        return
    (site / "torch.pth").write_text(f"{Path(torch).parent}\n")
    for command in (("-c", SMOKE), ("-m", "pytransformer", "doctor")):
        run(ours, *command)
    say(f"{artifact.name} runs with {python}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--archs",
        default=ARCHS,
        help="GPU architectures; empty: no CUDA library (default: %(default)s)",
    )
    parser.add_argument(
        "--isas", default="all", help="instruction sets of CPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--python",
        nargs="*",
        default=[sys.executable],
        help="try the wheels with these (default: this one)",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder for the results (default: dist)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    raw = ROOT / "build" / "wheel"
    shutil.rmtree(raw, ignore_errors=True)
    say(f"{source_distribution(options.out)}")
    every, own = wheels(raw, options.out, options.archs, options.isas)
    for python in options.python:
        try_out(every, python, raw / "environment")
    try_out(own, sys.executable, raw / "environment")


if __name__ == "__main__":
    main()
