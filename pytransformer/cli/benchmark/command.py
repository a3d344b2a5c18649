# SPDX-License-Identifier: Apache-2.0
"""Time every op on every working backend, beside naive code and PyTorch's op.

Each contender is first checked against float64; a wrong one is listed with its
error and not timed. The output is a table and a folder with results.json,
results.csv, report.md and plots.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pytransformer.cli import INTERRUPTED, OK, WRONG, UsageError
from pytransformer.cli.benchmark import (
    clock,
    curves,
    limits,
    memory,
    peaks,
    plan,
    plots,
    report,
    results,
    suites,
)
from pytransformer.cli.benchmark.options import ISAS
from pytransformer.cli.benchmark.options import add_arguments as add_arguments
from pytransformer.cli.benchmark.runner import Options, Runner
from pytransformer.cli.providers import PEERS
from pytransformer.cli.providers.contender import functions
from pytransformer.console import Console

QUICK_SECONDS = 46.0  # for the steps; startup, memory probe and plots take the rest of the minute
QUICK_ROUNDS = 3  # min samples


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    files = arguments.contender
    names = [path.stem for path in files]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--contender: two files have the name {repeated[0]}; rename one")
    ops = _ops(arguments.ops or list(dict.fromkeys(op for f in files for op in functions(f))))
    if arguments.list:
        rows = [
            (c.op, c.name, report.shape_text(c.shape), " ".join(sorted(c.tags)))
            for op in ops
            for c in plan.cases(op, arguments.size)
        ]
        console.table(("op", "case", "shape", "tags"), rows)
        return OK
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: torch sees no CUDA GPU here; `pytransformer doctor` gives the reason"
        )
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    if arguments.isa is not None and (held := held_to(arguments.isa)):
        return subprocess.run(
            [sys.executable, "-m", "pytransformer", *arguments.argv], env=os.environ | held
        ).returncode
    _suite_if_nothing_is_asked(arguments)
    steps = _steps(arguments, ops)
    folder = _folder(arguments.out)
    budget = QUICK_SECONDS if arguments.quick else suites.SUITE_SECONDS if arguments.suite else None
    options = Options(
        device=arguments.device,
        backends=arguments.backends,
        verify=arguments.verify,
        memory=arguments.memory,
        min_time=arguments.min_time,
        budget=budget,
        min_rounds=QUICK_ROUNDS if arguments.quick else clock.MIN_ROUNDS,
        sustained=arguments.sustained,
        cold=arguments.cache == "cold",
        limits=arguments.peaks and not arguments.quick,
        contenders=files,
    )
    command_line = " ".join(["pytransformer", *arguments.argv])
    where = results.environment(arguments.device, command_line)
    console.print(report.environment_text(where))
    _say_what_is_missing(console, arguments)
    runner, complete = _measure(console, options, steps)
    roofs = None
    if complete and options.limits:
        dtypes = list(dict.fromkeys(step.dtype for step in steps))
        roofs = peaks.measure(arguments.device, dtypes, min(0.15, arguments.min_time))
    limits.label(runner.rows, roofs)
    document = {
        "schema_version": results.SCHEMA_VERSION,
        "environment": where,
        "peaks": roofs,
        "complete": complete,
        "rows": runner.rows,
        "not_run": runner.not_run,
    }
    _show(console, document)
    _write(console, document, folder, draw=arguments.plots and plots.why_not() is None)
    if not complete:
        console.print(
            f"Interrupted: {len(runner.rows)} rows are in {folder}, the rest was not measured."
        )
        return INTERRUPTED
    ours = [entry for entry in runner.not_run if entry["backend"] not in PEERS]
    absent = {f.stem for f in files} - {row["backend"] for row in runner.rows}
    for name in sorted(absent):
        console.print(f"{name} has no row: nothing of it was timed, for the reasons above.")
    wrong = any(entry["status"] in ("wrong", "failed") for entry in ours)
    return WRONG if wrong or absent else OK


def _measure(console: Console, options: Options, steps: list[plan.Step]) -> tuple[Runner, bool]:
    """Run the steps; Ctrl-C ends them early and the finished results remain."""
    start = time.monotonic()
    with memory.MemoryProbe() as probe:
        runner = Runner(options, probe, backward=any(step.mode != "fwd" for step in steps))
        weights = [step.weight for step in steps]
        with console.progress(len(steps), seconds=options.budget, weights=weights) as progress:
            try:
                for index, step in enumerate(steps):
                    progress.step(step.title)
                    seconds = None
                    if options.budget is not None:
                        seconds = (
                            max(0.0, options.budget - (time.monotonic() - start))
                            * weights[index]
                            / sum(weights[index:])
                        )
                    runner.run(step, seconds)
                    progress.advance()
            except KeyboardInterrupt:
                return runner, False
    return runner, True


# ---- options


def held_to(isa: str) -> dict[str, str]:
    """Return the variables that pin a process to an instruction set; empty if already set."""
    ours, mkl, onednn = ISAS[isa]
    wanted = {"PYTRANSFORMER_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": ours}
    wanted |= {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    return wanted if any(os.environ.get(name) != value for name, value in wanted.items()) else {}


def _suite_if_nothing_is_asked(arguments: argparse.Namespace) -> None:
    names = ("case", "dtype", "shape", "mode", "quick", "suite", "contender", "ops")
    chosen = [getattr(arguments, name) for name in names]
    if not any((*chosen, arguments.sweep != [{}], arguments.size != "medium")):
        arguments.suite = "aims"
    if arguments.min_time is None:
        arguments.min_time = suites.MIN_TIME if arguments.suite else 0.3


def _ops(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in plan.OPS]
    if unknown:
        raise UsageError(f"unknown op {', '.join(unknown)}; the ops are {', '.join(plan.OPS)}")
    return names or list(plan.OPS)


def _steps(arguments: argparse.Namespace, ops: list[str]) -> list[plan.Step]:
    modes = arguments.mode or plan.QUICK_MODES
    if arguments.quick or arguments.suite:
        given = {"--case": arguments.case, "--dtype": arguments.dtype,
            "--shape": arguments.shape, "--sweep": arguments.sweep != [{}]}  # fmt: skip
        if fixed := [flag for flag, value in given.items() if value]:
            suite = "--quick" if arguments.quick else "--suite"
            raise UsageError(
                f"{suite} chooses its own cases, so it does not go with {', '.join(fixed)}"
            )
        if arguments.quick:
            return plan.quick(ops, modes)
        return [
            step
            for step in suites.SUITES[arguments.suite]()
            if step.case.op in ops and step.mode in modes
        ]
    dtypes = arguments.dtype or ["float32"]
    return [
        step
        for size in arguments.sweep
        for step in plan.chosen(
            ops, arguments.case, arguments.size, arguments.shape | size, dtypes, modes
        )
    ]


def _folder(given: Path | None) -> Path:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = given or Path("results") / f"bench-{stamp}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make the folder {folder}: {error.strerror}") from error
    return folder


# ---- output


def _say_what_is_missing(console: Console, arguments: argparse.Namespace) -> None:
    if arguments.plots and (reason := plots.why_not()) is not None:
        console.print(reason)
    if arguments.memory and (reason := memory.why_not()) is not None:
        console.print(reason)
    if not arguments.verify:
        console.print(
            "--no-verify: what follows was not checked, and fast wrong results are easy to come by"
        )


def _show(console: Console, document: dict[str, Any]) -> None:
    for title, columns, cells, right in report.tables(document, console.width):
        console.heading(title)
        console.table(columns, cells, right=right)
    lines = report.summary(document["rows"])
    if lines:
        console.heading("Summary")
        console.table(report.SUMMARY_COLUMNS, lines, right=report.SUMMARY_COLUMNS[3:])
        console.print(report.LEGEND.replace("`", ""))


def _write(console: Console, document: dict[str, Any], folder: Path, *, draw: bool) -> None:
    problems = results.validate(document)
    assert not problems, f"the results do not fit their own schema: {problems}"
    drawn = plots.draw_all(folder, document) + curves.draw_all(folder, document) if draw else []
    written = report.write_all(folder, document, drawn)
    console.print()
    console.print(f"Written to {folder}: {', '.join([p.name for p in written] + drawn)}")
