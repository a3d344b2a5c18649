"""The whole test run, in parts with a time budget each: what `make test` does.

    python3 tests/run_parts.py           the parts within their budgets
    python3 tests/run_parts.py --full    slow tests too, the other instruction sets, the sanitizers; no budgets
    python3 tests/run_parts.py cpu ...   only the parts named

A part fails if its tests fail, if it ran none, or if it takes longer than its budget; at twice the budget it is interrupted.
Every file and folder of tests/ belongs to one part: those that no other part names belong to `cpu`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
RESULTS = ROOT / "build" / "test-results"
# pytest may live in the environment that .venv shares torch with, without a script in .venv; and Python 3.10 knows no -P,
# so the empty path, under which kernels/ would be found, is taken off here.
PYTEST = [
    str(ROOT / ".venv" / "bin" / "python"),
    "-c",
    "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main(sys.argv[1:]))",
]
REST = "cpu"


class Part(NamedTuple):
    name: str
    title: str
    minutes: float
    folders: tuple[str, ...] = ()  # of tests/; patterns in the parts of --full
    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()  # of pytest


INSTALL = Part("install", "install and build", 5)
PARTS = (
    Part(REST, "reference and cpu", 10),
    Part("triton", "triton, interpreted and compiled", 7, ("triton",), (("TRITON_INTERPRET", "1"),)),
    Part("cuda", "CUDA build and resources", 6, ("cuda",)),
    Part("emulator", "CUDA kernels emulated", 6, ("emulator",)),
    Part("models", "models and integrations", 6, ("nn", "models", "integrations", "training", "viz")),
)
# The ops again on kernels that this machine would not choose, and under the sanitizers: parts of --full.
OPS = ("ops", "test_fuzz*.py")
GENERIC = Part("generic", "cpu, generic instruction set", 0, OPS, (("PYTRANSFORMER_CPU_ISA", "generic"),), ("-k", "cpu"))
SANITIZE = Part("sanitize", "cpu under sanitizers", 0, OPS, (), ("-k", "cpu", "--fuzz-cases=300"))


class Result(NamedTuple):
    part: Part
    seconds: float
    problem: str | None
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def paths(part: Part) -> list[str]:
    """The entries of tests/ that belong to `part` and exist."""
    if part not in PARTS:
        return [str(path.relative_to(ROOT)) for pattern in part.folders for path in sorted(TESTS.glob(pattern))]
    named = {folder for other in PARTS for folder in other.folders}
    entries = [path for path in sorted(TESTS.iterdir()) if path.is_dir() or path.name.startswith("test_")]
    mine = [path for path in entries if path.name in part.folders or (part.name == REST and path.name not in named)]
    return [str(path.relative_to(ROOT)) for path in mine if path.is_file() or any(path.rglob("test_*.py"))]


def timed(command: list[str], limit: float | None, environment: tuple[tuple[str, str], ...] = ()) -> tuple[int, float]:
    """Runs `command`, interrupting it after `limit` seconds; returns its exit code and the seconds it took."""
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"} | dict(environment))
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then still prints what it has
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    return code, time.monotonic() - start


def over_budget(part: Part, seconds: float, full: bool) -> str | None:
    return None if full or seconds <= 60 * part.minutes else f"took longer than its {part.minutes:g} minutes"


def install(full: bool) -> Result:
    # Without the native code this run would test only half of what it says.
    os.environ.setdefault("PYTRANSFORMER_CPU", "1")
    if not full:  # all five instruction sets and three GPU architectures would take longer to compile than the budget
        os.environ.setdefault("PYTRANSFORMER_CPU_ISAS", "native")
        os.environ.setdefault("PYTRANSFORMER_CUDA_ARCHS", "sm_90a")
    code, seconds = timed([sys.executable, str(ROOT / "bench" / "tools" / "install.py")], None)
    return Result(INSTALL, seconds, f"exit code {code}" if code else over_budget(INSTALL, seconds, full))


def counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped tests of a JUnit report; zeros if pytest did not get so far as to write one."""
    if not report.is_file():
        return 0, 0, 0
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    total, failures, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    return total - failures - errors - skipped, failures + errors, skipped


def test(part: Part, full: bool) -> Result:
    print(f"\n---- {part.title} ({'no budget' if full else f'{part.minutes:g} minutes'})", flush=True)
    report = RESULTS / f"{part.name}.xml"
    report.unlink(missing_ok=True)
    markers = "not gpu" if full else "not gpu and not slow"
    command = [*PYTEST, "-m", markers, f"--junitxml={report}", "-o", "junit_family=xunit1", "--durations=5"]
    command += [*part.options, *paths(part)]
    code, seconds = timed(command, None if full else 120 * part.minutes, part.environment)
    problem = over_budget(part, seconds, full)
    if code:
        problem = "ran no test" if code == 5 else f"pytest exit code {code}"
    return Result(part, seconds, problem, *counts(report))


def test_sanitized() -> Result:
    """The ops with the library of a second copy of the package, built with GCC's sanitizers."""
    copy = ROOT / "build" / "sanitized"
    options = (("PYTRANSFORMER_BUILD_SANITIZE", "address,undefined"), ("PYTRANSFORMER_BINDINGS", "0"))
    options += (("PYTRANSFORMER_CPU_ISAS", "native"), ("CXX", "g++"))
    build = [str(ROOT / ".venv" / "bin" / "python"), "setup.py", "-q", "build", "--build-lib", str(copy)]
    code, seconds = timed(build, None, options)
    if code:
        return Result(SANITIZE, seconds, f"building: exit code {code}")
    names = ("libasan.so", "libstdc++.so")
    libraries = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = (
        ("LD_PRELOAD", ":".join(libraries)),  # Python itself is not built with them
        ("ASAN_OPTIONS", "detect_leaks=0"),  # Python leaks by design
        ("UBSAN_OPTIONS", "print_stacktrace=1"),
        ("PYTHONPATH", str(copy)),
    )
    return test(SANITIZE._replace(environment=environment), True)


def summary(results: list[Result]) -> str:
    lines = [f"{'part':34} {'time':>8} {'budget':>8}  {'passed':>6} {'failed':>6} {'skipped':>7}"]
    for r in results:
        counted = f"{r.passed:6} {r.failed:6} {r.skipped:7}" if r.part is not INSTALL else " " * 21
        lines.append(f"{r.part.title:34} {r.seconds:6.0f} s {60 * r.part.minutes:6.0f} s  {counted}  {r.problem or 'ok'}")
    total = f"total: {sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed"
    return "\n".join([*lines, f"{total}, {sum(r.skipped for r in results)} skipped"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(part.name for part in PARTS))
    parser.add_argument(
        "--full", action="store_true", help="slow tests, other instruction sets and sanitizers too; no budgets"
    )
    arguments = parser.parse_args()
    names = [part.name for part in PARTS]
    if unknown := set(arguments.parts) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = [install(arguments.full)]
    if results[0].problem is None:
        wanted = [part for part in PARTS if part.name in (arguments.parts or names) and paths(part)]
        results += [test(part, arguments.full) for part in wanted]
        if arguments.full and not arguments.parts:
            results += [test(GENERIC, True), test_sanitized()]
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) or len(results) == 1 else 0


if __name__ == "__main__":
    sys.exit(main())
