# SPDX-License-Identifier: Apache-2.0
"""Profile the CPU's attention by phase on one instruction set.

    python bench/tools/attention_phases.py [--isa amx_bf16] [--rounds 7] [--out FILE.json]

It prints shares of the time, and rates beside a matrix product's; a run takes a minute. The kernels
of csrc/cpu/attention are compiled with PT_PHASES (csrc/cpu/core/phases.h) for one set and run with
the real schedule on torch's threads. A phase is the time of its statement, with the caches in the
state that earlier phases leave.

Each round multiplies 1024 x 1024 matrices on one thread, with torch and with our matmul; the faster
is the reference rate. It then runs each direction. The fastest round of every phase, call and
product counts. A sample interrupted by another process counts as the median sample. In the
backward, scores and dP share a loop and, if v is as wide as q, their cost, so they are one phase.

Results are first compared with the reference. "rest" is the time outside all phases (setup of
blocks), in processor time of one thread. With several threads it is left out, because it would
include other processes' work.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import pytransformer as pt
from pytransformer.cli import machine
from pytransformer.cli.benchmark import results
from pytransformer.ops._backends.cpu.linear import forward as own_product

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
# The order of csrc/cpu/core/phases.h.
PHASES = ("pack", "scores", "softmax", "output", "dv", "dk", "dq", "results")
DIRECTIONS = {  # phase: its products of length x length x dim
    "forward": {"pack": 0, "scores": 1, "softmax": 0, "output": 1, "results": 0},
    "backward": {"pack": 0, "scores": 2, "softmax": 0, "dv": 1, "dk": 1, "dq": 1, "results": 0},
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Call(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.c_void_p * 9),
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "length", "dim", "threads", "bf16", "backward")
        ),
    ]


def build(isa: str, more: list[str], folder: Path) -> ctypes.CDLL:
    """Compile the instrumented kernels with the library's options."""
    sys.path.insert(0, str(CSRC))
    import native_build
    import toolchain

    compiler, torch_folder = toolchain.find_compiler(), toolchain.find_torch()
    if compiler is None or torch_folder is None:
        raise SystemExit("attention_phases: no C++ compiler or no torch was found")
    flags = [
        *native_build.COMMON_FLAGS,
        *native_build.KERNEL_FLAGS,
        *native_build.STABLE_ABI_FLAGS,
        "-O3",
        "-DNDEBUG",
    ]
    flags += [
        *next(i.flags for i in toolchain.ISAS if i.name == isa),
        f"-DPT_ISA={isa}",
        "-DPT_PHASES",
    ]
    flags += ["-I", str(CSRC), "-isystem", str(torch_folder / "include"), *more]
    sources = [
        Path(__file__).with_suffix(".cpp"),
        CSRC / "cpu/core/parallel.cpp",
        CSRC / "cpu/core/arena.cpp",
    ]
    library = folder / "attention_phases.so"
    link = ["-shared", "-L", str(torch_folder / "lib"), "-ltorch_cpu", "-o", str(library)]
    subprocess.run([*compiler, *flags, *map(str, sources), *link], check=True)
    return ctypes.CDLL(str(library))


def usable(isa: str) -> tuple[str, list[str]]:
    """Return the set's name and compiler flags; request AMX tiles from the system."""
    module, why_not = machine.introspection()
    if module is None or isa not in module.usable_isas():
        why_not = why_not or f"{isa} must be one of {module.usable_isas()}, which this CPU runs"
        raise SystemExit(f"attention_phases: {why_not}")
    software = isa.startswith("amx") and module.build_info()["cpu"].get("tiles_in_software")
    return (
        (f"{isa}, {machine.SOFTWARE_TILES}", ["-DPT_TILES_IN_SOFTWARE"]) if software else (isa, [])
    )


class Problem:
    """Self-attention heads, 4,096 rows in total, and the arguments of a library call."""

    def __init__(
        self, library: ctypes.CDLL, length: int, dim: int, dtype: torch.dtype, threads: int
    ) -> None:
        shape = (max(1, 4096 // length), length, dim)
        self.query, self.key, self.value, self.grad = (
            torch.randn(shape).to(dtype) for _ in range(4)
        )
        self.out, self.dq, self.dk, self.dv = (torch.zeros(shape, dtype=dtype) for _ in range(4))
        lse = torch.zeros(shape[:2])
        self.held = (
            self.query,
            self.key,
            self.value,
            self.out,
            lse,
            self.grad,
            self.dq,
            self.dk,
            self.dv,
        )
        pointers = (ctypes.c_void_p * 9)(*(t.data_ptr() for t in self.held))
        self.call = Call(pointers, *shape, threads, dtype == torch.bfloat16, False)
        self.library, self.flops = library, 2.0 * shape[0] * length * length * dim

    def run(self, direction: str) -> tuple[dict[str, float], float]:
        """Return the seconds of each phase over all threads, and of the call on this thread."""
        seconds = (ctypes.c_double * len(PHASES))()
        self.call.backward = direction == "backward"
        torch.set_num_threads(self.call.threads)
        start = time.thread_time()
        self.library.attention_phases(ctypes.byref(self.call), seconds)
        whole = time.thread_time() - start
        missing = [
            phase for phase, s in zip(PHASES, seconds) if not s and phase in DIRECTIONS[direction]
        ]
        if missing:
            raise SystemExit(f"attention_phases: the {direction} has no PT_PHASE({missing[0]})")
        return {
            phase: s for phase, s in zip(PHASES, seconds) if phase in DIRECTIONS[direction]
        }, whole

    def check(self) -> None:
        """Raise unless both directions agree with the reference."""
        self.run("forward"), self.run("backward")
        leaves = [
            x.double().unsqueeze(0).requires_grad_() for x in (self.query, self.key, self.value)
        ]
        exact = pt.reference.attention(*leaves)
        wanted = (exact, *torch.autograd.grad(exact, leaves, self.grad.double().unsqueeze(0)))
        for name, got, want in zip(
            ("out", "dq", "dk", "dv"), (self.out, self.dq, self.dk, self.dv), wanted
        ):
            off = float((got.double() - want.detach()[0]).norm() / want.detach().norm())
            if not off < (0.5 if got.dtype == torch.bfloat16 else 8) * torch.finfo(got.dtype).eps:
                raise SystemExit(
                    f"attention_phases: {name} is off by {off:.2g} of its norm: nothing is timed"
                )


def product(dtype: torch.dtype, size: int = 1024) -> float:
    """Return the FLOP/s of one matmul on one thread, torch's or ours, whichever is faster."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    torch.set_num_threads(1)
    times = []
    for multiply in (torch.mm, functools.partial(own_product, bias=None)):
        start = time.thread_time()
        multiply(a, b)
        times.append(time.thread_time() - start)
    return 2.0 * size**3 / min(times)


def measure(problem: Problem, dtype: torch.dtype, threads: int, rounds: int) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {direction: {} for direction in DIRECTIONS}
    rate = 0.0
    for turn in range(rounds + 1):
        rate = max(rate, product(dtype))
        for direction, best in found.items():
            phases, whole = problem.run(direction)
            for phase, seconds in (phases | {"whole": whole}).items() if turn else ():
                best[phase] = min(seconds, best.get(phase, seconds))
    row: dict[str, Any] = {"product_gflops": rate / 1e9}
    for direction, best in found.items():
        whole = best.pop("whole")
        total = max(whole, sum(best.values())) if threads == 1 else sum(best.values())
        products = DIRECTIONS[direction]
        rates = {
            phase: n * problem.flops / best[phase] / rate for phase, n in products.items() if n
        }
        row[direction] = {
            "seconds": total,
            "of_product": sum(products.values()) * problem.flops / total / rate,
            "shares": {phase: seconds / total for phase, seconds in best.items()},
            "rates": rates,
        }
    return row


def table(document: dict[str, Any]) -> str:
    where = document["environment"]
    products: dict[str, list[float]] = {}
    for row in document["rows"]:
        products.setdefault(row["dtype"], []).append(row["product_gflops"])
    told = "; ".join(f"{name} {statistics.median(rates):.0f}" for name, rates in products.items())
    lines = [
        f"{where['cpu']}, instruction set {document['isa']}, torch {where['torch']}, commit"
        f" {where['commit']}, {where['date'][:10]}. A cell: share of the time; in brackets the"
        f" phase's rate, of the product's. The product, GFLOP/s: {told}."
    ]
    for direction, products_of in DIRECTIONS.items():
        names = [
            {"scores": "scores, dP"}.get(p, p) if direction == "backward" else p
            for p in products_of
        ]
        lines += [
            "",
            (
                f"| {direction} | threads | D | L | of the product's rate | {' | '.join(names)} |"
                " rest |"
            ),
        ]
        lines.append("|" + "---|" * (6 + len(names)))
        for row in document["rows"]:
            part = row[direction]
            cells = [
                f"{part['shares'][p]:.0%}" + (f" ({part['rates'][p]:.0%})" if n else "")
                for p, n in products_of.items()
            ]
            rest = f"{1 - sum(part['shares'].values()):.0%}" if row["threads"] == 1 else "–"
            head = (
                row["dtype"],
                row["threads"],
                row["dim"],
                f"{row['length']:,}",
                f"**{part['of_product']:.0%}**",
            )
            lines.append(f"| {' | '.join(map(str, (*head, *cells, rest)))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--isa", help="instruction set (default: the one in use)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    options = parser.parse_args()
    isa = options.isa or (machine.active_isa() or "generic").split(",")[0]
    name, flags = usable(isa)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        library = build(isa, flags, Path(folder))
        for dtype in options.dtypes:
            Problem(library, 200, 72, DTYPES[dtype], 1).check()
            for threads in options.threads:
                for dim in options.dims:
                    for length in options.lengths:
                        case = {"dtype": dtype, "threads": threads, "dim": dim, "length": length}
                        problem = Problem(library, length, dim, DTYPES[dtype], threads)
                        rows.append(case | measure(problem, DTYPES[dtype], threads, options.rounds))
                        both = "  ".join(f"{d} {rows[-1][d]['of_product']:.0%}" for d in DIRECTIONS)
                        print(f"{dtype} {threads} threads, D {dim}, L {length}: {both}", flush=True)
    command = "python bench/tools/attention_phases.py " + " ".join(sys.argv[1:])
    document = {
        "environment": results.environment("cpu", command.strip()),
        "isa": name,
        "rows": rows,
    }
    print("\n" + table(document))
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
