# SPDX-License-Identifier: Apache-2.0
"""Time two builds of the package and their peers in turns, sample by sample: A/B/A/B.

    python bench/tools/turns.py FILE --base FOLDER --candidate FOLDER --seconds 220 --out FOLDER

A line of FILE is NAME SECONDS and the arguments of `pytransformer bench`, as for steps.py. A
package cannot be imported twice, because its ops are registered with torch. Each build therefore
has a process of its own, which stays warm and takes one sample when the parent sends a line. The
order rotates, and every other round runs backwards. Peers run in the candidate's process.

The tool prints, by case and mode, the median of each contender and the ratio base/candidate of the
same round (p20, median, p80); OUT gets turns.json.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_ROUNDS, MAX_ROUNDS = 5, 100
PATIENCE = 60.0  # seconds for a worker's reply: the first call of a kernel may compile it
BASE, CANDIDATE = "base", "candidate"


class WorkerError(Exception):
    """A worker's process failed or did not reply; the message has the reason."""


class Worker:
    """A process that imports one build and carries out a command per line."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(folder.resolve()), "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def request(self, command: str, **arguments: Any) -> Any:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps([command, arguments]) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"the process ended ({error})") from error
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            self.close()
            raise WorkerError(f"{command}: no reply in {PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(f"{command}: exit code {self.process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Session:
    """A worker's side: the steps of a line, and one prepared contender per name."""

    def __init__(self) -> None:
        self.contenders: dict[str, Any] = {}
        self.steps: list[Any] = []

    def open(self, arguments: list[str]) -> list[dict[str, Any]]:
        """Return the problems of a line."""
        from pytransformer.cli import build_parser
        from pytransformer.cli.benchmark import clock, command, plan

        parsed = build_parser().parse_args(["bench", *arguments])
        self.device = parsed.device
        self.clock = clock._clock(self.device, False)
        self.steps = command._steps(parsed, command._ops(parsed.ops))
        return [
            {
                "op": s.case.op,
                "case": s.case.name,
                "shape": dict(s.case.shape),
                "dtype": plan.dtype_name(s.dtype),
                "mode": s.mode,
                "backends": list(parsed.backends or ()),
            }
            for s in self.steps
        ]

    def prepare(self, step: int, backend: str) -> float:
        """Return the seconds of a warm call."""
        from pytransformer.cli.benchmark import clock
        from pytransformer.cli.benchmark.runner import SEED, work
        from pytransformer.cli.providers import Problem, providers

        s = self.steps[step]
        problem = Problem.make(
            s.case, s.dtype, self.device, seed=SEED, grad=s.mode != "fwd", on_device=True
        )
        prepared = next(p for p in providers(s.case.op) if p.name == backend).prepare(problem)
        contender = clock.Contender(work(problem, prepared, s.mode), prepared.context)
        with contender.context():
            seconds = clock._warmed_up(self.clock, contender.call)
        self.contenders[backend] = contender
        return seconds

    def sample(self, backend: str, repeats: int) -> float:
        contender = self.contenders[backend]
        with contender.context():
            return self.clock.sample(contender.call, repeats)

    def drop(self) -> None:
        self.contenders.clear()


def serve() -> int:
    """Carry out commands until the input ends; other output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    session = Session()
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            reply = {"result": getattr(session, command)(**arguments)}
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


def quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.5, 0.8)]


def timed(
    workers: dict[str, Worker], step: int, backends: list[str], peers: set[str], seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the samples of one problem by contender, "base cuda" first, and the reasons of others.

    Samples of one index belong to one round.
    """
    repeats: dict[str, int] = {}
    reasons: dict[str, str] = {}
    end = time.monotonic() + seconds
    for who in (BASE, CANDIDATE):
        for backend in backends:
            if backend in peers and who == BASE:
                continue
            name = backend if backend in peers else f"{who} {backend}"
            try:
                warm = workers[who].request("prepare", step=step, backend=backend)
                repeats[name] = max(1, round(2e-3 / max(warm, 1e-6)))
            except WorkerError as error:
                reasons[name] = str(error)
    # Both builds take equally many calls per sample.
    for backend in backends:
        pair = [n for n in (f"{BASE} {backend}", f"{CANDIDATE} {backend}") if n in repeats]
        for name in pair:
            repeats[name] = min(repeats[n] for n in pair)
    samples: dict[str, list[float]] = {name: [] for name in repeats}
    names = list(repeats)
    for turn in range(MAX_ROUNDS if names else 0):
        if turn >= MIN_ROUNDS and time.monotonic() >= end:
            break
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order if turn % 2 == 0 else reversed(order):
            who, _, backend = name.rpartition(" ")
            worker = workers[who or CANDIDATE]
            samples[name].append(worker.request("sample", backend=backend, repeats=repeats[name]))
    for worker in workers.values():
        worker.request("drop")
    return samples, reasons


def row_of(
    problem: dict[str, Any], samples: dict[str, list[float]], reasons: dict[str, str]
) -> dict[str, Any]:
    contenders = {
        name: dict(zip(("p20_ms", "median_ms", "p80_ms"), (1e3 * s for s in quantiles(taken))))
        for name, taken in samples.items()
    }
    ratios = {}
    for name, taken in samples.items():
        who, _, backend = name.rpartition(" ")
        if who == BASE and (new := samples.get(f"{CANDIDATE} {backend}")):
            ratios[backend] = quantiles([a / b for a, b in zip(taken, new)])
    return {**problem, "contenders": contenders, "base_over_candidate": ratios, "not_run": reasons}


def report(row: dict[str, Any]) -> Iterator[str]:
    times = "; ".join(f"{n} {c['median_ms']:.4f}" for n, c in row["contenders"].items())
    yield f"  {row['op']} {row['case']} {row['mode']}: {times} ms"
    for backend, (low, middle, high) in row["base_over_candidate"].items():
        yield f"    {backend}: base/candidate {middle:.3f} ({low:.3f} to {high:.3f})"
    yield from (f"    {name}: {reason[:120]}" for name, reason in row["not_run"].items())


def run(options: argparse.Namespace) -> int:
    from pytransformer.cli.providers import PEERS

    workers = {BASE: Worker(options.base), CANDIDATE: Worker(options.candidate)}
    rows: list[dict[str, Any]] = []
    end, failed = time.monotonic() + options.seconds, False
    try:
        for line in options.file.read_text().splitlines():
            name, seconds, *arguments = shlex.split(line)
            limit = min(float(seconds), end - time.monotonic())
            if limit < 1:
                print(f"{name}: left out, no time", flush=True)
                continue
            problems = [worker.request("open", arguments=arguments) for worker in workers.values()][
                -1
            ]
            print(name, flush=True)
            for step, problem in enumerate(problems):
                backends = problem.pop("backends")
                share = limit / len(problems)
                row = row_of(problem, *timed(workers, step, backends, {*PEERS}, share))
                rows.append({"name": name, **row})
                print(*report(row), sep="\n", flush=True)
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "turns.json").write_text(json.dumps(rows, indent=1))
    except WorkerError as error:
        print(f"stopped: {error}", flush=True)
        failed = True
    finally:
        for worker in workers.values():
            worker.close()
    return int(failed or not rows)


def main(argv: list[str] | None = None) -> int:
    if (sys.argv[1:] if argv is None else argv) == ["--serve"]:
        return serve()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="folder with the older package")
    parser.add_argument("--candidate", type=Path, required=True, help="folder with the newer one")
    parser.add_argument("--seconds", type=float, default=200.0, help="default %(default)s")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    for folder in (options.base, options.candidate):
        if not (folder / "pytransformer" / "__init__.py").is_file():
            parser.error(f"{folder} has no pytransformer")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
