# SPDX-License-Identifier: Apache-2.0
"""The process that checks and times backends.

It reads one JSON list of jobs from stdin and writes one JSON line per job to stdout, in order. If
it hangs, crashes or loses its CUDA context, pytransformer/ops/_core/checking.py uses the lines
written so far.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from pytransformer.cli import providers
from pytransformer.cli.benchmark import check, clock, exact
from pytransformer.cli.benchmark.plan import DTYPES
from pytransformer.cli.verify.plan import first_checks, size_of, sized
from pytransformer.ops._core.verification import DECLINED, MAX_SIZE, RIGHT, UNCHECKED
from pytransformer.testing.cases import Case, case

Line = dict[str, Any]
MIN_TIME, MIN_ROUNDS = 0.02, 5


def main() -> None:
    """Write answers to the original stdout; output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)  # checks are small, and starting threads would dominate
    print(json.dumps("ready"), file=answers, flush=True)
    for job in json.loads(sys.stdin.readline()):
        line = _DO[job["do"]](job)
        if lost := _lost_context(job):
            line |= {"no more": True} | (
                {"outcome": "crashed", "detail": lost} if line.get("outcome") == RIGHT else {}
            )
        print(json.dumps(line), file=answers, flush=True)
        if lost:
            return


def _lost_context(job: Line) -> str | None:
    """Return a late CUDA error after all work has ended, or None."""
    if job["device"] != "cuda":
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def check_case(found: Case, dtype: torch.dtype, device: str, backend: str) -> Line:
    """Check forward and backward of one case on one backend against float64 and its bounds."""
    problem = providers.Problem.make(found, dtype, device, seed=1, grad=True)
    line: Line = {
        "op": found.op, "backend": backend, "dtype": str(dtype)[6:], "case": found.name,
        "size": size_of(found),
    }  # fmt: skip
    try:
        grads = None if found.forward_only else check.upstream(problem, seed=2)
        results = check.compute(problem, providers.prepare_ours(backend, problem), grads)
        judged = check.judge(problem, results, exact.solve(problem, grads), peer=False)
    except providers.Unsupported as reason:
        return line | {"outcome": DECLINED, "detail": str(reason)}
    except Exception as error:  # report any error as the result
        cause = error.__cause__ or error
        return line | {
            "outcome": "failed",
            "detail": f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}",
        }
    used = judged.bound_used
    return line | {
        "outcome": "wrong" if judged.wrong else RIGHT, "detail": (judged.wrong or "")[:300] or None,
        "bound_used": used if used < 1e9 else None,
    }  # fmt: skip


def _check(job: Line) -> Line:
    found = sized(case(job["case"]), job["last"]) if job.get("last") else case(job["case"])
    return job | check_case(found, DTYPES[job["dtype"]], job["device"], job["backend"])


def _check_first(job: Line) -> Line:
    """Check cases at the call's last dimension until one is wrong or the time is up."""
    until = time.monotonic() + job["seconds"]
    if job["device"] == "cuda" and job["index"] is not None:
        torch.cuda.set_device(job["index"])
    lines: list[Line] = []
    for found in first_checks(job["op"], min(job["last"], MAX_SIZE)):
        line = check_case(found, DTYPES[job["dtype"]], job["device"], job["backend"])
        lines.append(line | {"last": job["last"], "size": job["size"]})
        if line["outcome"] not in (RIGHT, DECLINED):
            detail = f"{line['case']}: {line['detail']}"
            return job | {"outcome": line["outcome"], "detail": detail, "lines": lines}
        if time.monotonic() > until:
            break
    outcome = RIGHT if any(line["outcome"] == RIGHT for line in lines) else UNCHECKED
    return job | {"outcome": outcome, "detail": None, "lines": lines}


def _time(job: Line) -> Line:
    """Return interleaved milliseconds of forward plus backward on each backend of the job."""
    torch.set_num_threads(job["threads"])
    found = case(job["case"], "medium").resize(**job["shape"])
    problem = providers.Problem.make(found, DTYPES[job["dtype"]], job["device"], seed=1, grad=True)
    grads = check.upstream(problem, seed=2)
    contenders = {}
    for backend in job["backends"]:
        try:
            prepared = providers.prepare_ours(backend, problem)
        except providers.Unsupported:
            continue

        def step(prepared: providers.Prepared = prepared) -> None:
            check.gradients(problem, prepared.forward(), grads)

        contenders[backend] = clock.Contender(step, prepared.context)
    try:
        times = clock.interleaved(
            contenders, min_time=MIN_TIME, min_rounds=MIN_ROUNDS, device=job["device"]
        )
    except Exception as error:  # out of memory, for example: no times, no order
        return job | {
            "outcome": "failed",
            "detail": f"{type(error).__name__}: {error}"[:300],
            "ms": {},
        }
    return job | {
        "outcome": RIGHT,
        "detail": None,
        "ms": {name: t.median_ms for name, t in times.items()},
    }


_DO = {"check": _check, "first": _check_first, "time": _time}
