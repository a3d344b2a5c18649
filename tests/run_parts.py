# SPDX-License-Identifier: Apache-2.0
"""Run all tests in parts with a time budget each; `make test` runs this.

    python3 tests/run_parts.py           the parts within their budgets
    python3 tests/run_parts.py --full    slow tests too, other instruction sets and settings,
                                         the sanitizers; no budgets
    python3 tests/run_parts.py cpu ...   only the parts named
    python3 tests/run_parts.py --full generic --summary tests/results.md     update the table

A part fails if its tests fail, if it runs none, or if it exceeds its budget on two idle cores. A
busy machine does not count, because the processor time is used if it is less than the wall time. A
slow machine does not count either, because a calibration loop scales the budget. At six times the
budget a part is interrupted, because it may hang.

Every file and folder of tests/ belongs to one part, by default to `cpu`. A part that needs a folder
with other packages, named by an environment variable, is skipped with a message if the variable is
unset.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))  # PYTHONSAFEPATH leaves the script's folder out
from parts import (  # noqa: E402
    BENCH,
    BUILDS,
    CUDA_BUILD,
    FULL_PARTS,
    GIVE_WAY,
    INSTALL,
    ISA_VARIABLE,
    NO_SLOW,
    PARTS,
    REST,
    SAMPLES,
    SANITIZE,
    TILES,
    Part,
)

RESULTS = ROOT / "build" / "test-results"
# pytest may be in the environment that .venv shares torch with, without a script in .venv, and
# Python 3.10 lacks -P. Remove the empty path here, which would expose kernels/.
PYTEST = [
    str(ROOT / ".venv" / "bin" / "python"),
    "-c",
    (
        "import sys; sys.path = [p for p in sys.path if p]; import pytest;"
        " sys.exit(pytest.main(sys.argv[1:]))"
    ),
]
NOMINAL = 0.09  # seconds of loop_time on an AMD EPYC (Zen 5) under Python 3.11
FULL_FUZZ = "--fuzz-cases=2000"
# Without "torch", which in a benchmark is PyTorch's function.
OURS = ("reference", "cpu", "triton", "cuda")


Reasons = tuple[tuple[str, int], ...]  # (reason, count), the most frequent first


class Result(NamedTuple):
    part: Part
    seconds: float
    problem: str | None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: Reasons = ()  # reasons of skipped tests, or of a part that did not run


def paths(part: Part) -> list[str]:
    """Return the existing entries of tests/ that belong to `part`."""
    if part not in PARTS:
        return [
            str(path.relative_to(ROOT))
            for pattern in part.folders
            for path in sorted(TESTS.glob(pattern))
        ]
    named = {folder for other in PARTS for folder in other.folders}
    entries = [
        path for path in sorted(TESTS.iterdir()) if path.is_dir() or path.name.startswith("test_")
    ]
    mine = [
        path
        for path in entries
        if path.name in part.folders or (part.name == REST and path.name not in named)
    ]
    return [
        str(path.relative_to(ROOT))
        for path in mine
        if path.is_file() or any(path.rglob("test_*.py"))
    ]


class Spent(NamedTuple):
    seconds: float  # wall time
    processor: float = math.inf  # processor time of the process and its children


def timed(
    command: list[str], limit: float | None, environment: tuple[tuple[str, str], ...] = ()
) -> tuple[int, Spent]:
    """Run `command`, interrupt it after `limit` seconds, and return its exit code and times."""
    start, before = time.monotonic(), processor_time()
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"} | dict(environment)
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then still prints its results
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    return code, Spent(time.monotonic() - start, processor_time() - before)


def processor_time() -> float:
    """Return the processor seconds of finished child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def over_budget(part: Part, spent: Spent, full: bool) -> str | None:
    own, budget = min(spent.seconds, spent.processor / part.jobs), 60 * part.minutes
    if full or own <= budget or own <= budget * (slow := slowness(part.jobs)):
        return None
    return (
        f"took longer than its {part.minutes:g} minutes ({own:.0f} s of its own, on a machine"
        f" {slow:.1f} times as slow)"
    )


def slowness(jobs: int) -> float:
    """Return this machine's slowdown against the one that set the budgets, at least 1.

    `jobs` processes run the loop at once, like the part's tests, because two hardware threads share
    a core and a core that computes alone may have a higher clock.
    """
    fork = multiprocessing.get_context("fork")
    times = fork.SimpleQueue()
    processes = [
        fork.Process(target=lambda: times.put([loop_time() for _ in range(9)])) for _ in range(jobs)
    ]
    for process in processes:
        process.start()
    measured = [time for _ in processes for time in times.get()]
    for process in processes:
        process.join()
    return max(1.0, statistics.median(measured) / NOMINAL)


def loop_time() -> float:
    start, total = time.process_time(), 0
    for i in range(2_000_000):
        total += i * i % 7
    return time.process_time() - start


def install(full: bool) -> Result:
    # Without the native code, this run would cover only half of the tests.
    os.environ.setdefault("PYTRANSFORMER_CPU", "1")
    # Compiling all five instruction sets and three GPU architectures would exceed the budget.
    os.environ.setdefault("PYTRANSFORMER_CPU_ISAS", "all" if full else "native")
    os.environ.setdefault("PYTRANSFORMER_CUDA_ARCHS", "all" if full else "sm_90a")
    # A fast path that does not compile lets a build succeed, but must fail here.
    fast_path = os.environ.get("PYTRANSFORMER_FAST_PATH", "1")
    return build(
        INSTALL, full, (("PYTRANSFORMER_CUDA", "0"), ("PYTRANSFORMER_FAST_PATH", fast_path))
    )


def failed(result: Result) -> bool:
    """Return True if a build failed for a reason other than time; then there is nothing to test."""
    return (result.problem or "").startswith("exit code")


def build(part: Part, full: bool, environment: tuple[tuple[str, str], ...] = ()) -> Result:
    code, spent = timed(
        [sys.executable, str(ROOT / "bench" / "tools" / "install.py")], None, environment
    )
    return Result(
        part, spent.seconds, f"exit code {code}" if code else over_budget(part, spent, full)
    )


def counts(report: Path) -> tuple[int, int, int, Reasons]:
    """Return passed, failed, skipped and skip reasons of a JUnit report; zeros without a report."""
    if not report.is_file():
        return 0, 0, 0, ()
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    total, failures, errors, skipped = (
        int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
    )
    why = Counter(entry.get("message", "no reason given") for entry in suite.iter("skipped"))
    return total - failures - errors - skipped, failures + errors, skipped, tuple(why.most_common())


def test(part: Part, full: bool) -> Result:
    print(
        f"\n---- {part.title} ({'no budget' if full else f'{part.minutes:g} minutes'})", flush=True
    )
    report = RESULTS / f"{part.name}.xml"
    report.unlink(missing_ok=True)
    markers = "not gpu" if full else NO_SLOW
    command = [
        *PYTEST,
        "-m",
        markers,
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
        "--durations=5",
    ]
    command += [FULL_FUZZ] * full + [*part.options, *paths(part)]
    environment = (*GIVE_WAY, *part.environment) if part.jobs > 1 else part.environment
    code, spent = timed(command, None if full else 360 * part.minutes, environment)
    problem = over_budget(part, spent, full)
    if code:
        problem = "ran no test" if code == 5 else f"pytest exit code {code}"
    return Result(part, spent.seconds, problem, *counts(report))


def second_copy(name: str, *options: tuple[str, str]) -> tuple[Path, str | None]:
    """Return the package in a folder of build/ with separate native code, and its build error."""
    copy = ROOT / "build" / name
    build = [PYTEST[0], "setup.py", "-q", "build", "--build-lib", str(copy)]
    code, _ = timed(
        build,
        None,
        (("PYTRANSFORMER_CPU_ISAS", "native"), ("PYTRANSFORMER_FAST_PATH", "0"), *options),
    )
    return copy, f"building: exit code {code}" if code else None


def test_sanitized(part: Part) -> Result:
    """Test the ops with a second copy of the package, built with GCC's sanitizers."""
    options = (
        ("PYTRANSFORMER_BUILD_SANITIZE", "address,undefined"),
        ("PYTRANSFORMER_BINDINGS", "0"),
        ("CXX", "g++"),
    )
    copy, problem = second_copy("sanitized", *options)
    if problem:
        return Result(part, 0.0, problem)
    names = ("libasan.so", "libstdc++.so")
    libraries = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    environment = (
        ("LD_PRELOAD", ":".join(libraries)),  # Python itself is built without them
        ("ASAN_OPTIONS", "detect_leaks=0"),  # Python leaks by design
        ("UBSAN_OPTIONS", "print_stacktrace=1"),
        ("PYTHONPATH", str(copy)),
    )
    return test(part._replace(environment=environment), True)


def test_on_software_tiles(part: Part) -> Result:
    """Test the ops on amx_bf16 with emulated tiles, in a second copy of the package.

    The CPU must support everything but the tiles.
    """
    copy, problem = second_copy(
        "software-tiles", ("PYTRANSFORMER_SOFTWARE_TILES", "1"), ("PYTRANSFORMER_CUDA", "0")
    )
    if problem:
        return Result(part, 0.0, problem)
    return test_with_instruction_set(
        part._replace(environment=(*part.environment, ("PYTHONPATH", str(copy))))
    )


def test_with_other_packages(part: Part) -> Result:
    """Test the part with the packages of the folder in `part.needs` before the installed ones."""
    folder = Path(os.environ.get(part.needs) or "")
    if not os.environ.get(part.needs) or not folder.is_dir():
        return skipped(part, f"{part.needs} names no folder of packages")
    path = os.pathsep.join(filter(None, (str(folder.resolve()), os.environ.get("PYTHONPATH"))))
    return test(part._replace(environment=(*part.environment, ("PYTHONPATH", path))), True)


def bench(part: Part) -> Result:
    """Run `pytransformer bench` with checks; rows count as passed, our errors as failed."""
    print(f"\n---- {part.title} (no budget)", flush=True)
    folder = RESULTS / "bench"
    document = folder / "results.json"
    document.unlink(missing_ok=True)
    code, spent = timed(
        [PYTEST[0], "-m", "pytransformer", "bench", "--no-plots", "--out", str(folder)], None
    )
    if not document.is_file():
        return Result(part, spent.seconds, f"exit code {code}, no results")
    found = json.loads(document.read_text())
    why = Counter(f"{e['backend']}: {e['reason']}" for e in found["not_run"])
    faults = sum(
        e["status"] in ("wrong", "failed") and e["backend"] in OURS for e in found["not_run"]
    )
    return Result(
        part,
        spent.seconds,
        f"exit code {code}" if code else None,
        len(found["rows"]),
        faults,
        sum(why.values()) - faults,
        tuple(why.most_common()),
    )


def skipped(part: Part, reason: str) -> Result:
    print(f"\n---- {part.title}: skipped, {reason}", flush=True)
    return Result(part, 0.0, None, reasons=((reason, 1),))


def test_with_instruction_set(part: Part) -> Result:
    """Test the part with the kernels of one instruction set, if the CPU supports it."""
    ask = "import pytransformer._C as C; print(*C.usable_isas())"
    where = os.environ | {"PYTHONSAFEPATH": "1"} | dict(part.environment)
    usable = subprocess.check_output([PYTEST[0], "-c", ask], cwd=ROOT, env=where, text=True).split()
    if dict(part.environment)[ISA_VARIABLE] not in usable:
        return skipped(part, f"this CPU and build run {', '.join(usable)}")
    return test(part, True)


def run(part: Part, full: bool) -> Result:
    if part.name == TILES:
        return test_on_software_tiles(part)
    if ISA_VARIABLE in dict(part.environment):
        return test_with_instruction_set(part)
    if part.name == BENCH:
        return bench(part)
    if part.name == SANITIZE:
        return test_sanitized(part)
    return test_with_other_packages(part) if part.needs else test(part, full)


def summary(results: list[Result]) -> str:
    lines = [f"{'part':34} {'time':>8} {'budget':>8}  {'passed':>6} {'failed':>6} {'skipped':>7}"]
    for r in results:
        counted = f"{r.passed:6} {r.failed:6} {r.skipped:7}" if r.part not in BUILDS else " " * 21
        budget = f"{60 * r.part.minutes:6.0f} s" if r.part.minutes else "       -"
        lines.append(f"{r.part.title:34} {r.seconds:6.0f} s {budget}  {counted}  {verdict(r)}")
        lines += [f"    skipped: {reason}" for reason in told(r.reasons)]
    total = (
        f"total: {sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed"
    )
    lines.append(f"{total}, {sum(r.skipped for r in results)} skipped")
    # Repeat problems last, because a reader sees the end of a log first.
    return "\n".join([*lines, *(f"{r.part.title}: {r.problem}" for r in results if r.problem)])


def told(reasons: Reasons) -> list[str]:
    return [f"{count} x {reason}" if count > 1 else reason for reason, count in reasons]


def verdict(result: Result) -> str:
    if result.problem:
        return result.problem
    return "ok" if result.passed or result.part in BUILDS else "skipped"


# ---- the table of tests/results.md

START, END = "<!-- parts: start, written by tests/run_parts.py --summary -->", "<!-- parts: end -->"
COLUMNS = (
    "part",
    "passed",
    "failed",
    "skipped",
    "seconds",
    "verdict",
    "slow tests",
    "commit",
    "date",
)


def recorded(text: str, results: Iterable[Result], full: bool, commit: str, date: str) -> str:
    """Return `text` with the lines of `results` updated in the table between the markers.

    Lines of other parts stay.
    """
    before, marked, rest = text.partition(START)
    kept, closed, after = rest.partition(END)
    if not marked or not closed:
        raise ValueError(f"no table to write to: expected {START!r} and {END!r}")
    lines = {
        line.split("|")[1].strip(): line for line in kept.splitlines()[3:] if line.startswith("|")
    }
    for r in results:
        slow = "yes" if full and NO_SLOW not in r.part.options else "no"
        cells = (r.passed, r.failed, r.skipped, f"{r.seconds:.0f}", verdict(r), slow, commit, date)
        lines[r.part.title] = f"| {r.part.title} | " + " | ".join(map(str, cells)) + " |"
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    order = {
        part.title: place for place, part in enumerate((*BUILDS, *PARTS, *SAMPLES, *FULL_PARTS))
    }
    body = [lines[title] for title in sorted(lines, key=lambda title: order.get(title, len(order)))]
    return f"{before}{START}\n" + "\n".join([*head, *body]) + f"\n{END}{after}"


def commit() -> str:
    """Return the checked-out commit, with "+changes" if files differ from it."""
    head, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in (
            ("rev-parse", "--short=12", "HEAD"),
            # --summary writes it
            ("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/results.md"),
        )
    )
    return (head or "unknown") + ("+changes" if changes else "")


def main() -> int:
    parts = {part.name: part for part in (*PARTS, *SAMPLES, *FULL_PARTS)}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument(
        "--full",
        action="store_true",
        help="slow tests, other instruction sets and sanitizers too; no budgets",
    )
    parser.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help="Markdown file whose table of parts is brought up to date",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if early := (
        set(arguments.parts) & {part.name for part in FULL_PARTS} if not arguments.full else None
    ):
        parser.error(f"{', '.join(sorted(early))}: a part of --full")
    RESULTS.mkdir(parents=True, exist_ok=True)
    before, results = commit(), [install(arguments.full)]
    if not failed(results[0]):
        results.append(build(CUDA_BUILD, arguments.full))  # does nothing without nvcc
    if not any(map(failed, results)):
        known = (*PARTS, *(FULL_PARTS if arguments.full else SAMPLES))
        expected = [
            part
            for part in known
            if part.name in (arguments.parts or parts) and (part.name == BENCH or paths(part))
        ]
        results += [run(part, arguments.full) for part in expected]
    print("\n" + summary(results), flush=True)
    if arguments.summary:
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        text = recorded(
            arguments.summary.read_text(), results[len(BUILDS) :], arguments.full, before, today
        )
        arguments.summary.write_text(text)
    return 1 if any(result.problem for result in results) or len(results) <= len(BUILDS) else 0


if __name__ == "__main__":
    sys.exit(main())
