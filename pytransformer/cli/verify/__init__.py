# SPDX-License-Identifier: Apache-2.0
"""Check every backend on this machine against float64, time those that pass.

Each op, dtype and case, forward and backward, runs in a child process with a
time limit. A backend that hangs or crashes loses only its own checks. The
results are stored in the user's cache directory for this device, driver, torch,
Triton and build. From then on they decide which backend a call uses. The exit
code is 1 if a backend is wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pytransformer.cli import OK, WRONG, UsageError, machine
from pytransformer.cli.verify import plan
from pytransformer.console import Console
from pytransformer.ops._core import checking, verification
from pytransformer.ops._core.checking import Deadline, slowness
from pytransformer.ops._core.registry import BACKENDS, OPS

# On an idle machine of nominal speed: see checking.slowness.
DEVICE_SECONDS = 120.0
JOB_SECONDS = 30.0  # one or two kernel compilations and a small problem
CHECKS_SHARE = 0.75  # share of the time; the rest is for timing
CORES_A_PROCESS = 4

Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    parser.add_argument("--json", action="store_true",
        help="print the results as one JSON object instead of text")
    parser.add_argument("--backend", action="append", metavar="NAME",
        help=f"this one alone; may be repeated ({', '.join(BACKENDS)}; default: all but the"
        " oracle)")
    parser.add_argument("--op", action="append", metavar="OP",
        help=f"this one alone; may be repeated ({', '.join(OPS)})")
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append",
        help="default: the CPU, and the GPU if there is one")
    parser.add_argument("--seconds", type=float, metavar="N",
        help="time for a device; what is not checked then is left to the next run (120 on an idle"
        " machine, more on a slow or busy one)")
    # fmt: on


def run(arguments: argparse.Namespace) -> int:
    for name, found, known in (
        ("--op", arguments.op, list(OPS)),
        ("--backend", arguments.backend, list(BACKENDS)),
    ):
        for word in found or ():
            if word not in known:
                raise UsageError(f"{name}: got {word!r}; there are {', '.join(known)}")
    if arguments.seconds is not None and arguments.seconds <= 0:
        raise UsageError(f"--seconds must be greater than 0, got {arguments.seconds}")
    devices = arguments.device or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    if "cuda" in devices and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here")
    found = [
        examine(
            d,
            arguments.op or list(OPS),
            arguments.backend or [b for b in BACKENDS if b != "reference"],
            arguments.seconds,
        )
        for d in devices
    ]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for results in found:
            show(Console(), results)
    return WRONG if any(bad(line) for results in found for line in results["checks"]) else OK


def bad(line: Line) -> bool:
    return line["outcome"] not in (
        verification.RIGHT,
        verification.DECLINED,
        verification.UNCHECKED,
    )


def examine(kind: str, ops: list[str], backends: list[str], seconds: float | None) -> Line:
    """Check and time on the current device of this type; store and return the results.

    The results hold their path. If the time runs out, the next run continues: cases that passed or
    were declined stay checked.
    """
    device = (
        torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
    slow = slowness()
    whole = Deadline(seconds or slow * DEVICE_SECONDS)
    all_jobs = {b: plan.checks(b, kind, ops) for b in backends if plan.is_for(b, kind)}
    kept, jobs = plan.continued(verification.load_file(device), all_jobs)
    checks = kept + [plan.checked(line) for line in _checked(kind, jobs, slow, whole)]
    timing = plan.timings(checks, kind, ops)
    times = checking.run_jobs(timing, seconds=slow * JOB_SECONDS, until=whole) if timing else []
    results: Line = {}

    def change(before: Line | None) -> Line:
        results.update(merged(before, checks, times))
        now = datetime.datetime.now(datetime.timezone.utc)
        results["written"] = now.isoformat(timespec="seconds")
        results["seconds"] = round(time.monotonic() - whole.start, 1)
        return results

    path = verification.update_file(device, change)
    verification.forget()
    where = None if path is None else str(path)
    return {"key": verification.file_key(device), "path": where, **results}


def _checked(kind: str, jobs: dict[str, list[Line]], slow: float, whole: Deadline) -> list[Line]:
    """Return the results; on a GPU, where compiling dominates, backends run in parallel."""
    apart = max(1, machine.usable_cores() // CORES_A_PROCESS) if kind == "cuda" else 1
    parts = [
        (backend, own[i::apart])
        for i in range(apart)
        for backend, own in jobs.items()
        if own[i::apart]
    ]
    lock, results, seconds = threading.Lock(), list[Line](), CHECKS_SHARE * whole.seconds
    with Console(sys.stderr).progress(sum(map(len, jobs.values())), seconds=seconds) as progress:

        def told(line: Line) -> None:
            with lock:
                progress.advance()
                if progress.done % 20 == 0 or bad(line):
                    progress.step(
                        f"{line['backend']} {line['op']} {line['case']} {line['dtype']}:"
                        f" {line['outcome']}"
                    )

        def run_part(turn: int) -> list[Line]:
            backend, own = parts[turn]
            with lock:
                progress.step(f"{kind}: the backend {backend}")
            share = 1.0 if kind == "cuda" else (turn + 1) / len(parts)
            until = Deadline(max(share * seconds - (time.monotonic() - whole.start), 1.0))
            return checking.run_jobs(own, seconds=slow * JOB_SECONDS, until=until, told=told)

        with ThreadPoolExecutor(max(1, len(parts)) if kind == "cuda" else 1) as pool:
            for found in pool.map(run_part, range(len(parts))):
                results += found
    return results


def merged(before: Line | None, checks: list[Line], times: list[Line]) -> Line:
    """Return the new results plus the earlier ones of ops and backends that this run skipped."""
    ran = {(line["op"], line["backend"]) for line in checks}
    kept = [
        line
        for line in (before or {}).get("checks", [])
        if (line["op"], line["backend"]) not in ran
    ]
    complete = [c for c in (before or {}).get("complete", []) if (c[0], c[1]) not in ran]
    order = plan.order(times)
    return {
        "checks": kept + checks,
        "complete": complete + plan.complete(checks),
        "times": [{k: line.get(k) for k in ("op", "case", "dtype", "ms")} for line in times],
        "order": {**(before or {}).get("order", {}), **order},
    }


def show(console: Console, results: Line) -> None:
    key = results["key"]
    console.heading(
        f"{key['device']}, torch {key['torch']}, Triton {key['triton'] or 'not installed'}"
    )
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for line in results["checks"]:
        counts = rows.setdefault(
            (line["op"], line["backend"]),
            dict.fromkeys(("right", "declined", "not checked", "wrong"), 0),
        )
        counts["wrong" if bad(line) else line["outcome"]] += 1
    shown = [
        (op, backend, *counts.values(), " then ".join(results["order"].get(op, ())))
        for (op, backend), counts in sorted(rows.items())
    ]
    console.table(("op", "backend", "right", "declined", "not checked", "WRONG", "order"), shown)
    wrong = [line for line in results["checks"] if bad(line)]
    if wrong:
        console.heading("Not right here, and not used for such calls")
        console.table(
            ("backend", "op", "case", "dtype", "outcome", "details"),
            [
                (
                    x["backend"],
                    x["op"],
                    x.get("case") or "",
                    x["dtype"],
                    x["outcome"].upper(),
                    x.get("detail") or "",
                )
                for x in wrong
            ],
        )
    where = results["path"] or "nowhere: the cache directory cannot be written"
    console.print(
        f"{len(results['checks'])} checks in {results['seconds']} s, {len(wrong)} not right. Kept"
        f" in {where}"
    )
    if left := sum(line["outcome"] == verification.UNCHECKED for line in results["checks"]):
        console.print(f"{left} not checked: run it again to resume")
