# SPDX-License-Identifier: Apache-2.0
"""``pytransformer drop-in``: compare models on PyTorch's kernels and on ours.

Each model runs the same padded batch with the same weights in every variant:
Hugging Face's eager code, PyTorch's sdpa, and our kernels. One more model is
plain PyTorch with and without ``pt.activate()``. The report has, per variant,
the largest difference of outputs and gradients from the first variant, the
median time of a forward pass and of a training step (dropout on, forward and
backward, interleaved), the peak memory of a training step in a fresh process,
and the backend that ran in each layer. The exit code is 1 if a difference
exceeds LIMIT, if a layer ran outside the fused backends, or if transformers is
missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import pytransformer as pt

from ..console import Console, Progress
from ..ops._core.registry import trace
from . import OK, WRONG, proof_memory, proof_models
from .benchmark import results
from .benchmark.clock import Contender, interleaved
from .proof_models import CONVERTED, Subject

SCHEMA_VERSION = 1
OURS = "pytransformer"
# Two correct float32 runs of these models differ by about 1e-6 in the relative 2-norm (measured:
# PyTorch's sdpa against eager); a mask wrong in one key differs by more than 1e-3.
LIMIT = 1e-5
SECONDS = 4.0  # timing seconds per model and mode; 1 to ROUNDS rounds fit into them
ROUNDS = 5


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="pytransformer drop-in", description=__doc__.split("\n\n")[1]
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"default all: {', '.join(proof_models.SUBJECTS)}",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default ./results/drop-in-<date>)"
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure peak memory (default on)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        help="timing per model and mode (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.models) - proof_models.SUBJECTS.keys():
        parser.error(
            f"unknown model {', '.join(sorted(unknown))}; there are"
            f" {', '.join(proof_models.SUBJECTS)}"
        )
    console, started = Console(), time.monotonic()
    names = arguments.models or list(proof_models.SUBJECTS)
    missing = importlib.util.find_spec("transformers") is None
    left_out = [n for n in names if missing and n in proof_models.NEEDS_TRANSFORMERS]
    present = [n for n in names if n not in left_out]
    with console.progress(3 * len(present) + arguments.memory) as progress:
        entries = [measure(progress, name, arguments.seconds) for name in present]
        if arguments.memory:
            progress.step("peak memory, in processes of their own")
            unmeasured = _add_memory(entries)
            progress.advance()
    if arguments.memory and unmeasured:
        console.print(f"Peak memory was not measured: {unmeasured}")
    _show(console, entries)
    problems = [f"{e['model']}: {p}" for e in entries for p in e["problems"]]
    if left_out:
        problems.append(
            f"{', '.join(left_out)}: not run; install transformers: pip install"
            ' "pytransformer-kernels[hf]"'
        )
    file = _write(arguments.out, entries, problems)
    for problem in problems:
        console.print(f"WRONG: {problem}")
    console.print(
        f"{'Not proven' if problems else 'Proven'} in {time.monotonic() - started:.0f} s; all"
        f" figures are in {file}"
    )
    return WRONG if problems else OK


# ---- measure one model


def measure(
    progress: Progress, name: str, seconds: float, untimed: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare one model's variants and time all but `untimed`; advance progress by three steps."""
    subject = proof_models.build(name)
    progress.step(f"{subject.title}: outputs and gradients")
    pt.clear_fallbacks()
    entry: dict[str, Any] = {
        "name": name,
        "model": subject.title,
        "batch": subject.batch,
        "dtype": "float32",
        "limit": LIMIT,
    }
    first, started = None, time.perf_counter()
    entry["variants"] = {}
    for variant in subject.variants:
        with contextlib.ExitStack() as inside:
            inside.enter_context(subject.select(variant))
            if variant != CONVERTED:  # a hook on a bypassed module disables its converted parent
                layers = inside.enter_context(_layers(subject))
            outputs, grads = subject.trained()
        first = first or (outputs, grads)
        entry["variants"][variant] = _differences(first, (outputs, grads))
    entry["layers"] = layers.as_text()
    progress.advance()
    once = time.perf_counter() - started
    for mode, share in (("forward", 0.3), ("training_step", 1.0)):
        progress.step(f"{subject.title}: time of a {mode.replace('_', ' ')}")
        rounds = max(1, min(ROUNDS, int(seconds / (share * once))))
        timed = [variant for variant in subject.variants if variant not in untimed]
        for variant, milliseconds in _time(subject, timed, mode, rounds).items():
            entry["variants"][variant][f"{mode}_ms"] = milliseconds
        entry[f"{mode}_rounds"] = rounds
        progress.advance()
    entry["fallbacks"] = [
        f"{f.op} at {f.call_site}, {f.count} times: {f.reason}" for f in pt.fallbacks()
    ]
    entry["problems"] = _problems(entry, layers)
    pt.clear_fallbacks()
    return entry


def _differences(first: Any, other: Any) -> dict[str, float]:
    """Return the max absolute and the relative 2-norm difference of outputs and all gradients."""
    figures = {}
    flat = [
        [outputs, torch.cat([g.flatten() for _, g in sorted(grads.items())])]
        for outputs, grads in (first, other)
    ]
    for what, exact, mine in zip(("outputs", "gradients"), *flat, strict=True):
        figures[f"{what}_max_difference"] = (mine - exact).abs().max().item()
        figures[f"{what}_relative_difference"] = ((mine - exact).norm() / exact.norm()).item()
    return figures


def _time(subject: Subject, variants: Sequence[str], mode: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each variant over interleaved rounds."""
    training = mode == "training_step"

    def step() -> None:
        with torch.set_grad_enabled(training):
            _, loss = subject.call()
        if training:
            loss.backward()
            subject.model.zero_grad(set_to_none=True)

    subject.model.train(training)
    contenders = {v: Contender(step, functools.partial(subject.select, v)) for v in variants}
    timings = interleaved(contenders, min_time=0.0, min_rounds=rounds)
    subject.model.eval()
    return {variant: timing.median_ms for variant, timing in timings.items()}


class _layers:
    """Recorder of the backends that ran forward in each attention module, and backward in total."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.forward: dict[str, str] = {}
        self.backward: Counter[str] = Counter()

    def __enter__(self) -> _layers:
        self._tracing = trace()
        self._record = self._tracing.__enter__()
        self._hooks = []
        modules = dict(self.subject.model.named_modules())
        for name in self.subject.attentions:
            starts: list[int] = []
            self._hooks.append(
                modules[name].register_forward_pre_hook(
                    lambda *_, starts=starts: starts.append(len(self._record))
                )
            )
            self._hooks.append(
                modules[name].register_forward_hook(
                    lambda *_, n=name, starts=starts: self._note(n, starts.pop())
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._tracing.__exit__(kind, error, where)
        self.backward = Counter(b for raw, b in self._record if raw == "attention_bwd")
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, start: int) -> None:
        self.forward[name] = ", ".join(b for _, b in self._record[start:]) or "not ours"

    def as_text(self) -> dict[str, str]:
        return dict(self.forward)


def _problems(entry: dict[str, Any], layers: _layers) -> list[str]:
    problems = []
    for variant in (OURS, CONVERTED):
        for what in ("outputs", "gradients") if variant in entry["variants"] else ():
            difference = entry["variants"][variant][f"{what}_relative_difference"]
            if not difference <= LIMIT:  # true for NaN as well
                problems.append(
                    f"{variant}: {what} differ by {difference:.1e}, more than {LIMIT:.0e}"
                )
    elsewhere = [n for n, b in layers.forward.items() if b in ("not ours", "reference")]
    if elsewhere or len(layers.forward) != len(layers.subject.attentions):
        problems.append(
            f"not on a fused kernel: {', '.join(elsewhere) or 'some attention modules never ran'}"
        )
    if layers.backward.get("reference") or layers.backward.total() != len(
        layers.subject.attentions
    ):
        problems.append(
            f"backward ran on {dict(layers.backward)} for {len(layers.subject.attentions)}"
            " attention modules"
        )
    return problems + [f"fell back: {text}" for text in entry["fallbacks"]]


def _add_memory(entries: list[dict[str, Any]]) -> str | None:
    """Add peak memory to each variant's figures; return why that failed, or None."""
    try:
        peaks = proof_memory.peaks(
            [(e["name"], variant) for e in entries for variant in e["variants"]]
        )
    except proof_memory.Unmeasured as reason:
        return str(reason)
    for entry in entries:
        for variant, figures in entry["variants"].items():
            figures["training_step_peak_bytes"] = peaks[entry["name"], variant]
    return None


# ---- output


def _show(console: Console, entries: list[dict[str, Any]]) -> None:
    columns = ("", "outputs differ", "gradients differ", "forward", "training step", "peak memory")
    for entry in entries:
        console.heading(f"{entry['model']}  ({entry['batch']}, {entry['dtype']})")
        base = entry["variants"][next(iter(entry["variants"]))]
        rows = [_row(variant, figures, base) for variant, figures in entry["variants"].items()]
        console.table(columns, rows, right=columns[1:])
        for backend, count in Counter(entry["layers"].values()).items():
            console.print(f"  {count} of {len(entry['layers'])} attention layers ran on: {backend}")
    console.print(
        "\nDifferences from the first row: the largest of any value (and relative in 2-norm,"
        f" allowed {LIMIT:.0e}). Times: median (and speed relative to the first row)."
    )


def _row(variant: str, figures: dict[str, float], base: dict[str, float]) -> list[str]:
    cells = [variant]
    for what in ("outputs", "gradients"):
        largest, relative = (
            figures[f"{what}_max_difference"],
            figures[f"{what}_relative_difference"],
        )
        cells.append("-" if figures is base else f"{largest:.1e} ({relative:.1e})")
    for mode in ("forward", "training_step"):
        cells.append(
            f"{figures[f'{mode}_ms']:.0f} ms ({base[f'{mode}_ms'] / figures[f'{mode}_ms']:.2f}x)"
        )
    peak = figures.get("training_step_peak_bytes")
    return [*cells, "-" if peak is None else f"{peak / 2**20:.0f} MiB"]


def _write(folder: Path | None, entries: list[dict[str, Any]], problems: list[str]) -> Path:
    folder = folder or Path("results") / f"drop-in-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "drop-in.json"
    document = {
        "schema_version": SCHEMA_VERSION,
        "environment": results.environment(
            "cpu", " ".join(["pytransformer drop-in", *sys.argv[2:]])
        ),
        "proven": not problems,
        "problems": problems,
        "models": entries,
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return file
