"""Times every op on every backend that works here, beside naive code and PyTorch's own op.

Each contender is first checked against float64; a wrong one is shown with its error and never timed. The
result is a table, and a folder with results.json, results.csv, report.md and plots.
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
from pytransformer.cli.benchmark import clock, curves, memory, peaks, plan, plots, report, results, suites
from pytransformer.cli.benchmark.runner import Options, Runner
from pytransformer.cli.providers import ON_REQUEST, PEERS, VARIANTS
from pytransformer.console import EXTRA_HINT, Console, have_rich

QUICK_SECONDS = 46.0  # for the steps; starting up, probing memory and drawing take the rest of the minute
QUICK_ROUNDS = 3  # samples at least
# What holds PyTorch's own kernels, MKL's and oneDNN's to an instruction set.
ISAS = {
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "generic": ("default", "SSE4_2", "SSE41"),
}
_KNOWN_BACKENDS = ("reference", "cpu", "triton", "cuda", *PEERS, *VARIANTS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"ops to run (default all): {', '.join(plan.OPS)}")
    add("--quick", action="store_true", help="every op at small shapes, in about a minute")
    add(
        "--suite",
        choices=tuple(suites.SUITES),
        default=None,
        help="a fixed list of problems; aims, under 15 minutes, is what runs when nothing is asked for",
    )
    add(
        "--isa",
        choices=tuple(ISAS),
        default=None,
        help="hold both our kernels and PyTorch's libraries to an instruction set",
    )
    add(
        "--case",
        type=_words,
        default=[],
        metavar="NAME,...",
        help="cases by name (default: each op's core cases); --list shows them",
    )
    add(
        "--size",
        choices=("small", "medium", "large"),
        default="medium",
        help="shape of the cases (default medium)",
    )
    add("--shape", type=_shape, default={}, metavar="Lq=4096,...", help="change dimensions of the cases; L is Lq and Lk")
    add(
        "--sweep",
        type=_sweep,
        default=[{}],
        metavar="L=512:4096",
        help="several sizes of a dimension: doubling from:to, or a,b,c; draws speed and memory against it",
    )
    add(
        "--dtype",
        type=_dtypes,
        default=None,
        metavar="NAME,...",
        help="float32 (default), bfloat16, float16, float64",
    )
    add(
        "--mode",
        type=_modes,
        default=None,
        metavar="NAME,...",
        help="fwd, bwd, fwd+bwd (default fwd,fwd+bwd)",
    )
    add(
        "--providers",
        "--backends",
        dest="backends",
        type=_backends,
        default=None,
        metavar="NAME,...",
        help="who takes part: reference, cpu, triton, cuda (ours), naive, torch (default: these), or also "
        f"{', '.join(ON_REQUEST)}; all",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default cpu)")
    add(
        "--threads",
        type=int,
        default=None,
        metavar="N",
        help="torch.set_num_threads(N) first (default: leave as it is)",
    )
    add(
        "--min-time",
        type=float,
        default=None,
        metavar="S",
        help=f"seconds of timing for each contender (default 0.3; in a suite {suites.MIN_TIME})",
    )
    add(
        "--sustained",
        type=float,
        default=0.0,
        metavar="S",
        help="also time calls after a rest, and S seconds of calls without one (default 0: not, but in a suite)",
    )
    add(
        "--cache",
        choices=("warm", "cold"),
        default="warm",
        help="cold: empty the CPU's caches before each call (default warm; on GPUs always cold)",
    )
    add(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check against float64 before timing (default on)",
    )
    add(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure peak memory (default on)",
    )
    add(
        "--peaks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what the machine can do, for the roofline (default on; not with --quick)",
    )
    add("--plots", action=argparse.BooleanOptionalAction, default=True, help="draw plots (default on)")
    add(
        "--out",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder to write (default ./results/bench-<date>)",
    )
    add("--list", action="store_true", help="list the cases and stop")


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    ops = _ops(arguments.ops)
    if arguments.list:
        rows = [
            (c.op, c.name, report.shape_text(c.shape), " ".join(sorted(c.tags)))
            for op in ops
            for c in plan.cases(op, arguments.size)
        ]
        console.table(("op", "case", "shape", "tags"), rows)
        return OK
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA GPU here; `pytransformer doctor` says why")
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    if arguments.isa is not None and (held := held_to(arguments.isa)):
        return subprocess.run([sys.executable, "-m", "pytransformer", *arguments.argv], env=os.environ | held).returncode
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
    )
    where = results.environment(arguments.device, _command_line(arguments))
    console.print(report.environment_text(where))
    _say_what_is_missing(console, arguments)
    runner, complete = _measure(console, options, steps)
    document = {
        "schema_version": results.SCHEMA_VERSION,
        "environment": where,
        "peaks": _peaks(arguments, steps) if complete else None,
        "complete": complete,
        "rows": runner.rows,
        "not_run": runner.not_run,
    }
    _show(console, document)
    _write(console, document, folder, draw=arguments.plots and plots.why_not() is None)
    if not complete:
        console.print(f"Interrupted: {len(runner.rows)} rows are in {folder}, the rest was not measured.")
        return INTERRUPTED
    ours = [entry for entry in runner.not_run if entry["backend"] not in PEERS]
    return WRONG if any(entry["status"] in ("wrong", "failed") for entry in ours) else OK


def _peaks(arguments: argparse.Namespace, steps: list[plan.Step]) -> dict[str, object] | None:
    """For the roofline; not in the minute of --quick."""
    if arguments.quick or not arguments.peaks:
        return None
    return peaks.measure(arguments.device, list(dict.fromkeys(step.dtype for step in steps)), min(0.15, arguments.min_time))


def _measure(console: Console, options: Options, steps: list[plan.Step]) -> tuple[Runner, bool]:
    """Runs the steps; Ctrl-C ends them early and keeps what is done."""
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
                        seconds = max(0.0, options.budget - (time.monotonic() - start)) * weights[index] / sum(weights[index:])
                    runner.run(step, seconds)
                    progress.advance()
            except KeyboardInterrupt:
                return runner, False
    return runner, True


# ---- what was asked for


def held_to(isa: str) -> dict[str, str]:
    """The variables that have to be set for a process to stay with an instruction set; empty if they are."""
    ours, mkl, onednn = ISAS[isa]
    wanted = {"PYTRANSFORMER_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": ours}
    wanted |= {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    return wanted if any(os.environ.get(name) != value for name, value in wanted.items()) else {}


def _suite_if_nothing_is_asked(arguments: argparse.Namespace) -> None:
    chosen = (arguments.case, arguments.dtype, arguments.shape, arguments.mode, arguments.quick, arguments.suite)
    if not any((*chosen, arguments.ops, arguments.sweep != [{}], arguments.size != "medium")):
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
        fixed = [
            flag
            for flag, given in (
                ("--case", arguments.case),
                ("--dtype", arguments.dtype),
                ("--shape", arguments.shape),
                ("--sweep", arguments.sweep != [{}]),
            )
            if given
        ]
        if fixed:
            suite = "--quick" if arguments.quick else "--suite"
            raise UsageError(f"{suite} chooses its own cases, so it does not go with {', '.join(fixed)}")
        if arguments.quick:
            return plan.quick(ops, modes)
        return [step for step in suites.SUITES[arguments.suite]() if step.case.op in ops and step.mode in modes]
    dtypes = arguments.dtype or ["float32"]
    return [
        step
        for size in arguments.sweep
        for step in plan.chosen(ops, arguments.case, arguments.size, arguments.shape | size, dtypes, modes)
    ]


def _folder(given: Path | None) -> Path:
    stamp = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    folder = given or Path("results") / f"bench-{stamp}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: cannot make the folder {folder}: {error.strerror}") from error
    return folder


def _command_line(arguments: argparse.Namespace) -> str:
    return " ".join(["pytransformer", *arguments.argv])


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _among(text: str, known: tuple[str, ...]) -> list[str]:
    words = _words(text)
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not one of {', '.join(known)}")
    return words


def _dtypes(text: str) -> list[str]:
    return [plan.dtype_name(plan.DTYPES[word]) for word in _among(text, tuple(plan.DTYPES))]


def _modes(text: str) -> list[str]:
    return _among(text, results.MODES)


def _backends(text: str) -> tuple[str, ...]:
    return _KNOWN_BACKENDS if text == "all" else tuple(_among(text, _KNOWN_BACKENDS))


def _shape(text: str) -> dict[str, int]:
    shape: dict[str, int] = {}
    for word in _words(text):
        name, _, size = word.partition("=")
        shape |= _sized(word, name, size)
    return shape


def _sweep(text: str) -> list[dict[str, int]]:
    """`L=512:4096` (doubling) or `L=512,1000,2048`: one shape for each size."""
    name, _, sizes = text.partition("=")
    first, colon, last = sizes.partition(":")
    if not colon:
        return [_sized(text, name, size) for size in _words(sizes)] or [_sized(text, name, sizes)]
    size, end = (next(iter(_sized(text, name, n).values())) for n in (first, last))
    swept = []
    while size <= end:
        swept.append(_sized(text, name, str(size)))
        size *= 2
    if not swept:
        raise argparse.ArgumentTypeError(f"{text!r} goes from {first} down to {last}; the first must be the smaller")
    return swept


def _sized(word: str, name: str, size: str) -> dict[str, int]:
    known = {name for found in plan.cases() for name in found.shape} | {"Dv", "L"}
    if name not in known or not size.isdecimal() or int(size) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=SIZE with a NAME out of {', '.join(sorted(known))}")
    return dict.fromkeys(("Lq", "Lk") if name == "L" else (name,), int(size))


# ---- what is said


def _say_what_is_missing(console: Console, arguments: argparse.Namespace) -> None:
    if arguments.plots and (reason := plots.why_not()) is not None:
        console.print(reason)
    if console.terminal and not have_rich():
        console.print(f"plain output: rich is not installed. {EXTRA_HINT}")
    if arguments.memory and (reason := memory.why_not()) is not None:
        console.print(reason)
    if not arguments.verify:
        console.print("--no-verify: what follows was not checked, and fast wrong results are easy to come by")


def _show(console: Console, document: dict[str, Any]) -> None:
    for op, rows in report.by_op(document["rows"]).items():
        console.heading(op)
        columns, cells = report.fitting([report.table_row(row) for row in rows], console.width)
        console.table(columns, cells, right=report.RIGHT)
    if regimes := report.regime_rows(document["rows"]):
        console.heading("Burst and sustained")
        console.table(report.REGIME_COLUMNS, regimes, right=report.REGIME_COLUMNS[5:])
    if document["not_run"]:
        console.heading("Not timed, and why")
        console.table(("op", "case", "dtype", "mode", "backend", "why"), _grouped(document["not_run"]))
    lines = report.summary(document["rows"])
    if lines:
        console.heading("Summary")
        console.table(report.SUMMARY_COLUMNS, lines, right=report.SUMMARY_COLUMNS[3:])
        console.print(report.LEGEND.replace("`", ""))


def _grouped(entries: list[dict[str, Any]]) -> list[list[str]]:
    """One line for each op, backend and reason, with what it applies to; wrong results come first."""
    groups: dict[tuple[str, str, str], list[list[str]]] = {}
    for entry in sorted(entries, key=lambda e: results.STATUSES.index(e["status"]), reverse=True):
        groups.setdefault((entry["op"], entry["backend"], report.verdict(entry)), []).append(report.refusal_row(entry))

    def several(words: list[str]) -> str:
        return ", ".join(dict.fromkeys(words))

    return [
        [op, *(several([row[column] for row in rows]) for column in range(3)), backend, why]
        for (op, backend, why), rows in groups.items()
    ]


def _write(console: Console, document: dict[str, Any], folder: Path, *, draw: bool) -> None:
    problems = results.validate(document)
    assert not problems, f"the results do not fit their own schema: {problems}"
    drawn = plots.draw_all(folder, document) + curves.draw_all(folder, document) if draw else []
    written = report.write_all(folder, document, drawn)
    console.print()
    console.print(f"Written to {folder}: {', '.join([p.name for p in written] + drawn)}")
