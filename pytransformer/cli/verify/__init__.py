# SPDX-License-Identifier: Apache-2.0
"""Checks every backend on this machine against float64, times those that are right, and keeps the verdict.

Each op, dtype and kind of problem, forward and backward, each backend in a process of its own with a time limit: one that hangs or
crashes costs itself alone. The verdict goes into the user's cache directory, for this device, driver, torch, Triton and build of ours,
and from then on says which backend a call runs on. Exit code 1 if one is wrong.
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
from pytransformer.ops._core import checking, verdict_file, verdicts
from pytransformer.ops._core.deadline import Deadline, Stopwatch
from pytransformer.ops._core.registry import BACKENDS, OPS

DEVICE_SECONDS = 120.0  # on an idle machine of nominal speed: see deadline.py
JOB_SECONDS = 30.0  # a kernel or two to compile, a small problem to compute
CHECKS_SHARE = 0.75  # of the time; the rest is for times
CORES_A_PROCESS = 4

Line = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object instead of text")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"this one alone; may be repeated ({', '.join(BACKENDS)}; default: all but the oracle)",
    )
    parser.add_argument("--op", action="append", metavar="OP", help=f"this one alone; may be repeated ({', '.join(OPS)})")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), action="append", help="default: the CPU, and the GPU if there is one"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="time for a device; what is not checked then is left to the next run (120 on an idle machine, more on a slow or busy one)",
    )


def run(arguments: argparse.Namespace) -> int:
    for name, found, known in (("--op", arguments.op, list(OPS)), ("--backend", arguments.backend, list(BACKENDS))):
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
            d, arguments.op or list(OPS), arguments.backend or [b for b in BACKENDS if b != "reference"], arguments.seconds
        )
        for d in devices
    ]
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for verdict in found:
            show(Console(), verdict)
    return WRONG if any(bad(line) for verdict in found for line in verdict["checks"]) else OK


def bad(line: Line) -> bool:
    return line["outcome"] not in (verdicts.RIGHT, verdicts.DECLINED, verdicts.UNCHECKED)


def examine(kind: str, ops: list[str], backends: list[str], seconds: float | None) -> Line:
    """Check and time on the current device of this type, and write the verdict: its contents, and its path. A run whose time was up is gone
    on with by the next: what it found right, or declined, stays checked."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    began, until = time.monotonic(), Deadline(seconds or DEVICE_SECONDS, Stopwatch(exact=seconds is not None))
    all_jobs = {b: plan.checks(b, kind, ops) for b in backends if plan.is_for(b, kind)}
    kept, jobs = plan.continued(verdict_file.own(device), all_jobs)
    checks = kept + [plan.checked(line) for line in _checked(kind, jobs, until)]
    timing = plan.timings(checks, kind, ops)
    times = checking.run_jobs(timing, seconds=JOB_SECONDS, until=until) if timing else []
    verdict = merged(verdict_file.load(device), checks, times)
    verdict |= {
        "written": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
    }
    path = verdict_file.save(device, verdict)
    verdicts.forget()
    return {"key": verdict_file.key(device), "path": None if path is None else str(path), **verdict}


def _checked(kind: str, jobs: dict[str, list[Line]], whole: Deadline) -> list[Line]:
    """The results. On a GPU, where compilers take the time, backends are checked side by side, by several processes each."""
    apart = max(1, machine.usable_cores() // CORES_A_PROCESS) if kind == "cuda" else 1
    parts = [(backend, own[i::apart]) for i in range(apart) for backend, own in jobs.items() if own[i::apart]]
    lock, results, seconds = threading.Lock(), list[Line](), CHECKS_SHARE * whole.seconds
    with Console(sys.stderr).progress(sum(map(len, jobs.values())), seconds=seconds) as progress:

        def told(line: Line) -> None:
            with lock:
                progress.advance()
                if progress.done % 20 == 0 or bad(line):
                    progress.step(f"{line['backend']} {line['op']} {line['case']} {line['dtype']}: {line['outcome']}")

        def run_part(turn: int) -> list[Line]:
            backend, own = parts[turn]
            with lock:
                progress.step(f"{kind}: the backend {backend}")
            share = 1.0 if kind == "cuda" else (turn + 1) / len(parts)
            until = Deadline(max(share * seconds, whole.watch.count() + 1), whole.watch)
            return checking.run_jobs(own, seconds=JOB_SECONDS, until=until, told=told)

        with ThreadPoolExecutor(max(1, len(parts)) if kind == "cuda" else 1) as pool:
            for found in pool.map(run_part, range(len(parts))):
                results += found
    return results


def merged(before: Line | None, checks: list[Line], times: list[Line]) -> Line:
    """The new verdict, with what an earlier one says of ops and backends that this run left out."""
    ran = {(line["op"], line["backend"]) for line in checks}
    kept = [line for line in (before or {}).get("checks", []) if (line["op"], line["backend"]) not in ran]
    complete = [c for c in (before or {}).get("complete", []) if (c[0], c[1]) not in ran]
    order = plan.order(times)
    return {
        "checks": kept + checks,
        "complete": complete + plan.complete(checks),
        "times": [{k: line.get(k) for k in ("op", "case", "dtype", "ms")} for line in times],
        "order": {**(before or {}).get("order", {}), **order},
    }


def show(console: Console, verdict: Line) -> None:
    key = verdict["key"]
    console.heading(f"{key['device']}, torch {key['torch']}, Triton {key['triton'] or 'not installed'}")
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for line in verdict["checks"]:
        counts = rows.setdefault(
            (line["op"], line["backend"]), dict.fromkeys(("right", "declined", "not checked", "wrong"), 0)
        )
        counts["wrong" if bad(line) else line["outcome"]] += 1
    shown = [
        (op, backend, *counts.values(), " then ".join(verdict["order"].get(op, ())))
        for (op, backend), counts in sorted(rows.items())
    ]
    console.table(("op", "backend", "right", "declined", "not checked", "WRONG", "order"), shown)
    wrong = [line for line in verdict["checks"] if bad(line)]
    if wrong:
        console.heading("Not right here, and not used for such calls")
        console.table(
            ("backend", "op", "case", "dtype", "outcome", "what was found"),
            [
                (x["backend"], x["op"], x.get("case") or "", x["dtype"], x["outcome"].upper(), x.get("detail") or "")
                for x in wrong
            ],
        )
    where = verdict["path"] or "nowhere: the cache directory cannot be written"
    console.print(f"{len(verdict['checks'])} checks in {verdict['seconds']} s, {len(wrong)} not right. Kept in {where}")
    if left := sum(line["outcome"] == verdicts.UNCHECKED for line in verdict["checks"]):
        console.print(f"{left} not checked: run it again, which goes on from here")
