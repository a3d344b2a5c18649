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

from pytransformer import AlibiBias
from pytransformer.kernels import tuned
from pytransformer.kernels.attention import configs as attention_configs
from pytransformer.kernels.cross_entropy import configs as cross_entropy_configs
from pytransformer.kernels.feed_forward import configs as feed_forward_configs
from pytransformer.kernels.layer_norm import configs as layer_norm_configs
from pytransformer.ops.attention import attention_op
from pytransformer.ops.cross_entropy import linear_cross_entropy_op
from pytransformer.ops.feed_forward import feed_forward_op
from pytransformer.ops.layer_norm import add_norm_op
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
    kernel: str  # the name of its function
    candidates: list[Any]
    prepare: Callable[[str, bool, str], Callable[[], Results]]


def tasks() -> Iterator[Task]:
    for dtype in (torch.bfloat16, torch.float32):
        yield from _attention_tasks(dtype)
        yield from _feed_forward_tasks(dtype)
        yield from _norm_tasks(dtype)
    yield from _cross_entropy_tasks()


def nearest_first(candidates: Iterable[Any]) -> list[Any]:
    """The table's choice, which comes first, then those that are fewer doublings away from it."""
    first, *others = candidates
    here = dataclasses.astuple(first)

    def distance(candidate: Any) -> float:
        return sum(abs(math.log2((1 + x) / (1 + y))) for x, y in zip(dataclasses.astuple(candidate), here))

    return [first, *sorted(others, key=distance)]


def _attention_tasks(dtype: torch.dtype) -> Iterator[Task]:
    size = dtype.itemsize
    for head_dim in attention_configs.HEAD_DIMS:
        for kernel in ("forward", "decode", "dkdv", "dropout dkdv", "dq", "dbias"):
            for score_mods in (
                (1,) if kernel in ("dbias", "dropout dkdv") else (0,) if kernel == "decode" or size == 4 else (0, 1)
            ):
                yield Task(
                    "attention",
                    attention_configs.key_of(kernel, head_dim, size, score_mods),
                    "attention_forward" if kernel in ("forward", "decode") else f"attention_backward_{kernel.split()[-1]}",
                    nearest_first(attention_configs.candidates(kernel, head_dim, size, score_mods=score_mods)),
                    _attention(kernel, head_dim, dtype, score_mods),
                )


def _feed_forward_tasks(dtype: torch.dtype) -> Iterator[Task]:
    for kernel in feed_forward_configs.HEURISTIC:
        for rows in (16, 64, 8192):
            yield Task(
                "feed_forward",
                feed_forward_configs.key_of(kernel, rows, dtype.itemsize),
                "feed_forward_" + kernel.removesuffix(" gated"),
                nearest_first(feed_forward_configs.candidates(kernel, rows, dtype.itemsize)),
                _feed_forward(kernel, rows, dtype),
            )


def _norm_tasks(dtype: torch.dtype) -> Iterator[Task]:
    for kernel in ("forward", "backward"):
        for columns in (*layer_norm_configs.BACKWARD, 2 * max(layer_norm_configs.BACKWARD)):
            yield Task(
                "layer_norm",
                layer_norm_configs.key_of(kernel, columns, dtype.itemsize),
                f"layer_norm_{kernel}",
                nearest_first(layer_norm_configs.candidates(kernel, columns)),
                _norm(kernel, columns, dtype),
            )


def _cross_entropy_tasks() -> Iterator[Task]:
    for kernel, table in cross_entropy_configs.HEURISTIC.items():
        for classes in table if len(table) > 1 else (32768,):
            yield Task(
                "cross_entropy",
                cross_entropy_configs.key_of(kernel, classes),
                "cross_entropy_" + {"bias": "backward_bias"}.get(kernel, kernel),
                nearest_first(cross_entropy_configs.candidates(kernel, classes)),
                _cross_entropy(kernel, 32768 if classes == max(table) else classes),
            )


def _attention(kernel: str, head_dim: int, dtype: torch.dtype, score_mods: int) -> Callable[..., Callable[[], Results]]:
    def prepare(device: str, small: bool, backend: str) -> Callable[[], Results]:
        length = 64 if small else 2048 if kernel == "dbias" or dtype == torch.float32 else 4096
        queries, keys = (1, 128 if small else 32768) if kernel == "decode" else (length, length)
        make = _random(device, dtype)
        kwargs: dict[str, Any] = {}
        if kernel == "dbias":
            kwargs["bias"] = make(1, 8, length, length)
        elif kernel == "dkdv" and score_mods:
            kwargs["bias"] = AlibiBias(torch.linspace(0.1, 0.8, 8, device=device))
        elif score_mods:
            kwargs |= {"dropout_p": 0.1, "dropout_seed": 3}
        heads = 2 if kernel == "decode" else 8
        a, _, _ = attention_op.prepare(
            make(1, 8, queries, head_dim), make(1, heads, keys, head_dim), make(1, heads, keys, head_dim), **kwargs
        )
        names = {"dkdv": ("key", "value"), "dq": ("query",), "dbias": ("bias",)}.get(kernel.split()[-1], ())
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


def _norm(kernel: str, columns: int, dtype: torch.dtype) -> Callable[..., Callable[[], Results]]:
    def prepare(device: str, small: bool, backend: str) -> Callable[[], Results]:
        make = _random(device, dtype)
        rows = 300 if small else (1 << 26) // columns
        a, _, _ = add_norm_op.prepare(make(rows, columns), make(rows, columns), make(columns), make(columns))
        return _direction(add_norm_op, a, () if kernel == "forward" else ("x", "residual", "weight", "bias"), backend)

    return prepare


def _cross_entropy(kernel: str, classes: int) -> Callable[..., Callable[[], Results]]:
    """Few features, so that the library's products do not hide the kernel."""

    def prepare(device: str, small: bool, backend: str) -> Callable[[], Results]:
        make = _random(device, torch.bfloat16)
        rows = 40 if small else (1 << 27) // classes
        target = torch.arange(rows, device=device) % classes
        a, _, _ = linear_cross_entropy_op.prepare(make(rows, 16), make(classes, 16), target, bias=make(classes))
        return _direction(linear_cross_entropy_op, a, {"backward": ("x",), "bias": ("bias",)}.get(kernel, ()), backend)

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


def tune(task: Task, most: int | None) -> dict[str, Any]:
    """The entry of the fastest right candidate, of the first so many."""
    exact = task.prepare("cuda", False, "reference")()
    calls: dict[Any, Callable[[], Results]] = {}
    allowed = 0.0
    for candidate in task.candidates[:most]:
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
            launched = ahead.compiled(capability, lambda: task.prepare("cpu", True, "triton")(), task.kernel)
            compiled = [binary for name, binary in launched if name.removesuffix(" decode") == task.kernel]
        used = ahead.resources(compiled[-1])
        fits = used["shared"] <= ahead.SHARED_LIMIT[capability]
        fitting += fits
        print(f"  {candidate} {used}" + ("" if fits else ": too much shared memory"), flush=True)
    return fitting


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--only", default="", help="classes of problems whose name holds this")
    found.add_argument("--op", choices=sorted({t.op for t in tasks()}), help="of one op")
    found.add_argument("--seconds", type=float, default=float("inf"), help="start no class after so long")
    found.add_argument("--folder", type=Path, default=ROOT / "kernels" / "tuned", help="where to write")
    found.add_argument("--dry-run", action="store_true", help="compile the candidates instead, without a GPU")
    found.add_argument("--arch", type=int, default=90, help="what to compile for: 80, 90, 100 or 120")
    found.add_argument("--most", type=int, help="try so many candidates of a class, those nearest to the table's choice")
    return found


def chosen_by(options: argparse.Namespace) -> list[Task]:
    return [t for t in tasks() if options.only in t.key and options.op in (None, t.op)]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("tune: there is no GPU here; --dry-run lists and compiles the candidates without one", file=sys.stderr)
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
