# SPDX-License-Identifier: Apache-2.0
"""Measures PyTorch's kernels in units of the error bound; the constants come from here.

    python -m support.calibrate attention --cases 1000 --backend cpu > table.md

It draws the fuzzers' problems within the features of PyTorch's functions. For each kernel, dtype
and kind of data it prints the 50th and 99th percentile and the maximum of c (bounds.coefficients),
as in the tables of docs/accuracy.md. Ops without a PyTorch kernel use plain code (F.linear,
activation, F.linear; F.linear, F.cross_entropy). "ours" are this package's backends on the same
problems.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict

import torch

from pytransformer.testing import bounds

from .checks import Calibration, families

Table = dict[tuple[str, str, str, str], list[float]]


def calibrations() -> dict[str, Calibration]:
    """Return the calibrations by family."""
    return {family: entry.calibration for family, entry in families().items()}


def calibrate(family: str, seed: int, cases: int, backends: list[str]) -> Table:
    """Return c of every result, by (kernel, dtype, data, result)."""
    how = calibrations()[family]
    runs = dict(how.peers) | {
        f"ours, {name}": lambda p, name=name: how.ours(p, name) for name in backends
    }
    table: Table = defaultdict(list)
    for case in range(cases):
        p = how.problem(seed, case)
        if p is None:
            continue
        solution = how.solve(p)
        if solution.dead_queries.any():
            continue  # PyTorch's flash kernel is wrong there, not inaccurate
        data, limits = how.limits(p)
        for name, run in runs.items():
            try:
                results = run(p)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and "requires" not in str(error):
                    raise
                continue  # this kernel does not support the problem
            for check in bounds.check(solution, results, p.dtype, data, limits):
                table[name, str(p.dtype)[6:], data, check.name].append(check.reached)
    return table


def markdown(family: str, table: Table) -> str:
    """Return the table of docs/accuracy.md: p50 / p99 / max of c."""
    names = calibrations()[family].columns
    lines = [
        f"| {family} | dtype | data | problems | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    for kernel, dtype, data in sorted({k[:3] for k in table}):
        cells = []
        for name in names:
            c = torch.tensor(table.get((kernel, dtype, data, name)) or [torch.nan])
            cells.append(
                "–"
                if c.isnan().all()
                else f"{c.median():.2f} / {c.quantile(0.99):.2f} / {c.max():.2f}"
            )
        count = len(table[kernel, dtype, data, names[0]])
        lines.append(
            f"| {kernel} | {dtype} | {data.replace('_', ' ')} | {count} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m support.calibrate", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY", help=f"{', '.join(calibrations())} (default all)"
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument(
        "--backend", action="append", default=[], help="also measure this backend of ours"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.family) - calibrations().keys():
        parser.error(
            f"no family {', '.join(sorted(unknown))}; there are {', '.join(calibrations())}"
        )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # SDPA warns of every problem that a kernel refuses
    for family in options.family or calibrations():
        started = time.monotonic()
        print(
            markdown(family, calibrate(family, options.seed, options.cases, options.backend)),
            end="\n\n",
        )
        told = (
            f"{options.cases} problems, seed {options.seed}, torch {torch.__version__},"
            f" {time.monotonic() - started:.0f} s"
        )
        print(f"{family}: {told}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
