"""Measures the Triton kernels' configurations on this GPU and writes kernels/tuned/<gpu>/<op>.json.

    make tune                                              # everything
    python bench/tools/tune.py --only "forward, 16 bit"    # the classes of problems whose name holds this
    python bench/tools/tune.py --dry-run --arch 90         # without a GPU: list the candidates and compile them ahead of time

For each class of problems every candidate is first compared with the reference, and dropped if it errs more than the
configuration of the heuristic by half; then the rest are timed, by turns, on random normal data. The file is written after each
class, so a run cut short leaves what it found. Exit code 2: there is no GPU. A GPU's table holds for the Triton version it names.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pytransformer.kernels import tuned
from pytransformer.kernels.attention import configs as attention_configs
from pytransformer.kernels.feed_forward import configs as feed_forward_configs

from pytransformer.ops.attention import attention_op
from pytransformer.ops.feed_forward import feed_forward_op
from pytransformer.testing import bounds

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 2
ROUNDS = 12  # of timing
WORSE = 1.5  # times the heuristic's error: a candidate beyond that is not the same computation
Results = list[torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One kernel on one class of problems. prepare(device, small, backend) gives the call to be timed."""

    op: str
    key: str
    candidates: list[Any]
    prepare: Callable[[str, bool, str], Callable[[], Results]]


def tasks() -> Iterator[Task]:
    for size in (2, 4):
        dtype = torch.bfloat16 if size == 2 else torch.float32
        for head_dim in attention_configs.HEAD_DIMS:
            for kernel in ("forward", "decode", "keys", "queries", "dense"):
                for per_element in (
                    (True,) if kernel == "dense" else (False,) if kernel == "decode" or size == 4 else (False, True)
                ):
                    yield Task(
                        "attention",
                        attention_configs.key_of(kernel, head_dim, size, per_element),
                        list(attention_configs.candidates(kernel, head_dim, size, per_element=per_element)),
                        _attention(kernel, head_dim, dtype, per_element),
                    )
        for kernel in feed_forward_configs.HEURISTIC:
            for rows in (16, 64, 8192):
                yield Task(
                    "feed_forward",
                    feed_forward_configs.key_of(kernel, rows, size),
                    list(feed_forward_configs.candidates(kernel, rows, size)),
                    _feed_forward(kernel, rows, dtype),
                )


def _attention(kernel: str, head_dim: int, dtype: torch.dtype, per_element: bool) -> Callable[..., Callable[[], Results]]:
    def prepare(device: str, small: bool, backend: str) -> Callable[[], Results]:
        length = 64 if small else 2048 if kernel == "dense" or dtype == torch.float32 else 4096
        queries, keys = (1, 128 if small else 32768) if kernel == "decode" else (length, length)
        make = _random(device, dtype)
        kwargs: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": 3} if per_element and kernel != "dense" else {}
        if kernel == "dense":
            kwargs["bias"] = make(1, 8, length, length)
        heads = 2 if kernel == "decode" else 8
        a, _, _ = attention_op.prepare(
            make(1, 8, queries, head_dim), make(1, heads, keys, head_dim), make(1, heads, keys, head_dim), **kwargs
        )
        names = {"keys": ("key", "value"), "queries": ("query",), "dense": ("bias",)}.get(kernel, ())
        return _direction(attention_op, a, names, backend)

    return prepare


def _feed_forward(kernel: str, rows: int, dtype: torch.dtype) -> Callable[..., Callable[[], Results]]:
    def prepare(device: str, small: bool, backend: str) -> Callable[[], Results]:
        d, hidden = (128, 256) if small else (4096, 14336)
        make = _random(device, dtype)
        x, w1, w2 = make(min(rows, 100) if small else rows, d), make(hidden, d) / d**0.5, make(d, hidden) / hidden**0.5
        gate = {"gate_weight": make(hidden, d) / d**0.5} if "gated" in kernel else {}
        a, _, _ = feed_forward_op.prepare(x, w1, make(hidden), w2, None, activation="silu" if gate else "gelu", **gate)
        return _direction(
            feed_forward_op, a._replace(save=kernel == "d_hidden"), ("b1",) if kernel == "d_hidden" else (), backend
        )

    return prepare


def _random(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *size: torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(dtype)


def _direction(op: Any, a: Any, names: tuple[str, ...], backend: str) -> Callable[[], Results]:
    """The op's forward, or its backward for the gradients named."""
    run = op.backends[backend]
    if not names:
        return lambda: [run.forward(a)[0]]
    wanted = [n in names for n in op.differentiable]
    outputs = op.backends["triton"].forward(a)
    grads = (torch.linspace(-1, 1, outputs[0].numel(), device=a[0].device, dtype=a[0].dtype).view(outputs[0].shape), None)
    saved = [outputs[op.outputs.index(n)] for n in op.saved]
    return lambda: [r for r in run.backward(a, grads[: len(op.grad_names)], saved, wanted) if r is not None]


# ---- with a GPU


def tune(task: Task) -> dict[str, Any]:
    """The entry of the fastest right candidate."""
    exact = task.prepare("cuda", False, "reference")()
    calls: dict[Any, Callable[[], Results]] = {}
    allowed = 0.0
    for candidate in task.candidates:
        try:
            with tuned.trying(task.op, {task.key: dataclasses.asdict(candidate)}):
                call = task.prepare("cuda", False, "triton")
                error = max(bounds.relative_error(ours, want) for ours, want in zip(call(), exact))
        except Exception as failure:  # of the compiler or for lack of shared memory: told, and not a candidate then
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
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit or "unknown"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "kernels": dict(sorted((kernels | {key: entry}).items()))}, indent=1) + "\n")
    return path


# ---- without


def compiler() -> ModuleType:
    """tests/triton/resources.py: compiles a call's kernels ahead of time and reads what they take."""
    path = ROOT / "tests" / "triton" / "resources.py"
    spec = importlib.util.spec_from_file_location("resources", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dry_run(task: Task, capability: int, most: int | None) -> int:
    """Compile the task's candidates and print what each takes; the number of those that fit the GPU."""
    ahead = compiler()
    fitting = 0
    for candidate in task.candidates[:most]:
        with tuned.trying(task.op, {task.key: dataclasses.asdict(candidate)}):
            # The last launch is the one of the kernel in question; a decoding call joins its parts after it.
            compiled = [
                k for k in ahead.compiled(capability, lambda: task.prepare("cpu", True, "triton")()) if "combine" not in k[0]
            ]
        used = ahead.resources(compiled[-1][1])
        fits = used["shared"] <= ahead.SHARED_LIMIT[capability]
        fitting += fits
        print(f"  {candidate} {used}" + ("" if fits else ": too much shared memory"), flush=True)
    return fitting


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="classes of problems whose name holds this")
    parser.add_argument("--op", choices=("attention", "feed_forward"), help="of one op")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no class after so long")
    parser.add_argument("--folder", type=Path, default=ROOT / "kernels" / "tuned", help="where to write")
    parser.add_argument("--dry-run", action="store_true", help="compile the candidates instead, without a GPU")
    parser.add_argument("--arch", type=int, default=90, help="what to compile for: 80, 90, 100 or 120")
    parser.add_argument("--most", type=int, help="compile so many candidates of a class")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("tune: there is no GPU here; --dry-run lists and compiles the candidates without one", file=sys.stderr)
        return NO_GPU
    chosen = [t for t in tasks() if options.only in t.key and options.op in (None, t.op)]
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
            entry = tune(task)
            print(f"  {entry}\n  in {write(task.op, task.key, entry, options.folder)}", flush=True)
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main())
