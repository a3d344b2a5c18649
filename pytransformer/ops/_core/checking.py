# SPDX-License-Identifier: Apache-2.0
"""Backend checks in a child process, so that a hang, crash or lost CUDA context stays there.

`slowness` stretches time limits on a slow or busy machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

WORKER = "pytransformer.cli.verify.worker"  # imported by name: it is above this layer
PREAMBLE = ""  # code that the process runs first; tests inject faults with it
TIME_UP = "the time was up"
START_SECONDS = 300.0  # to import torch, on a busy machine too
MOST_STARTS = 6  # maximum number of processes per run of jobs
# The child forces backends and starts no child. Libraries use one thread because checks are small.
ENVIRONMENT = {"PYTRANSFORMER_VERIFY": "off", "PYTRANSFORMER_STRICT": "0"}

Line = dict[str, Any]


def run_jobs(
    jobs: Sequence[Line],
    *,
    seconds: float,
    until: Deadline | None = None,
    told: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Return the results of the jobs, in order, and pass each to ``told`` as it arrives.

    A job that exceeds ``seconds`` has the outcome "hung", and one whose process dies has "crashed";
    a new process runs the rest. Jobs not finished by ``until``, or whose process did not start
    within START_SECONDS, are "not checked".
    """
    until = until or Deadline(float("inf"))
    results: list[Line] = []
    starts = 0
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        late = not until.left()
        found: Iterable[Line]
        if late or starts == MOST_STARTS:
            why = TIME_UP if late else f"{starts} processes were lost before it"
            found = (_lost(job, "not checked", why) for job in rest)
        else:
            starts += 1
            found = _one_process(rest, seconds, until)
        for line in found:
            told(line)
            results.append(line)
    return results


def _one_process(jobs: Sequence[Line], seconds: float, until: Deadline) -> Iterator[Line]:
    """Yield at least one result, until the jobs or the process end."""
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                (
                    f"import sys; sys.path[:] = {sys.path!r}; {PREAMBLE}\nfrom {WORKER} import"
                    " main; main()"
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        )
    except (OSError, ValueError, TypeError) as error:
        yield _lost(jobs[0], "not checked", f"no process could be started: {error}")
        return
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(list(jobs)) + "\n")
            process.stdin.close()
        if why := _why_not_ready(process, lines, until):
            yield _lost(jobs[0], "not checked", why)
            return
        for job in jobs:
            began = time.monotonic()
            text = _answer(lines, Deadline(seconds), until)
            if text is None:
                late, waited = not until.left(), f"{time.monotonic() - began:.3g} s"
                yield (
                    _lost(job, "not checked", TIME_UP)
                    if late
                    else _lost(job, "hung", f"no answer in {waited}")
                )
                return
            if not text:
                yield _lost(job, "crashed", _how_it_ended(process))
                return
            line = json.loads(text)
            yield line
            if line.get("no more"):  # the process reports that its context is lost
                return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join()


def _why_not_ready(
    process: subprocess.Popen[str], lines: queue.Queue[str], until: Deadline
) -> str | None:
    """Wait for the worker's first line, printed after its imports; return an error or None."""
    text = _answer(lines, Deadline(START_SECONDS), until)
    if text is None:
        return f"the process did not start in {START_SECONDS:g} s" if until.left() else TIME_UP
    return None if text else f"the process did not start: {_how_it_ended(process)}"


def _answer(lines: queue.Queue[str], *limits: Deadline) -> str | None:
    """Return the next line, "" if the process ended, or None if a limit is reached."""
    with contextlib.suppress(queue.Empty):
        return lines.get(timeout=min(limit.left() for limit in limits))
    return None


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        for text in process.stdout:
            lines.put(text)
    lines.put("")


def _how_it_ended(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return (
        f"the process ended by {signal.Signals(-code).name}"
        if code < 0
        else f"the process ended with code {code}"
    )


def _lost(job: Mapping[str, Any], outcome: str, detail: str) -> Line:
    return {**job, "outcome": outcome, "detail": detail}


NOMINAL = 0.0045  # seconds of loop_time on an idle AMD EPYC (Zen 5) under Python 3.11
MOST = 6.0  # maximum slowdown: a hang must end on a busy machine too


def loop_time() -> float:
    """Return the seconds of a loop of known cost, which grow on a slow or shared core."""
    start, total = time.monotonic(), 0
    for i in range(100_000):
        total += i * i % 7
    return time.monotonic() - start


def slowness() -> float:
    """Return how many times slower than an idle nominal core this machine is, from 1 to MOST."""
    return min(max(1.0, statistics.mean(loop_time() for _ in range(9)) / NOMINAL), MOST)


class Deadline:
    """A limit in seconds from its creation."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.monotonic()

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.seconds - (time.monotonic() - self.start))
