# SPDX-License-Identifier: Apache-2.0
"""Measure the overhead of each op's call on a tiny problem, beside PyTorch's functions.

    python bench/tools/overhead.py             # microseconds per call
    python bench/tools/overhead.py --out FILE.json
    python bench/tools/overhead.py --profile attention:fwd+bwd

The modes are forward, inference mode, forward + backward, and under activate(). "ours" is the
normal call, "python" the same call without the C++ fast path, and "ratio" our time over PyTorch's.
Calls are interleaved in one process on one thread, a millisecond or less at a time. The minimum
over all rounds counts, so that columns are comparable even on a busy machine. The file also has the
medians.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import importlib.util
import json
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import pytransformer as pt
from pytransformer.cli.benchmark import results
from pytransformer.ops._core import fast_path

MODES = ("fwd", "fwd, inference", "fwd+bwd", "fwd, activate()", "fwd+bwd, activate()")
Function = Callable[..., torch.Tensor]
Context = Callable[[], contextlib.AbstractContextManager[object]]


class Problem(NamedTuple):
    leaves: list[torch.Tensor]
    ours: Function
    theirs: Function
    their_leaves: list[torch.Tensor] | None = None  # if PyTorch needs another form
    drop_in: bool = False  # activate() replaces PyTorch's function by ours
    forward_only: bool = False  # decoding has no gradient


class Way(NamedTuple):
    """An implementation and its context, entered before the clock starts."""

    name: str
    context: Context
    call: Callable[[], object]


def problems() -> dict[str, Problem]:
    """Return every family's `overhead(made)` from bench/ops; `made` builds a Problem."""
    found: dict[str, Problem] = {}
    for path in sorted((Path(__file__).resolve().parents[1] / "ops").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"ops_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "overhead"):
            found |= module.overhead(Problem)
    return found


def modes(op: str) -> tuple[str, ...]:
    problem = problems()[op]
    return MODES if problem.drop_in else MODES[: 2 if problem.forward_only else 3]


def ways(op: str, mode: str) -> list[Way]:
    """Return ours, ours through Python, and PyTorch's.

    Leaves need a gradient in every mode, like parameters.
    """
    leaves, ours, theirs, others, _, forward_only = problems()[op]
    without_gradient = torch.inference_mode if mode == "fwd, inference" else torch.no_grad

    def runner(function: Function, leaves: list[torch.Tensor]) -> Callable[[], object]:
        wanted = (
            [] if forward_only else [t.requires_grad_() for t in leaves if t.is_floating_point()]
        )
        grad = torch.randn_like(function(*leaves))

        def forward() -> object:
            with without_gradient():
                return function(*leaves)

        def both() -> object:
            return torch.autograd.grad(function(*leaves), wanted, grad)

        return both if mode.startswith("fwd+bwd") else forward

    @contextlib.contextmanager
    def without_fast_path():
        with fast_path.off(), inside():
            yield

    active = mode.endswith("activate()")
    inside = pt.activate if active else contextlib.nullcontext
    mine = runner(theirs if active else ours, leaves)
    return [
        Way("ours", inside, mine),
        Way("python", without_fast_path, mine),
        Way("torch", contextlib.nullcontext, runner(theirs, others or leaves)),
    ]


def microseconds(contenders: list[Way], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Return the time per call in each round, after a few warm-up calls."""
    times: dict[str, list[float]] = {way.name: [] for way in contenders}
    for _ in range(rounds):
        for name, context, call in contenders:
            with context():
                for _ in range(3):
                    call()
                start = time.perf_counter()
                for _ in range(repeat):
                    call()
                times[name].append((time.perf_counter() - start) / repeat * 1e6)
    return times


def measure(op: str, mode: str, rounds: int, repeat: int) -> dict[str, object]:
    times = microseconds(ways(op, mode), rounds, repeat)
    fastest = {f"{name}_us": min(found) for name, found in times.items()}
    return {
        "op": op,
        "mode": mode,
        **fastest,
        "medians": {name: statistics.median(found) for name, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--only", default="", metavar="TEXT", help="ops whose name has this text")
    parser.add_argument("--repeat", type=int, default=10, help="calls a round")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--profile", metavar="OP:MODE", help="where the time of one of them goes, instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        _, context, ours = ways(*options.profile.split(":"))[0]
        with context():
            ours()
            profile = cProfile.Profile()
            profile.runcall(lambda: [ours() for _ in range(2000)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rows = []
    print("C++ fast path:", fast_path.why_not() or "loaded")
    print(f"{'op':22}{'mode':22}{'ours µs':>9}{'python µs':>11}{'torch µs':>10}{'ratio':>8}")
    for op in (name for name in problems() if options.only in name):
        for mode in modes(op):
            row = measure(op, mode, options.rounds, options.repeat)
            ours, python, theirs = (row[f"{name}_us"] for name in ("ours", "python", "torch"))
            print(
                f"{op:22}{mode:22}{ours:9.1f}{python:11.1f}{theirs:10.1f}{ours / theirs:8.2f}",
                flush=True,
            )
            rows.append(row)
    if options.out is not None:
        where = results.environment("cpu", "python bench/tools/overhead.py")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"environment": where, "rounds": options.rounds, "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
