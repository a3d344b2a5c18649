# SPDX-License-Identifier: Apache-2.0
"""Check the table that selects our product or PyTorch's for linear layers on this CPU.

    OMP_NUM_THREADS=1 python bench/tools/linear_choice.py [--dtype float32 bfloat16] [--seconds 0.3]

Each row times torch.nn.functional.linear, our kernel and our kernel with packed weights, forward,
and PyTorch's and our forward and backward. Forward's weights come from memory, as in a model: each
call reads another of several copies that exceed the caches. A ratio is PyTorch's time over ours.
"ours" marks the rows for which the table (ops/_backends/cpu/linear.py) selects our kernel. The exit
status is 1 if its choice is more than 10 % slower than the other one in a row.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn import functional as F

from pytransformer.cli.benchmark.clock import Contender, interleaved
from pytransformer.cli.machine import cpu_name
from pytransformer.nn.linear import TRAINING_WORK, LinearFunction
from pytransformer.ops._backends.cpu import linear as cpu

# (k, n) of MiniLM's and BERT-base's layers and of GPT-2's, by rows.
WIDTHS = ((384, 384), (384, 1536), (768, 768), (768, 2304), (768, 3072), (3072, 768))
ROWS = (1, 8, 12, 32, 64, 128, 256, 512, 1024, 1536)
TOLERANCE = 1.1
COLD_BYTES = 96 << 20


def times(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    contenders = {name: Contender(call, nullcontext) for name, call in calls.items()}
    return {name: t.median_ms for name, t in interleaved(contenders, min_time=seconds).items()}


def step(run: Callable[..., torch.Tensor], inputs: list[torch.Tensor], d_out: torch.Tensor) -> None:
    torch.autograd.grad(run(*inputs), inputs, d_out)


def measure(rows: int, k: int, n: int, dtype: torch.dtype, seconds: float) -> tuple[str, bool]:
    """Return a line of the table and whether the choices are right."""
    limits = cpu.faster()[dtype]
    x, weight, bias, d_out = (
        torch.randn(shape).to(dtype) for shape in ((rows, k), (n, k), (n,), (rows, n))
    )
    copies = -(-COLD_BYTES // (weight.numel() * weight.element_size()))
    weights = [weight.clone() for _ in range(copies)]
    cold, panels = itertools.cycle(weights), itertools.cycle([cpu.pack(w) for w in weights])
    with torch.no_grad():
        t = times(
            {
                "torch": lambda: F.linear(x, next(cold), bias),
                "ours": lambda: cpu.forward(x, next(cold), bias),
                "packed": lambda: cpu.forward(x, next(cold), bias, next(panels)),
            },
            seconds,
        )
    leaves = [v.requires_grad_() for v in (x, weight, bias)]
    s = times(
        {
            "torch": partial(step, F.linear, leaves, d_out),
            "ours": partial(step, LinearFunction.apply, leaves, d_out),
        },
        seconds,
    )
    choices = (
        (t["torch"] / t["ours"], rows <= limits.inference),
        (
            s["torch"] / s["ours"],
            rows <= limits.training and rows * k * n >= TRAINING_WORK,
        ),
    )
    right = all((1 / ratio if ours else ratio) < TOLERANCE for ratio, ours in choices)
    (forward, ours), (training, ours_in_training) = choices
    line = (
        f"{str(dtype).removeprefix('torch.'):9} {rows:5} x {k:4} -> {n:4}"
        f" {2e-6 * rows * k * n / t['torch']:9.1f} GFLOP/s {forward:7.2f} {'ours' * ours:4}"
        f" {t['torch'] / t['packed']:7.2f} {training:7.2f} {'ours' * ours_in_training:4}"
    )
    return line + ("" if right else "  WRONG"), right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.2, help="per contender and row")
    args = parser.parse_args()
    print(f"{cpu_name()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    print(f"{'':27}{'torch':>17} {'forward':>7} {'':4} {'packed':>7} {'step':>7}")
    wrong = 0
    for name in args.dtype:
        for rows in args.rows:
            for k, n in WIDTHS:
                line, right = measure(rows, k, n, getattr(torch, name), args.seconds)
                wrong += not right
                print(line, flush=True)
    print(f"{wrong} row(s) where the table selects the slower product" if wrong else "table right")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
