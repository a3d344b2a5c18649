# SPDX-License-Identifier: Apache-2.0
"""Build the emulator, which runs CUDA kernels on the CPU for tests; never part of a wheel.

    python csrc/emulator/build.py                      the library: raw ops on CPU tensors
    python csrc/emulator/build.py program SOURCE...    a test program against the emulator alone

Every kernel source is compiled as C++20 with -DPT_EMULATE. Ninja compiles only changed sources.
Tests pass faults: each replaces a text of a source in the compiled copy of the file (fault.h).
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

CSRC = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CSRC))
import native_build  # noqa: E402  (beside the sources, never installed)

DIRECTORY = CSRC.parent / "build" / "emulator"
LIBRARY = "libpytransformer_emulated.so"
FLAGS = [
    "-std=c++20",
    "-O2",
    "-g1",
    "-fPIC",
    "-fvisibility=hidden",
    "-DPT_EMULATE",
    "-Wall",
    "-Wextra",
]
FLAGS += [
    "-ffp-contract=off"
]  # g++'s default depends on the CPU; tests/cuda/test_ptx_conformance.py covers nvcc's contraction
HOST_ONLY = {"host.cpp", "library.cpp"}  # not needed by a program


def why_not() -> str | None:
    """Return None if the emulator can be built here, else the reason."""
    if native_build.find_compiler() is None:
        return "no C++ compiler was found: install g++, or set CXX"
    if native_build.find_ninja() is None:
        return "ninja was not found: pip install ninja"
    return None


class Replacement(Protocol):
    file: str  # below csrc/
    text: str  # occurs once in the file
    faulty: str  # same number of lines, so line numbers in the copy match the source


def copies(directory: Path, faults: Iterable[Replacement]) -> Path:
    """Write the faulty copies of the files into a folder that precedes csrc/ on the include path.

    Other copies there are removed.

    Raises:
        ValueError: a text does not occur exactly once, or its replacement has another number of
        lines.
    """
    folder, texts = directory / "csrc", dict[str, str]()
    for fault in faults:
        text = texts.setdefault(fault.file, (CSRC / fault.file).read_text())
        if text.count(fault.text) != 1 or fault.text.count("\n") != fault.faulty.count("\n"):
            raise ValueError(
                f"{fault.file}: {fault.text!r} is there {text.count(fault.text)} times, or is"
                " replaced by other lines"
            )
        texts[fault.file] = text.replace(fault.text, fault.faulty)
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    return folder


def library(
    directory: Path = DIRECTORY,
    family: str = "*",
    defines: Sequence[str] = (),
    faults: Iterable[Replacement] = (),
) -> Path:
    """Bring the emulated library up to date, with the ops of `family` only.

    `defines` select another variant of the kernels.

    Raises:
        RuntimeError: it does not compile; the message has the compiler's output.
    """
    torch = native_build.find_torch()
    if torch is None:
        raise RuntimeError("torch was not found")
    # without cuda/device.cu, which host.cpp replaces
    generated = native_build.cuda_build.generated(directory / "generated")
    for path, text in generated.items():
        native_build.write_if_changed(path, text)
    kernels = [
        *sorted(CSRC.glob(f"cuda/{family}/**/*.cu")),
        *(path for path in generated if path.match(f"cuda/{family}/*/*.cu")),
    ]
    bindings = [
        *CSRC.glob(f"cuda/{family}/*.cpp"),
        CSRC / "emulator" / "library.cpp",
        CSRC / "emulator" / "host.cpp",
    ]
    folder = copies(directory, faults)
    flags = [*FLAGS, *defines, "-include", "emulator/fault.h", "-I", str(folder), "-I", str(CSRC)]
    with_torch = [*flags, *native_build.STABLE_ABI_FLAGS, "-isystem", str(torch / "include")]
    link = ["-shared", "-Wl,-z,defs", "-Wl,--as-needed", "-L", str(torch / "lib"), "-ltorch_cpu"]

    def compiled(path: Path) -> Path:
        copy = folder / path.relative_to(CSRC) if path.is_relative_to(CSRC) else path
        return copy if copy.is_file() else path

    sources = [(compiled(path), flags) for path in kernels] + [
        (compiled(path), with_torch) for path in sorted(bindings)
    ]
    return _build(directory, LIBRARY, sources, link, [_emulator()])


def _object_name(source: Path) -> str:
    return f"{'_'.join(source.parts[-3:])}.o"  # several folders have an sm90/fwd.cu


def program(
    name: str, sources: list[Path], directory: Path = DIRECTORY, more: Sequence[str] = ()
) -> Path:
    """Bring a program of these sources, compiled with `more` flags, and the emulator up to date.

    Raises:
        RuntimeError: it does not compile; the message has the compiler's output.
    """
    flags = [*FLAGS, *more, "-I", str(CSRC)]
    return _build(directory, name, [(path.resolve(), flags) for path in sources], [], [_emulator()])


def _emulator() -> Path:
    """Build the emulator archive, which every library and program shares."""
    sources = [path for path in sorted(CSRC.glob("emulator/*.cpp")) if path.name not in HOST_ONLY]
    # -O3 here only: compiling the kernels is most of the build
    flags = [*FLAGS, "-O3", "-I", str(CSRC)]
    return _build(DIRECTORY, "libemulator.a", [(path, flags) for path in sources], [], [])


def _build(
    directory: Path,
    output: str,
    sources: list[tuple[Path, list[str]]],
    link: list[str],
    archives: list[Path],
) -> Path:
    if reason := why_not():
        raise RuntimeError(reason)
    compiler, ninja = native_build.find_compiler(), native_build.find_ninja()
    assert compiler and ninja
    quoted = " ".join(compiler)
    lines = [
        "ninja_required_version = 1.5",
        "rule cxx",
        f"  command = {quoted} $flags -MMD -MF $out.d -x c++ -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule link",
        f"  command = {quoted} $in $flags -o $out",
        "rule archive",
        "  command = rm -f $out && ar rcs $out $in",
    ]
    objects = []
    for path, flags in sources:
        objects.append(f"{output}.d/{_object_name(path)}")
        lines += [f"build {objects[-1]}: cxx {path}", f"  flags = {' '.join(flags)}"]
    rule = "archive" if output.endswith(".a") else "link"
    inputs = " ".join(map(str, (*objects, *archives)))
    lines += [f"build {output}: {rule} {inputs}", f"  flags = {' '.join(link)}", ""]
    directory.mkdir(parents=True, exist_ok=True)
    script = directory / f"{output}.ninja"
    text = "\n".join(lines)
    command = [ninja, "-C", str(directory), "-f", script.name, output]
    # test processes may build at once; the first one builds
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not script.is_file() or script.read_text() != text:
            script.write_text(text)
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{output} does not compile:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
        )
    return directory / output


if __name__ == "__main__":
    if sys.argv[1:2] == ["program"]:
        print(program(Path(sys.argv[2]).stem, [Path(name) for name in sys.argv[2:]]))
    else:
        print(library())
