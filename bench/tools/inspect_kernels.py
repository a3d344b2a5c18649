# SPDX-License-Identifier: Apache-2.0
"""Print the resources of the GPU kernels, without a GPU.

    python bench/tools/inspect_kernels.py                                     # make inspect
    python bench/tools/inspect_kernels.py --op attention --arch 90 --only "causal D128"
    python bench/tools/inspect_kernels.py --table          # the committed tables, no compilation

The resources are registers, spills, shared memory, matrix instructions and instructions. The tool
uses the code of the tests for tests/triton/resources.json and tests/cuda/resources.json. It
compiles Triton kernels ahead of time like their launchers, and reads CUDA kernels from the built
library for its architectures. It also checks the SASS for sm_90a (tests/cuda/sass.py): no register
of a wgmma may be accessed while the wgmma is in flight. The exit code is 1 if one is.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytransformer  # noqa: F401  # declares the ops
from pytransformer.console import Console
from pytransformer.ops._core.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("triton", "cuda")
FAMILIES = tuple(dict.fromkeys(op.family for op in OPS.values()))
COLUMNS = ("registers", "stack", "shared", "products", "wide", "narrow", "instructions")
Rows = Iterator[tuple[str, str, dict[str, int]]]  # architecture, kernel, its resources


@functools.cache
def machinery(backend: str) -> ModuleType:
    """Return the module tests/<backend>/resources.py."""
    path = ROOT / "tests" / backend / "resources.py"
    spec = importlib.util.spec_from_file_location(f"{backend}_resources", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def family_of(kernel: str) -> str:
    """Return the family of a kernel or of its problem, by name.

    Attention's kernels have names of masks; matmul kernels belong to the family they were written
    for.
    """
    words = {
        family: (family, *(name for name, op in OPS.items() if op.family == family))
        for family in FAMILIES
    }
    found = next(
        (family for family in FAMILIES if any(word in kernel for word in words[family])), None
    )
    return found or ("feed_forward" if "matmul" in kernel else "attention")


def wanted(arch: str, kernel: str, options: argparse.Namespace) -> bool:
    digits = arch.removeprefix("sm_").rstrip("abcdef")
    return (
        (options.op is None or family_of(kernel) == options.op)
        and (not options.arch or digits in options.arch)
        and options.only in kernel
    )


def committed(backend: str, options: argparse.Namespace) -> Rows:
    table = json.loads((ROOT / "tests" / backend / "resources.json").read_text())["kernels"]
    for key, used in table.items():
        arch, _, kernel = key.partition(" ")
        if wanted(arch, kernel, options):
            yield arch, kernel, used


def compiled_triton(options: argparse.Namespace) -> Rows:
    module = machinery("triton")
    for capability in map(int, options.arch or ["90"]):
        for name, run, kernels in module.problems():
            if not wanted(f"sm_{capability}", name, options):
                continue
            for kernel, binary in module.compiled(capability, run, kernels):
                yield f"sm_{capability}", f"{name} {kernel}", module.resources(binary)


def built_cuda(options: argparse.Namespace) -> Rows:
    module = machinery("cuda")
    if reason := module.why_not():
        raise SystemExit(f"cuda: {reason}")
    # In addition to the table's columns.
    module.COUNTED = {**module.COUNTED, "instructions": r"(?m)^\s*/\*[0-9a-f]{4,}\*/"}
    for key, used in module.measure().items():
        arch, _, kernel = key.partition(" ")
        if wanted(arch, kernel, options):
            yield arch, kernel, used


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=FAMILIES, help="one family (default all)")
    parser.add_argument(
        "--arch",
        nargs="*",
        default=[],
        metavar="N",
        help="80, 90, 100, 120 (default: Triton 90; CUDA what is built)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="kernels whose name, or whose problem's, holds this",
    )
    parser.add_argument("--backend", choices=BACKENDS, help="one of the backends (default both)")
    parser.add_argument(
        "--table", action="store_true", help="show the committed tables, compile nothing"
    )
    options = parser.parse_args()
    console, found, wrong = Console(), 0, 0
    for backend in [options.backend] if options.backend else BACKENDS:
        console.heading(backend)
        try:
            fresh = {"triton": compiled_triton, "cuda": built_cuda}[backend]
            rows = list(committed(backend, options) if options.table else fresh(options))
        except (SystemExit, ImportError) as reason:
            console.print(f"{reason}; --table shows what is committed")
            continue
        columns = [name for name in COLUMNS if any(name in used for _, _, used in rows)]
        cells = [
            [arch, kernel, *(used.get(name, "-") for name in columns)]
            for arch, kernel, used in rows
        ]
        console.table(("arch", "kernel", *columns), cells, right=columns)
        spilling = [f"{arch} {kernel}" for arch, kernel, used in rows if used["stack"]]
        console.print(
            f"{len(rows)} kernels, {len(spilling)} of them with a stack"
            f" (spills){': ' if spilling else ''}"
        )
        for name in spilling:
            console.print(f"  {name}")
        if backend == "cuda" and not options.table:
            hazards = machinery("cuda").hazards()
            console.print(
                f"{len(hazards)} hazards of products in flight and of"
                f" setmaxnreg{':' if hazards else ''}"
            )
            for hazard in hazards:
                console.print(f"  {hazard}")
            wrong += len(hazards)
        found += len(rows)
    return 0 if found and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
