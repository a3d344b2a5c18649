# SPDX-License-Identifier: Apache-2.0
"""Compile the native libraries with ninja.

The module is independent of setuptools: setup.py makes a plan and runs it.

Everything is built inside the package:

- ``libpytransformer_cpu.so``: the CPU ops. Plain C++ against LibTorch's stable ABI (target 2.11)
  without Python, so one build serves every Python and every torch >= 2.11.
  ``torch.ops.load_library`` loads it.
- ``libpytransformer_cuda.so``: the CUDA ops, if nvcc exists; loads without a GPU. See
  cuda_build.py.
- ``_fast_path``: eager calls without Python, for this Python and torch only; see
  fast_path_build.py.
- ``_C``: a pybind11 module for this Python with build information and CPU features. It is optional.
- ``_build_info.json``: the parts built and the reasons for the rest; a pure Python install has it
  too.

Options come from the environment:

=============================  =====================================================================
PYTRANSFORMER_CPU              auto (default) | 1: fail if the CPU library cannot be built | 0: skip
PYTRANSFORMER_CPU_ISAS         native (default): the best set this CPU runs | all | comma-separated
                               names; generic is always built
PYTRANSFORMER_CUDA             auto (default): skip if nvcc fails | 1: fail if nvcc fails | 0: skip
PYTRANSFORMER_CUDA_ARCHS       native (default): this machine's GPUs | all: sm_80, sm_90a, sm_120 |
                               comma-separated names
PYTRANSFORMER_CUDA_SPILLS      1: accept kernels with spilled registers or serialized wgmmas, which
                               are errors by default
PYTRANSFORMER_FAST_PATH        auto (default): skip if it does not compile | 1: fail instead |
                               0: skip
PYTRANSFORMER_BINDINGS         1 (default) | 0: skip ``_C`` and ``_fast_path``; one wheel
                               then serves every Python
PYTRANSFORMER_MANYLINUX        2_28: link for that glibc and its libstdc++; see manylinux.py
PYTRANSFORMER_TORCH            torch package directory to build against (default: this Python's)
PYTRANSFORMER_BUILD_SANITIZE   address,undefined | thread | ...: passed to -fsanitize, in a separate
                               build directory
PYTRANSFORMER_SOFTWARE_TILES   1: amx_bf16 with its tiles in plain C++, for tests on CPUs
                               without AMX; never in a wheel
DEBUG                          1: -O1 -g instead of -O3
CXX, CXXFLAGS, LDFLAGS         as usual; MAX_JOBS: parallel compile jobs (default: one per core)
=============================  =====================================================================
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import cuda_build
import fast_path_build
import interface
import manylinux
from ninja_file import NinjaFile
from toolchain import (
    ISAS,
    BuildError,
    Isa,
    compiles,
    find_compiler,
    find_ninja,
    find_torch,
    switch,
    torch_version,
    why_not_torch,
)

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
CPU_LIBRARY = "libpytransformer_cpu.so"
BUILD_INFO = "_build_info.json"

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Kernels never read errno, and a square root that may set it is a call. The psABI note concerns
# 64-byte vectors passed between functions with different flags; each instruction set has a
# namespace, so no such call exists.
KERNEL_FLAGS = ["-fno-math-errno", "-Wno-psabi"]
STABLE_ABI_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL"]


@dataclass
class Plan:
    """The parts to build here, with a reason for each part left out."""

    version: str
    directory: Path
    compiler: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    link_flags: list[str] = field(default_factory=list)
    torch: Path | None = None
    isas: list[Isa] = field(default_factory=list)
    why_not_cpu: str | None = None
    why_not_bindings: str | None = None
    why_not_cuda: str | None = None
    why_not_fast_path: str | None = None
    why_not_isa: dict[str, str] = field(default_factory=dict)
    tiles_in_software: bool = False
    # architectures and nvcc version of the CUDA library
    cuda: dict[str, object] = field(default_factory=dict)

    @property
    def native(self) -> bool:
        return self.why_not_cpu is None

    @property
    def bindings(self) -> str:
        """Return the file name of the `_C` module for this Python."""
        return "_C" + sysconfig.get_config_var("EXT_SUFFIX")

    def targets(self) -> list[str]:
        """Return the file names, inside the package, of the libraries to build."""
        if not self.native:
            return []
        optional = (
            (cuda_build.LIBRARY, self.why_not_cuda),
            (fast_path_build.MODULE, self.why_not_fast_path),
            (self.bindings, self.why_not_bindings),
        )
        return [CPU_LIBRARY, *(name for name, why_not in optional if why_not is None)]

    def build_info(self) -> dict[str, object]:
        def tool(command: list[str]) -> str | None:
            return (
                subprocess.run(
                    [*command, "--version"], capture_output=True, text=True
                ).stdout.partition("\n")[0]
                or None
            )

        return {
            "version": self.version,
            "sources": interface.compiled(),
            "cuda_sources": interface.cuda_sources(),
            "platform": sysconfig.get_platform(),
            "manylinux": _platform(),
            "cpu": {
                "built": self.native,
                "reason": self.why_not_cpu,
                "isas": [isa.name for isa in self.isas],
            }
            | {"isas_not_built": self.why_not_isa, "tiles_in_software": self.tiles_in_software},
            "cuda": {"built": self.why_not_cuda is None, "reason": self.why_not_cuda} | self.cuda,
            "fast_path": (
                {"built": self.why_not_fast_path is None, "reason": self.why_not_fast_path}
                | (
                    fast_path_build.stamp(self.torch)
                    if self.torch and self.why_not_fast_path is None
                    else {}
                )
            ),
            "bindings": {
                "built": self.native and self.why_not_bindings is None,
                "reason": self.why_not_bindings,
            },
            "compiler": tool(self.compiler) if self.native else None,
            "flags": self.flags if self.native else [],
            "torch": torch_version(self.torch) if self.native and self.torch else None,
        }


def _platform() -> str | None:
    try:
        return manylinux.platform()
    except ValueError as error:
        raise BuildError(str(error)) from None


def _tiles_in_software() -> list[str]:
    """Return the flag of csrc/cpu/core/tiles_in_software.h if requested.

    No published build may have it.
    """
    if switch("PYTRANSFORMER_SOFTWARE_TILES") != "1":
        return []
    if _platform():
        raise BuildError(
            "PYTRANSFORMER_SOFTWARE_TILES=1 is for tests here, and PYTRANSFORMER_MANYLINUX is set:"
            " unset one"
        )
    return ["-DPT_TILES_IN_SOFTWARE"]


def _why_not_cuda(plan: Plan) -> str | None:
    if switch("PYTRANSFORMER_CUDA") == "0":
        return "switched off by PYTRANSFORMER_CUDA=0"
    try:
        return cuda_build.why_not() or (
            plan.why_not_cpu and f"no native code is built: {plan.why_not_cpu}"
        )
    except ValueError as error:
        raise BuildError(str(error)) from None


def _why_not_fast_path(plan: Plan, sanitize: str) -> str | None:
    for option in ("PYTRANSFORMER_FAST_PATH", "PYTRANSFORMER_BINDINGS"):
        if switch(option) == "0":
            return f"switched off by {option}=0"
    if plan.torch is None or sanitize:
        return (
            f"no native code is built: {plan.why_not_cpu}"
            if plan.torch is None
            else "a build with sanitizers leaves it out"
        )
    return fast_path_build.why_not(plan.torch)


def _why_not_cpu(plan: Plan, compiler: list[str] | None) -> str | None:
    if switch("PYTRANSFORMER_CPU") == "0":
        return "switched off by PYTRANSFORMER_CPU=0"
    if not sys.platform.startswith("linux"):
        return f"native code is built on Linux only, and this is {sys.platform}"
    if compiler is None:
        return "no C++ compiler was found: install g++ or clang++, or set CXX"
    link = [*plan.flags, *plan.link_flags, "-shared"]
    if why_not := compiles(
        compiler, link, "#include <string>\nstd::string f() { return {}; }\n", plan.directory
    ):
        return why_not
    if find_ninja() is None:
        return "ninja was not found: pip install ninja"
    return why_not_torch(find_torch())


def _choose_isas(plan: Plan) -> None:
    """Fill in the plan's instruction sets.

    Generic is always built, because other kernels may call it.
    """
    wanted = os.environ.get("PYTRANSFORMER_CPU_ISAS", "native")
    names = (
        [isa.name for isa in ISAS]
        if wanted in ("all", "native")
        else [*wanted.split(","), "generic"]
    )
    if unknown := set(names) - {isa.name for isa in ISAS}:
        known = ", ".join(isa.name for isa in ISAS)
        raise BuildError(
            f"PYTRANSFORMER_CPU_ISAS names {', '.join(sorted(unknown))}; expected all, native or"
            f" some of {known}"
        )
    for isa in ISAS:
        why_not = None if isa.name in names else f"not in PYTRANSFORMER_CPU_ISAS={wanted}"
        if isa.machines and platform.machine() not in isa.machines:
            why_not = f"for {' or '.join(isa.machines)}, and this is {platform.machine()}"
        why_not = why_not or compiles(
            plan.compiler, [*plan.flags, *isa.flags, "-c"], isa.probe, plan.directory
        )
        if why_not is None:
            plan.isas.append(isa)
        elif isa.name in names and wanted not in ("all", "native"):
            raise BuildError(
                f"PYTRANSFORMER_CPU_ISAS={wanted}, but {isa.name} cannot be built: {why_not}"
            )
        else:
            plan.why_not_isa[isa.name] = why_not
    if wanted == "native":
        best = _usable(plan)[0]
        for isa in [isa for isa in plan.isas if isa.name not in (best, "generic")]:
            plan.isas.remove(isa)
            plan.why_not_isa[isa.name] = (
                f"PYTRANSFORMER_CPU_ISAS=native, and the best here is {best}"
            )


def _usable(plan: Plan) -> list[str]:
    """Return the plan's instruction sets that this CPU runs, best first, by the library's test."""
    program = plan.directory / f"usable-{os.getpid()}"
    main = (
        '#include <cstdio>\n#include "cpu/core/isa.h"\nint main() {\n  for (pt::Isa isa :'
        " pt::built_isas())\n"
    )
    main += "    if (pt::runs_here(isa)) std::puts(pt::isa_name(isa));\n}\n"
    sources = ["-I", str(CSRC), str(CSRC / "cpu" / "core" / "isa.cpp"), "-x", "c++", "-"]
    command = [*plan.compiler, *plan.flags, _isa_macro(plan), *sources]
    try:
        subprocess.run([*command, "-o", str(program)], input=main, text=True, check=True)
        return subprocess.run(
            [str(program)], capture_output=True, text=True, check=True
        ).stdout.split()
    finally:
        program.unlink(missing_ok=True)


def _isa_macro(plan: Plan) -> str:
    return "-DPT_FOR_EACH_ISA(X,A)=" + " ".join(f"X({isa.name},A)" for isa in plan.isas)


def make_plan(version: str) -> Plan:
    """Plan the build from the environment and the machine; compile only one-line test programs.

    Raises:
        BuildError: an option has a bad value, or requires a part that cannot be built.
    """
    sanitize = os.environ.get("PYTRANSFORMER_BUILD_SANITIZE", "")
    debug = os.environ.get("DEBUG", "0") not in ("", "0")
    kind = (
        "-".join(filter(None, ["sanitize", *sanitize.split(",")]))
        if sanitize
        else "debug"
        if debug
        else "release"
    )
    tiles = _tiles_in_software()
    sanitizer = (
        [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
        if sanitize
        else []
    )
    optimise = ["-O1", "-g"] if debug or sanitize else ["-O3", "-DNDEBUG"]

    plan = Plan(
        version,
        ROOT / "build" / f"native-{kind}{'-software-tiles' if tiles else ''}",
        tiles_in_software=bool(tiles),
    )
    plan.flags = [
        *COMMON_FLAGS,
        *optimise,
        *sanitizer,
        *tiles,
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]
    plan.link_flags = [*sanitizer, *shlex.split(os.environ.get("LDFLAGS", ""))]
    compiler = find_compiler()
    plan.why_not_cpu = _why_not_cpu(plan, compiler)
    if plan.native:
        assert compiler is not None
        plan.compiler, plan.torch = compiler, find_torch()
        _choose_isas(plan)
    if switch("PYTRANSFORMER_BINDINGS") == "0":
        plan.why_not_bindings = "switched off by PYTRANSFORMER_BINDINGS=0"
    elif importlib.util.find_spec("pybind11") is None:
        plan.why_not_bindings = "pybind11 was not found: pip install pybind11"
    elif not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        plan.why_not_bindings = (
            f"Python.h is not in {sysconfig.get_paths()['include']}: install Python's headers"
        )
    plan.why_not_cuda = (
        _why_not_cuda(plan) or (sanitize and "a build with sanitizers leaves it out") or None
    )
    if plan.why_not_cuda is None:
        nvcc = cuda_build.find_nvcc()
        assert nvcc is not None
        plan.cuda = {"archs": cuda_build.archs(), "nvcc": cuda_build.nvcc_version(nvcc)}
    plan.why_not_fast_path = _why_not_fast_path(plan, sanitize)
    _platform()
    for part, why_not in (
        ("CPU", plan.why_not_cpu),
        ("CUDA", plan.why_not_cuda),
        ("FAST_PATH", plan.why_not_fast_path),
    ):
        _unless_wanted(part, why_not)
    return plan


def _unless_wanted(part: str, why_not: str | None) -> str | None:
    """Return the reason; raise if the part is required."""
    if why_not and switch(f"PYTRANSFORMER_{part}") == "1":
        raise BuildError(f"PYTRANSFORMER_{part}=1, but it cannot be built: {why_not}")
    return why_not


def write_if_changed(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def _ninja_text(plan: Plan) -> str:
    assert plan.torch is not None
    ninja = NinjaFile(CSRC, plan.compiler, plan.why_not_cuda is None)
    # base contains all kernel flags: adding an instruction set compiles only that set's kernels
    base = [*plan.flags, "-I", str(CSRC)]
    binding = [*base, _isa_macro(plan), *STABLE_ABI_FLAGS, "-isystem", str(plan.torch / "include")]
    objects = {}
    cuda: list[str] = []
    # Compile the CUDA kernels first, then the CPU kernels: they take longest, and the short
    # bindings then fill the cores at the end.
    if plan.why_not_cuda is None:
        cuda = [
            ninja.compile_cuda(name, source, [*cuda_build.flags(source), "-I", str(CSRC)])
            for name, source in cuda_build.sources(plan.directory / "generated").items()
        ]
    for source in sorted(
        [*CSRC.glob("cpu/**/*.cpp"), *CSRC.glob("common/*.cpp")],
        key=lambda p: (p.stem != "kernels", p),
    ):
        if source.stem == "kernels":
            for isa in plan.isas:
                flags = [*base, *KERNEL_FLAGS, *isa.flags, f"-DPT_ISA={isa.name}"]
                objects[source, isa.name] = ninja.compile(source, flags, isa.name)
        else:
            told = [f'-DPT_INTERFACE="{interface.digest()}"'] if source.stem == "library" else []
            objects[source, ""] = ninja.compile(source, [*binding, *told])
    # Make an undefined symbol a link error. A sanitizer's run-time library resolves only at load.
    defined = [] if "-fsanitize" in " ".join(plan.link_flags) else ["-Wl,-z,defs"]
    torch_libraries = ["-L", str(plan.torch / "lib"), "-ltorch_cpu"]
    ninja.link(
        CPU_LIBRARY,
        list(objects.values()),
        [*defined, "-Wl,--as-needed", *torch_libraries, *plan.link_flags],
    )
    if plan.why_not_cuda is None:
        cuda += [ninja.compile(source, binding) for source in sorted(CSRC.glob("cuda/**/*.cpp"))]
        # Hide the statically linked CUDA runtime: its symbols must not clash with torch's.
        hidden = ["-Xlinker=-z,defs,--exclude-libs,ALL,--as-needed"]
        ninja.link(
            cuda_build.LIBRARY,
            cuda,
            [*cuda_build.gencode(), *hidden, *torch_libraries],
            "nvcc_link",
        )
    tag = sysconfig.get_config_var("SOABI")
    if plan.why_not_fast_path is None:
        unit = ninja.compile(
            CSRC / fast_path_build.SOURCE,
            [*base, *fast_path_build.compile_flags(plan.torch)],
            tag,
            "fast_path",
        )
        ninja.link(
            fast_path_build.MODULE,
            [unit],
            [*fast_path_build.link_flags(plan.torch), *plan.link_flags],
            "fast_path_link",
        )
    if plan.why_not_bindings is None:
        import pybind11

        headers = (pybind11.get_include(), sysconfig.get_paths()["include"])
        includes = [
            *(option for path in headers for option in ("-isystem", path)),
            "-I",
            str(plan.directory),
        ]
        bindings = ninja.compile(CSRC / "bindings.cpp", [*base, _isa_macro(plan), *includes], tag)
        ninja.link(
            plan.bindings,
            [bindings, objects[CSRC / "cpu" / "core" / "isa.cpp", ""]],
            plan.link_flags,
        )
    return ninja.text()


def build(plan: Plan) -> dict[str, Path]:
    """Bring the libraries of `plan` up to date; return file name in the package -> file.

    Only changed sources compile. A failing CUDA or fast path build is left out, and the plan
    records the reason, unless the part's option is 1.
    """
    while plan.native and not _run_ninja(plan):
        if not _left_out(plan):
            raise BuildError(
                "the native code did not compile; see the output above. PYTRANSFORMER_CPU=0"
                " installs without it"
            )
        print(describe(plan), file=sys.stderr, flush=True)
    return {name: plan.directory / name for name in plan.targets()}


def _left_out(plan: Plan) -> bool:
    """Return whether the failed part is optional, and record the reason in the plan."""
    if plan.why_not_fast_path is None and (reason := fast_path_build.failure(plan.directory)):
        plan.why_not_fast_path = _unless_wanted("FAST_PATH", reason)
        return True
    if plan.why_not_cuda is None and (reason := cuda_build.failure(plan.directory)):
        plan.why_not_cuda, plan.cuda = _unless_wanted("CUDA", reason), {}
        return True
    return False


def _run_ninja(plan: Plan) -> bool:
    """Run ninja; return whether all of the plan's libraries are up to date."""
    info = json.dumps(plan.build_info(), indent=1)
    write_if_changed(
        plan.directory / "build_info.h", f'constexpr char kBuildInfo[] = R"json({info})json";\n'
    )
    if plan.why_not_cuda is None:
        for path, text in cuda_build.generated(plan.directory / "generated").items():
            write_if_changed(path, text)
    write_if_changed(plan.directory / "build.ninja", _ninja_text(plan))
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    return (
        subprocess.run(
            [find_ninja() or "ninja", "-C", str(plan.directory), "-j", jobs, *plan.targets()]
        ).returncode
        == 0
    )


def install(plan: Plan, files: dict[str, Path], package: Path) -> list[Path]:
    """Copy the built files and the build information into the package; return their paths.

    A library that another process has loaded is replaced, not overwritten.
    """
    package.mkdir(parents=True, exist_ok=True)
    for stale in (
        *package.glob("libpytransformer_*.so"),
        package / fast_path_build.MODULE,
        package / plan.bindings,
    ):
        if stale.name not in files:
            stale.unlink(missing_ok=True)
    for name, built in files.items():
        temporary = package / f"{name}.new"
        shutil.copy2(built, temporary)
        os.replace(temporary, package / name)
    info = plan.build_info()
    if package.resolve() == CSRC.parent / package.name:
        info["checkout"] = str(CSRC.parent)  # the package compares itself with the sources there
    (package / BUILD_INFO).write_text(json.dumps(info, indent=1) + "\n")
    return [package / name for name in (*files, BUILD_INFO)]


def describe(plan: Plan) -> str:
    """Return a readable summary of the parts built and left out, with reasons."""
    if plan.native:
        skipped = "".join(f"\n  not {name}: {why}" for name, why in plan.why_not_isa.items())
        lines = [
            f"CPU kernels: {', '.join(isa.name for isa in plan.isas)}, against torch"
            f" {torch_version(plan.torch)}{skipped}"
        ]
        lines += (
            ["the tiles of amx_bf16 are software: for tests, slow"]
            if plan.tiles_in_software
            else []
        )
        lines += (
            [f"C++ fast path of eager calls: not built: {plan.why_not_fast_path}"]
            if plan.why_not_fast_path
            else []
        )
        lines += (
            [f"_C (build information): not built: {plan.why_not_bindings}"]
            if plan.why_not_bindings
            else []
        )
    else:
        lines = [
            f"CPU KERNELS ARE NOT BUILT: {plan.why_not_cpu}",
            "The package is installed as pure Python: its reference backend works.",
        ]
    built = (
        f"CUDA kernels: for {', '.join(cuda_build.archs())}" if plan.why_not_cuda is None else ""
    )
    lines.append(built or f"CUDA kernels: not built: {plan.why_not_cuda}")
    return "\n".join(f"pytransformer: {line}" for line in lines)
