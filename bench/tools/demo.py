# SPDX-License-Identifier: Apache-2.0
"""`make demo`: check and time attention and full models beside PyTorch, in minutes.

Prints whether this machine's kernels are correct, six attention problems with
1,024 tokens (forward and backward, float32), and two layers of BERT and T5
with short and long rows, registered with transformers and after `convert`. The
times of a row come from one interleaved run; each contender is checked before
it is timed. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import pytransformer as pt
from pytransformer.cli import OK, WRONG, doctor, main
from pytransformer.cli.benchmark import memory, plan
from pytransformer.cli.benchmark.runner import REFERENCE, Options, Runner
from pytransformer.cli.providers import TORCH
from pytransformer.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
import full_models as models

CASES = ("full", "causal", "window", "t5_bias", "dropout", "key_padding")
SHAPE = {"B": 1, "Hq": 8, "Hkv": 8, "Lq": 1024, "Lk": 1024, "D": 64}
SUBJECTS = ("bert", "t5")
LAYERS = 2  # of 12
TOKENS = (63, 512)
ROUNDS = 3  # min samples: a single sample is no measurement
MIN_TIME = 0.3  # seconds per contender
MODEL_SECONDS = 1.0


class Ratio(NamedTuple):
    """PyTorch's time over ours for one measurement."""

    title: str
    value: float

    def __str__(self) -> str:
        return f"{self.title}, {self.value:.2f}x PyTorch's speed"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=SUBJECTS,
        choices=SUBJECTS,
        metavar="MODEL",
        help=f"models to run (default {' '.join(SUBJECTS)}; they need transformers)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=MODEL_SECONDS,
        help="timing per model and mode (default %(default)s)",
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    names = list(arguments.models)
    if names and importlib.util.find_spec("transformers") is None:
        console.print("No models: transformers is not installed (pip install transformers)")
        names = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(1, 1, 16, 64, device=device)
    backend = pt.explain("attention", q, q, q).backend or REFERENCE
    wrong = checks(console, backend)
    ratios, faults = attention(console, device, backend)
    wrong += faults
    compared, faults = compare_models(console, names, arguments.seconds)
    wrong += faults
    ratios += compared
    summary(console, ratios, wrong)
    return WRONG if wrong else OK


def checks(console: Console, backend: str) -> list[str]:
    """Check every op on every backend that works here; return the failures."""
    lines = doctor.self_check()
    wrong = [
        f"{line['op']} {line['case']} on {line['backend']}: {line['detail']}"
        for line in lines
        if line["verdict"] != "ok"
    ]
    right = sum(line["verdict"] == "ok" for line in lines)
    console.print(
        f"Attention runs on the backend {backend}. {right} of {len(lines)} checks against float64"
        " are right."
    )
    return wrong


def attention(console: Console, device: str, backend: str) -> tuple[list[Ratio], list[str]]:
    """Time CASES on our backend and on PyTorch; return the ratios and the failures."""
    if backend in (TORCH, REFERENCE):
        console.print(
            "No attention of ours to time: no kernels are built here (pytransformer doctor)"
        )
        return [], []
    steps = [
        plan.Step(plan.resized(plan.case(name, "medium"), SHAPE), torch.float32, "fwd+bwd")
        for name in CASES
    ]
    options = Options(
        device=device, backends=(backend, TORCH), memory=True, min_time=MIN_TIME, min_rounds=ROUNDS
    )
    rows, ratios, wrong = [], [], []
    with memory.MemoryProbe() as probe, console.progress(len(steps)) as progress:
        for step in steps:
            progress.step(step.title)
            runner = Runner(options, probe, backward=True)
            runner.run(step)
            progress.advance()
            timed = {row["backend"]: row for row in runner.rows}
            wrong += [
                f"attention {step.case.name}: {e['reason']}"
                for e in runner.not_run
                if e["status"] in ("wrong", "failed")
            ]
            if len(timed) == 2:
                ours, peer = timed[backend], timed[TORCH]
                ratios.append(
                    Ratio(f"attention {name_of(step)}", peer["median_ms"] / ours["median_ms"])
                )
                rows.append(attention_row(step, ours, peer))
    console.heading(
        f"Attention, {SHAPE['Lk']} tokens, {SHAPE['Hq']} heads of {SHAPE['D']}, float32, forward"
        " and backward"
    )
    columns = ("problem", "ours", "PyTorch", "speed-up", "peak memory: ours", "PyTorch")
    console.table(columns, rows, right=columns[1:])
    return ratios, wrong


def name_of(step: plan.Step) -> str:
    return step.case.name.replace("_", " ")


def attention_row(step: plan.Step, mine: dict[str, float], peer: dict[str, float]) -> list[str]:
    """Return the cells of one attention problem."""
    peaks = [
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f} MiB"
        for row in (mine, peer)
    ]
    times = [f"{row['median_ms']:.1f} ms" for row in (mine, peer)]
    return [name_of(step), *times, f"{peer['median_ms'] / mine['median_ms']:.2f}x", *peaks]


def compare_models(
    console: Console, names: Sequence[str], seconds: float
) -> tuple[list[Ratio], list[str]]:
    """Compare models with PyTorch's sdpa; return the ratios and the failures."""
    asks = [models.Ask(name, "float32", LAYERS, tokens) for name in names for tokens in TOKENS]
    lines, ratios, wrong = [], [], []
    with console.progress(len(asks)) as progress:
        for ask in asks:
            progress.step(f"{ask.title}, {ask.tokens} tokens")
            rows = models.measure(
                ask, seconds, False, timed=(models.SDPA, models.REGISTERED, models.OURS)
            )
            progress.advance()
            for variant, label in ((models.REGISTERED, "registered"), (models.OURS, "converted")):
                ours = [row for row in rows if row["variant"] == variant]
                title = f"{ask.title}, {ours[0]['batch']}"
                wrong += [f"{title}: {reason}" for reason in {r["wrong"] for r in ours} - {None}]
                speed = {r["mode"]: r["speedup_sdpa"] for r in ours if r["speedup_sdpa"]}
                cells = (f"{speed[m]:.2f}x" if m in speed else "-" for m in models.MODES)
                lines.append([title, label, *cells])
                if variant == models.OURS:
                    name = f"{ask.model}-{ask.tokens} converted"
                    ratios += [Ratio(f"{name}, {m.replace('_', ' ')}", s) for m, s in speed.items()]
    if lines:
        console.heading("Models of transformers with random weights, float32: speed-up over sdpa")
        columns = ("model", "", "forward", "training step")
        console.table(columns, lines, right=columns[2:])
    return ratios, wrong


def summary(console: Console, ratios: Sequence[Ratio], wrong: Sequence[str]) -> None:
    """Print the fastest and slowest measurement, the failures, and what to run next."""
    console.print()
    for problem in wrong:
        console.print(f"WRONG: {problem}")
    if ratios:
        ordered = sorted(ratios, key=lambda ratio: ratio.value)
        console.print(f"Fastest: {ordered[-1]}. Slowest: {ordered[0]}. Wrong: {len(wrong)}.")
    console.print(
        "Next: pytransformer doctor (what works here), pytransformer bench --quick (every op)"
    )


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
