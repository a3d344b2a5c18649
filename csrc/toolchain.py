# SPDX-License-Identifier: Apache-2.0
"""Find torch, a C++ compiler and ninja, and list the CPU kernels' instruction sets."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MIN_TORCH = (2, 11)


class BuildError(RuntimeError):
    """A requested part cannot be built; the message gives the reason and a fix."""


@dataclass(frozen=True)
class Isa:
    """An instruction set of the CPU kernels. csrc/cpu/core/isa.cpp has its run-time test."""

    name: str
    machines: tuple[str, ...] = ()  # values of platform.machine(); empty: any
    flags: tuple[str, ...] = ()
    probe: str = "int main() { return 0; }"  # must compile with the flags


AVX2 = tuple("-mavx2 -mfma -mf16c -mbmi2".split())
AVX512 = (*AVX2, *"-mavx512f -mavx512bw -mavx512vl -mavx512dq".split())
AVX512_BF16 = (*AVX512, "-mavx512bf16")
ISAS = (  # best first
    Isa(
        "amx_bf16",
        ("x86_64",),
        (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
        "#include <immintrin.h>\nvoid f() { _tile_dpbf16ps(0, 1, 2); }\n",
    ),
    Isa(
        "avx512_bf16",
        ("x86_64",),
        AVX512_BF16,
        "#include <immintrin.h>\n__m512 f(__m512 s, __m512bh a, __m512bh b) { return"
        " _mm512_dpbf16_ps(s, a, b); }\n",
    ),
    Isa(
        "avx512",
        ("x86_64",),
        AVX512,
        "#include <immintrin.h>\n__m512 f(__m512 a) { return _mm512_andnot_ps(a, a); }\n",
    ),
    Isa(
        "avx2",
        ("x86_64",),
        AVX2,
        "#include <immintrin.h>\n__m256 f(__m128i a) { return _mm256_cvtph_ps(a); }\n",
    ),
    Isa("generic"),
)


def switch(name: str) -> str:
    value = os.environ.get(name, "auto").strip().lower() or "auto"
    if value not in ("auto", "0", "1"):
        raise BuildError(f"{name} is {value!r}; expected auto, 0 or 1")
    return value


@functools.cache
def find_torch() -> Path | None:
    """Return the torch package's directory without importing torch.

    In pip's build isolation this interpreter does not see the environment's packages, but a child
    without the variables that isolation sets does, .pth files included. For tools that isolate by
    another interpreter (``build``, uv), VIRTUAL_ENV names the activated environment.
    PYTRANSFORMER_TORCH covers the rest.
    """
    if given := os.environ.get("PYTRANSFORMER_TORCH"):
        if not (Path(given) / "version.py").is_file():
            raise BuildError(
                f"PYTRANSFORMER_TORCH is {given!r}, which contains no torch package (no version.py"
                " there)"
            )
        return Path(given).resolve()
    spec = importlib.util.find_spec("torch")
    if spec and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    interpreters = [
        sys.executable,
        os.path.join(os.environ.get("VIRTUAL_ENV", sys.prefix), "bin", "python"),
    ]
    environment = {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
    }
    ask = (
        "import importlib.util as u; s = u.find_spec('torch');"
        " print(next(iter(s.submodule_search_locations)) if s else '')"
    )
    for interpreter in dict.fromkeys(filter(os.path.exists, interpreters)):
        answer = subprocess.run(
            [interpreter, "-c", ask], env=environment, cwd=os.sep, capture_output=True, text=True
        )
        if answer.returncode == 0 and answer.stdout.strip():
            return Path(answer.stdout.strip())
    return None


def torch_version(torch: Path) -> str:
    match = re.search(
        r"^__version__\s*=\s*'([^']+)'", (torch / "version.py").read_text(), re.MULTILINE
    )
    return match.group(1) if match else "unknown"


def why_not_torch(torch: Path | None) -> str | None:
    wanted = ".".join(map(str, MIN_TORCH))
    if torch is None:
        return f"torch >= {wanted} was not found: install it first, then install this package again"
    numbers = re.match(r"(\d+)\.(\d+)", torch_version(torch))
    if numbers is None or tuple(map(int, numbers.groups())) < MIN_TORCH:
        return f"torch {torch_version(torch)} at {torch} is too old: expected >= {wanted}"
    for part in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
        if not (torch / part).exists():
            return f"torch at {torch} has no {part}"
    return None


def find_compiler() -> list[str] | None:
    """Return the C++ compiler's command: CXX if set, else the first of g++, clang++ and c++.

    CXX is returned even if it does not work.
    """
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(
        ([path] for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None
    )


def compiles(compiler: list[str], flags: list[str], source: str, directory: Path) -> str | None:
    """Return None if `source` compiles with `flags`, else the reason in one line."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [*compiler, *flags, "-x", "c++", "-", "-o", str(directory / f"probe-{os.getpid()}")]
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True)
    except OSError as error:
        return f"{compiler[0]} cannot be run: {error.strerror}"
    finally:
        (directory / f"probe-{os.getpid()}").unlink(missing_ok=True)
    if done.returncode == 0:
        return None
    lines = (
        [line for line in done.stderr.splitlines() if "error" in line]
        or done.stderr.splitlines()
        or ["no message"]
    )
    return f"{compiler[0]} cannot compile a test program: {lines[0].strip()}"


def find_ninja() -> str | None:
    if spec := importlib.util.find_spec("ninja"):  # importable packages may lack a script on PATH
        import ninja

        candidate = Path(ninja.BIN_DIR) / "ninja"
        if spec and candidate.is_file():
            return str(candidate)
    return shutil.which("ninja")
