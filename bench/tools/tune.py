# SPDX-License-Identifier: Apache-2.0
"""Tune the Triton kernels' configurations on this GPU; write kernels/tuned/<gpu>/<op>.json.

    make tune                                              # everything
    python bench/tools/tune.py --only "forward, 16 bit"    # problem classes whose name has this
    python bench/tools/tune.py --dry-run --arch 90         # without a GPU: compile the candidates

For each problem class, every candidate is compared with the reference and dropped if its error
exceeds the heuristic configuration's by half. The rest are timed in turns on random normal data.
The file is written after each class, so an interrupted run preserves its results. The exit code is
2 without a GPU. A GPU's table is valid for the Triton version it names.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytransformer.kernels import tuned
from pytransformer.testing import bounds

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 2
ROUNDS = 12  # timing rounds
WORSE = 1.5  # times the heuristic's error; a worse candidate computes something else
Results = list[torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One kernel on one problem class; prepare(device, small, backend) returns the timed call."""

    op: str
    key: str
    kernel: str  # the kernel function's name
    candidates: list[Any]
    prepare: Callable[[str, bool, str], Callable[[], Results]]


def tasks() -> Iterator[Task]:
    """Yield every family's `tune(tools)` from bench/ops; `tools` is this module."""
    for path in sorted((ROOT / "bench" / "ops").glob("*.py")):
        found = load(path)
        if hasattr(found, "tune"):  # ops with one tile for all have none
            yield from found.tune(sys.modules[__name__])


def nearest_first(candidates: Iterable[Any]) -> list[Any]:
    """Return the table's choice first, then candidates by number of doublings from it."""
    first, *others = candidates
    here = dataclasses.astuple(first)

    def distance(candidate: Any) -> float:
        return sum(
            abs(math.log2((1 + x) / (1 + y))) for x, y in zip(dataclasses.astuple(candidate), here)
        )

    return [first, *sorted(others, key=distance)]


def random_values(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(
        size, generator=generator, device=device, dtype=torch.float32
    ).to(dtype)


def direction(op: Any, a: Any, names: tuple[str, ...], backend: str) -> Callable[[], Results]:
    """Return a call of the op's forward, or of its backward for the named gradients."""
    run = op.backends[backend]
    if not names:
        return lambda: [run.forward(a)[0]]
    wanted = [n in names for n in op.differentiable]
    outputs = op.backends["triton"].forward(a)
    grads = (
        torch.linspace(-1, 1, outputs[0].numel(), device=a[0].device, dtype=a[0].dtype).view(
            outputs[0].shape
        ),
        None,
    )
    saved = [outputs[op.outputs.index(n)] for n in op.saved]
    return lambda: [
        r for r in run.backward(a, grads[: len(op.grad_names)], saved, wanted) if r is not None
    ]


# ---- with a GPU


def tune(task: Task, most: int | None) -> dict[str, Any]:
    """Return the entry of the fastest correct candidate among the first `most`."""
    exact = task.prepare("cuda", False, "reference")()
    calls: dict[Any, Callable[[], Results]] = {}
    allowed = 0.0
    for candidate in task.candidates[:most]:
        try:
            with tuned.trying(task.op, {task.key: dataclasses.asdict(candidate)}):
                call = task.prepare("cuda", False, "triton")
                error = max(bounds.relative_error(ours, want) for ours, want in zip(call(), exact))
        except Exception as failure:  # compiler error or lack of shared memory: drop the candidate
            print(f"  {candidate}: {type(failure).__name__}: {str(failure).splitlines()[0][:100]}")
            if not calls:
                raise
            continue
        allowed = allowed or WORSE * error
        if not error <= allowed:
            print(f"  {candidate}: error {error:.2e}, the heuristic's allows {allowed:.2e}")
            continue
        calls[candidate] = call
    times: dict[Any, list[float]] = {c: [] for c in calls}
    for _ in range(ROUNDS):
        for candidate, call in calls.items():
            with tuned.trying(task.op, {task.key: dataclasses.asdict(candidate)}):
                times[candidate].append(_microseconds(call))
    median = {c: statistics.median(t) for c, t in times.items()}
    best = min(median, key=median.__getitem__)
    return {
        **dataclasses.asdict(best),
        "time_us": round(median[best], 2),
        "heuristic_us": round(median[task.candidates[0]], 2),
    }


def _microseconds(call: Callable[[], Results]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def write(op: str, key: str, entry: dict[str, Any], folder: Path) -> Path:
    """Put one entry into the GPU's table of this op."""
    import triton

    gpu = torch.cuda.get_device_name()
    path = tuned.path_of(op, gpu, folder)
    kernels = json.loads(path.read_text())["kernels"] if path.is_file() else {}
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    facts = {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or "unknown",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**facts, "kernels": dict(sorted((kernels | {key: entry}).items()))}, indent=1)
        + "\n"
    )
    return path


# ---- without a GPU


def load(path: Path) -> ModuleType:
    """Load a file outside any package as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiler() -> ModuleType:
    """Return tests/triton/resources.py, which compiles kernels ahead of time."""
    return load(ROOT / "tests" / "triton" / "resources.py")


def dry_run(task: Task, capability: int, most: int | None) -> int:
    """Compile the candidates, print their resources, and return how many fit the GPU."""
    ahead = compiler()
    fitting = 0
    for candidate in task.candidates[:most]:
        with tuned.trying(task.op, {task.key: dataclasses.asdict(candidate)}):
            launched = ahead.compiled(
                capability, lambda: task.prepare("cpu", True, "triton")(), task.kernel
            )
            compiled = [
                binary for name, binary in launched if name.removesuffix(" decode") == task.kernel
            ]
        used = ahead.resources(compiled[-1])
        fits = used["shared"] <= ahead.SHARED_LIMIT[capability]
        fitting += fits
        print(f"  {candidate} {used}" + ("" if fits else ": too much shared memory"), flush=True)
    return fitting


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--only", default="", help="classes of problems whose name holds this")
    found.add_argument("--op", choices=sorted({t.op for t in tasks()}), help="of one op")
    found.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no class after so long"
    )
    found.add_argument(
        "--folder", type=Path, default=ROOT / "kernels" / "tuned", help="where to write"
    )
    found.add_argument(
        "--dry-run", action="store_true", help="compile the candidates instead, without a GPU"
    )
    found.add_argument(
        "--arch", type=int, default=90, help="what to compile for: 80, 90, 100 or 120"
    )
    found.add_argument(
        "--most",
        type=int,
        help="try so many candidates of a class, those nearest to the table's choice",
    )
    return found


def chosen_by(options: argparse.Namespace) -> list[Task]:
    return [t for t in tasks() if options.only in t.key and options.op in (None, t.op)]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "tune: there is no GPU here; --dry-run lists and compiles the candidates without one",
            file=sys.stderr,
        )
        return NO_GPU
    chosen = chosen_by(options)
    started = time.monotonic()
    for task in chosen:
        if time.monotonic() - started > options.seconds:
            print(f"tune: {options.seconds:g} s are over before {task.op}: {task.key}")
            break
        print(f"{task.op}: {task.key}, {len(task.candidates)} candidates", flush=True)
        if options.dry_run:
            if not dry_run(task, options.arch, options.most):
                return 1
        else:
            entry = tune(task, options.most)
            print(f"  {entry}\n  in {write(task.op, task.key, entry, options.folder)}", flush=True)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
