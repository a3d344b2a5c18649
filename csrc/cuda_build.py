# SPDX-License-Identifier: Apache-2.0
"""Build the CUDA part: find nvcc, choose architectures, provide ninja rules to native_build.

    python csrc/cuda_build.py OBJECT LOG COMMAND...    ninja's command for each source

The command compiles a source and refuses an object that ptxas reports on: ptxas mentions spills,
local memory and serialized wgmma instructions only as remarks, and here they are errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parent
LIBRARY = "libpytransformer_cuda.so"
# ptxas 12.8 serializes the sm_90a wgmmas; 12.8 and 12.9 crash on sm90/bwd_fused.cu
MIN_NVCC = (13, 0)
# sm_90a kernels use instructions that only Hopper has. The oldest other architecture is also added
# as PTX, for GPUs newer than these.
ARCHS = ("sm_80", "sm_90a", "sm_120")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-lineinfo",
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
    "--compress-mode=size",  # a sixth of the bytes (mostly line info), 29 % more compile time
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
]

# C7510 to C7519: ptxas serialized a wgmma, or added waits and fences to complete it.
REFUSED = re.compile(r"\bC75\d\d\b|serializ|[1-9]\d* bytes (?:spill|stack frame)")


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidate = os.path.join(home, "bin", "nvcc") if home else None
    return candidate if candidate and os.path.exists(candidate) else shutil.which("nvcc")


def nvcc_version(nvcc: str) -> str | None:
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    match = re.search(r"\bV(\d+\.\d+\.\d+)", told)
    return match[1] if match else None


def sources() -> list[Path]:
    """Return the CUDA sources, slowest first, because a build with many cores waits for them."""
    return sorted(CSRC.glob("cuda/**/*.cu"), key=lambda path: (path.parent.name != "sm90", path))


def archs() -> list[str]:
    """Return the architectures to build for (PYTRANSFORMER_CUDA_ARCHS, see native_build).

    Raises:
        ValueError: the variable names an unknown architecture.
    """
    wanted = os.environ.get("PYTRANSFORMER_CUDA_ARCHS", "native").strip() or "native"
    if wanted == "all":
        return list(ARCHS)
    if wanted == "native":
        return native_archs()
    names = [name.strip() for name in wanted.split(",")]
    if wrong := [name for name in names if not re.fullmatch(r"sm_\d{2,3}[af]?", name)]:
        raise ValueError(
            f"PYTRANSFORMER_CUDA_ARCHS names {', '.join(wrong)}; expected all, native or names such"
            f" as {', '.join(ARCHS)}"
        )
    return names


def native_archs() -> list[str]:
    """Return the architectures of the machine's GPUs, as nvidia-smi lists them."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = subprocess.run(
        [tool, "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True
    )
    found = sorted(
        {
            line.strip().replace(".", "")
            for line in done.stdout.splitlines()
            if re.fullmatch(r"\s*\d+\.\d\s*", line)
        }
    )
    return [f"sm_{number}{'a' if number == '90' else ''}" for number in found]


def why_not() -> str | None:
    """Return None if nvcc can build the kernels here, else the reason."""
    if not sources():
        return "this version has no CUDA kernels yet"
    nvcc = find_nvcc()
    if nvcc is None:
        return "nvcc was not found: put it on PATH or set CUDA_HOME"
    version = nvcc_version(nvcc)
    if version is None:
        return f"{nvcc} does not print its version"
    if tuple(map(int, version.split(".")[:2])) < MIN_NVCC:
        wanted = ".".join(map(str, MIN_NVCC))
        return (
            f"nvcc {version} is too old: expected >= {wanted}, those before fail on the kernels for"
            " sm_90a"
        )
    if not archs():
        return (
            "nvidia-smi shows no GPU to build for; PYTRANSFORMER_CUDA_ARCHS names architectures,"
            " or all"
        )
    return None


def flags(source: Path) -> list[str]:
    """Return a source's nvcc flags.

    Sources in sm90 folders compile for sm_90a only and are empty without it.
    """
    hopper = "sm_90a" in archs()
    only = ("sm_90a",) if hopper and source.parent.name == "sm90" else None
    return [*FLAGS, *(["-DPT_BUILT_SM90A"] if hopper else []), *gencode(only)]


def gencode(only: Sequence[str] | None = None) -> list[str]:
    """Return nvcc's options for the built architectures, or for ``only`` these."""
    names, flags = only or archs(), []
    portable = min(
        (name for name in names if name[-1].isdigit()), key=lambda name: int(name[3:]), default=None
    )
    for name in names:
        number = name.removeprefix("sm_")
        codes = [name, f"compute_{number}"] if name == portable else [name]
        flags.append(f"-gencode=arch=compute_{number},code=[{','.join(codes)}]")
    return flags


def compile_checked(output: Path, log: Path, command: list[str]) -> int:
    """Run nvcc and write its messages to the log.

    A refused message removes the object, and the function returns 1.

    With PYTRANSFORMER_CUDA_SPILLS=1 a refused message is only printed, because another nvcc version
    may cause some.
    """
    output.unlink(missing_ok=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(done.stdout)
    found = (
        []
        if done.returncode
        else [line for line in done.stdout.splitlines() if REFUSED.search(line)]
    )
    suffered = os.environ.get("PYTRANSFORMER_CUDA_SPILLS") == "1"
    if done.returncode or found:
        print(done.stdout if done.returncode else "refused:\n" + "\n".join(found), file=sys.stderr)
    failed = done.returncode or int(bool(found) and not suffered)
    if failed:
        output.unlink(missing_ok=True)
    return failed


def failure(directory: Path) -> str | None:
    """Return the last nvcc step that failed in a build directory with its first error, or None.

    A failed step has a log and no output.
    """
    failed = [log for log in directory.rglob("*.log") if not log.with_suffix("").exists()]
    if not failed:
        return None
    log = max(failed, key=lambda path: path.stat().st_mtime)
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if re.search(r"\b(error|fatal|died|core dumped)\b", line, re.IGNORECASE)
        or REFUSED.search(line)
    ]
    name = log.relative_to(directory).as_posix().removesuffix(".log").removesuffix(".o")
    version = nvcc_version(find_nvcc() or "")
    return f"nvcc {version} fails on {name}: {(telling or lines[-1:] or ['no message'])[0]}"


if __name__ == "__main__":
    sys.exit(compile_checked(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
