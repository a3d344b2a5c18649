# SPDX-License-Identifier: Apache-2.0
"""Clock and power of the GPU while one contender loops: whether cycles or power limit a kernel.

    python bench/tools/clocks.py FILE --seconds 3 --out FOLDER
    ncu --profile-from-start off ... python bench/tools/clocks.py FILE --profile

A line of FILE is NAME SECONDS and the arguments of `pytransformer bench`, as for steps.py. Each
backend of a line loops for --seconds without a rest, then makes one call every 50 ms, which the
power limit does not slow. The tool prints milliseconds per call, SM clock, power and cycles per
call of each; OUT gets clocks.csv with all samples of nvidia-smi. With --profile each backend makes
one call in the range that ncu profiles.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

QUERY = "clocks.sm,power.draw,temperature.gpu"
PERIOD_MS = 20
REST, SINGLE_CALLS = 0.05, 20


class Sampler:
    """nvidia-smi in the background; `values` are (time, clock in MHz, power in W, Celsius)."""

    def __init__(self) -> None:
        tool = shutil.which("nvidia-smi")
        options = ["--format=csv,noheader,nounits", "-lms", str(PERIOD_MS)]
        self.process = tool and subprocess.Popen(
            [tool, f"--query-gpu={QUERY}", *options], stdout=subprocess.PIPE, text=True
        )
        self.values: list[tuple[float, ...]] = []

    def stop(self) -> list[tuple[float, ...]]:
        """End the process and return its samples; none without nvidia-smi."""
        if not self.process:
            return []
        self.process.terminate()
        lines = self.process.communicate()[0].splitlines()
        samples = []
        for line in lines:
            try:
                samples.append(tuple(float(field) for field in line.split(",")))
            except ValueError:  # the last line may be partial, and a field "[N/A]"
                continue
        return [s for s in samples if len(s) == 3]


def contenders(arguments: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield title, backend and a `Contender`, or a reason, of a line's problems."""
    from pytransformer.cli import build_parser
    from pytransformer.cli.benchmark import clock, command
    from pytransformer.cli.benchmark.runner import SEED, work
    from pytransformer.cli.providers import Problem, Unsupported, providers

    parsed = build_parser().parse_args(["bench", *arguments])
    for step in command._steps(parsed, command._ops(parsed.ops)):
        problem = Problem.make(
            step.case, step.dtype, parsed.device, seed=SEED, grad=step.mode != "fwd", on_device=True
        )
        for provider in providers(step.case.op):
            if provider.name not in (parsed.backends or ()):
                continue
            try:
                prepared = provider.prepare(problem)
                contender = clock.Contender(work(problem, prepared, step.mode), prepared.context)
            except Unsupported as reason:
                yield step.title, provider.name, str(reason)
            else:
                yield step.title, provider.name, contender


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def looped(call: Any, seconds: float) -> float:
    """Return seconds per call of calls without a rest."""
    calls, start = 0, time.monotonic()
    while time.monotonic() - start < seconds or calls == 0:
        for _ in range(10):
            call()
        calls += 10
        synchronize()  # at most ten calls in the queue
    return (time.monotonic() - start) / calls


def spaced(call: Any) -> float:
    """Return the median seconds of single calls after rests."""
    taken = []
    for _ in range(SINGLE_CALLS):
        time.sleep(REST)
        start = time.perf_counter()
        call()
        synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken)


def measured(contender: Any, seconds: float) -> tuple[dict[str, float], list[tuple[float, ...]]]:
    """Return the figures of one contender and the samples of nvidia-smi during its loop."""
    with contender.context():
        looped(contender.call, 0.0)
        single = spaced(contender.call)
        sampler = Sampler()
        sustained = looped(contender.call, seconds)
        samples = sampler.stop()
    figures = {"sustained_ms": 1e3 * sustained, "single_ms": 1e3 * single}
    settled = samples[len(samples) // 3 :]  # clock and power settle within the first second
    if settled:
        mhz, watts = median(s[0] for s in settled), median(s[1] for s in settled)
        figures |= {"mhz": mhz, "watts": watts, "kilocycles": mhz * sustained * 1e3}
    return figures, samples


def profile(contender: Any) -> None:
    """Make one call in the range that ncu profiles."""
    import torch

    with contender.context():
        looped(contender.call, 0.0)
        torch.cuda.cudart().cudaProfilerStart()
        contender.call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="per loop, default %(default)s")
    parser.add_argument("--out", type=Path, help="where clocks.csv goes")
    parser.add_argument("--profile", action="store_true", help="one call of each, for ncu")
    options = parser.parse_args(argv)
    rows: list[tuple[Any, ...]] = []
    done = 0
    for line in options.file.read_text().splitlines():
        name, _, *arguments = shlex.split(line)
        for title, backend, contender in contenders(arguments):
            if isinstance(contender, str):
                print(f"{name} {title} {backend}: {contender}", flush=True)
                continue
            done += 1
            if options.profile:
                profile(contender)
                continue
            figures, samples = measured(contender, options.seconds)
            rows += [(name, title, backend, *sample) for sample in samples]
            text = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(f"{name} {title} {backend}: {text}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with (options.out / "clocks.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("step", "problem", "backend", "mhz", "watts", "celsius"))
            writer.writerows(rows)
    return int(done == 0)


if __name__ == "__main__":
    sys.exit(main())
