# SPDX-License-Identifier: Apache-2.0
"""Random problems against float64, on any backend of an op.

    PYTHONPATH=tests/support python -m support.fuzz attention --cases 2000 --seed 1 --backend cpu
    PYTHONPATH=tests/support python -m support.fuzz attention --seed 1 --case 17 --backend cpu

The second form runs one problem and prints its details. Each failure prints the command that
reproduces it. A family takes part through its Fuzzer (ops/<family>.py).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .checks import Fuzzer, Verdicts, families

REPEAT_EVERY = 8  # every eighth case runs twice, to compare bits


@dataclass
class Report:
    """The results of a fuzzer run."""

    cases: int = 0
    # One reproducing command with its reasons each.
    failures: list[str] = field(default_factory=list)
    # Number of problems that each backend declined.
    declined: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    # (backend, dtype, result) -> share of the bound
    reached: dict[tuple[str, str, str], float] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, problem: Any, verdicts: Verdicts) -> None:
        self.cases += 1
        names = sorted(problem.features)
        self.features.update(names)
        self.pairs.update(itertools.combinations(names, 2))
        for backend, (checks, _) in verdicts.items():
            for c in checks:
                key = backend, str(problem.dtype)[6:], c.name
                self.reached[key] = max(self.reached.get(key, 0.0), c.reached / c.allowed)

    def table(self) -> str:
        """Return the share of the bound that each result reached, per backend and dtype."""
        lines = ["largest error as a share of the bound:"]
        for backend, dtype in sorted({k[:2] for k in self.reached}):
            worst = {k[2]: v for k, v in self.reached.items() if k[:2] == (backend, dtype)}
            lines.append(
                f"  {backend:10} {dtype:9} "
                + "  ".join(f"{n} {v:.2f}" for n, v in sorted(worst.items()))
            )
        return "\n".join(lines)


def fuzzers() -> dict[str, Fuzzer]:
    """Return the fuzzers by family."""
    return {family: entry.fuzzer for family, entry in families().items()}


def reproduce(op: str, seed: int, case: int, backend: str) -> str:
    """Return the command that reruns one problem."""
    return (
        f"PYTHONPATH=tests/support python -m support.fuzz {op} --seed {seed} --case {case}"
        f" --backend {backend}"
    )


def fuzz(
    op: str,
    backends: list[str],
    seed: int,
    cases: Iterable[int],
    *,
    stop_after: int | None = None,
    progress: Callable[[Report], None] | None = None,
) -> Report:
    """Examine the given cases; `stop_after` failures end the run early."""
    report, started, examine = Report(), time.monotonic(), fuzzers()[op].examine
    for case in cases:
        problem, verdicts = examine(seed, case, backends, case % REPEAT_EVERY == 0)
        report.add(problem, verdicts)
        report.declined.update(backend for backend in backends if backend not in verdicts)
        for backend, (_, wrong) in verdicts.items():
            if wrong:
                report.failures.append(
                    "\n    ".join([reproduce(op, seed, case, backend), str(problem), *wrong])
                )
        report.seconds = time.monotonic() - started
        if progress:
            progress(report)
        if stop_after is not None and len(report.failures) >= stop_after:
            break
    return report


def _progress(total: int) -> Callable[[Report], None] | None:
    if not sys.stderr.isatty():
        return None

    def show(report: Report) -> None:
        print(
            f"\r{report.cases}/{total} cases, {len(report.failures)} failures,"
            f" {report.seconds:.0f} s",
            end="" if report.cases < total else "\n",
            file=sys.stderr,
            flush=True,
        )

    return show


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m support.fuzz", description=__doc__.split("\n")[0]
    )
    parser.add_argument("op", choices=list(fuzzers()))
    parser.add_argument(
        "--backend", action="append", help="may be given several times (default: reference)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500, help="how many problems (default 500)")
    parser.add_argument("--case", type=int, help="one problem only, told in full")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first problem (default 0)"
    )
    parser.add_argument("--stop-after", type=int, help="end after so many failures")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads for torch (default 1, fastest for small problems)",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    backends = options.backend or ["reference"]

    if options.case is not None:
        problem, verdicts = fuzzers()[options.op].examine(
            options.seed, options.case, backends, True
        )
        print(problem)
        for backend, (checks, wrong) in verdicts.items():
            print(
                f"{backend}: {'WRONG' if wrong else 'ok'}",
                *checks,
                *(w for w in wrong if "WRONG" not in w),
                sep="\n    ",
            )
        return int(any(wrong for _, wrong in verdicts.values()))

    cases = range(options.first, options.first + options.cases)
    report = fuzz(
        options.op,
        backends,
        options.seed,
        cases,
        stop_after=options.stop_after,
        progress=_progress(len(cases)),
    )
    for failure in report.failures:
        print(failure)
    print(report.table())
    print(
        f"{options.op} on {', '.join(backends)}: {report.cases} cases, {len(report.failures)}"
        f" failures, {sum(report.declined.values())} declined, seed {options.seed},"
        f" {report.seconds:.0f} s"
    )
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
