# SPDX-License-Identifier: Apache-2.0
"""Time block-masked attention on the CPU by share of running blocks, beside the dense mask.

    OMP_NUM_THREADS=1 python bench/tools/sparse.py [--length 4096] [--rounds 7] [--out FILE.json]

Each round measures every pattern in turn, so that machine noise affects all of them. The clock is
this thread's CPU time with one thread and wall time otherwise; the median counts. The target is
1.25 x (share of blocks) x (unmasked time) + 5 % of the unmasked time. ``--memory`` prints the peak
memory of a forward and backward of a local pattern at 16k, 32k and 64k tokens, each in a fresh
process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer import BlockMask

Call = Callable[[], torch.Tensor]


def patterns(length: int) -> dict[str, BlockMask]:
    """Return patterns with 2 % to 50 % of the blocks, designed for 4,096 tokens."""
    return {
        "window 32": BlockMask.sliding_window(length, (32, 32)),
        "window 170": BlockMask.sliding_window(length, (170, 170)),
        "window 512": BlockMask.sliding_window(length, (512, 512)),
        "longformer 256, 2 global": BlockMask.longformer(length, 256, 2),
        "big_bird 3 + 2 + 3": BlockMask.big_bird(length),
        "strided 512": BlockMask.strided(length, 512),
        "causal": BlockMask.sliding_window(length, (length, 0)),
    }


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def timed(call: Call, leaves: list[torch.Tensor], grad: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of a forward that saves tensors for backward, and of the backward."""
    start = clock()
    out = call()
    middle = clock()
    torch.autograd.grad(out, leaves, grad)
    return middle - start, clock() - middle


def measure(length: int, head_dim: int, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    leaves = [
        torch.randn(1, 1, length, head_dim, dtype=dtype, requires_grad=True) for _ in range(3)
    ]
    query, key, value = leaves
    grad = torch.randn_like(query)
    calls: dict[tuple[str, str], Call] = {("none", "ours"): lambda: pt.attention(query, key, value)}
    masks = patterns(length)
    for name, mask in masks.items():
        dense = mask.to_dense()
        calls[name, "ours"] = lambda mask=mask: pt.attention(query, key, value, attn_mask=mask)
        calls[name, "ours, dense mask"] = lambda dense=dense: pt.attention(
            query, key, value, attn_mask=dense
        )
        calls[name, "torch, dense mask"] = lambda dense=dense: F.scaled_dot_product_attention(
            query, key, value, attn_mask=dense
        )
    times: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in calls}
    for turn in range(rounds + 1):
        for case, call in calls.items():
            seconds = timed(call, leaves, grad)
            if turn:
                times[case].append(seconds)
    base = [statistics.median(t[d] for t in times["none", "ours"]) for d in (0, 1)]
    rows = []
    for (name, how), found in times.items():
        share = masks[name].share if name in masks else 1.0
        for d, direction in enumerate(("forward", "backward")):
            ms = 1e3 * statistics.median(t[d] for t in found)
            aim = 1e3 * base[d] * (1.25 * share + 0.05)
            rows.append(
                dict(
                    pattern=name,
                    how=how,
                    direction=direction,
                    share=share,
                    ms=ms,
                    aim_ms=aim,
                    met=ms <= aim,
                )
            )
    return rows


def peak(length: int) -> int:
    """Return the peak memory of this process above the level before the call, in bytes."""
    leaves = [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]
    mask = BlockMask.sliding_window(length, (256, 256))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pt.attention(*leaves, attn_mask=mask).sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", default=None)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", type=int, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(peak(given.peak))
    elif given.memory:
        for length in (16384, 32768, 65536):
            done = subprocess.run(
                [sys.executable, __file__, "--peak", str(length)],
                capture_output=True,
                text=True,
                check=True,
            )
            print(
                f"{length:6} tokens: {int(done.stdout) / 1e6:7.1f} MB beyond the inputs and the"
                " mask"
            )
    else:
        rows = measure(given.length, given.head_dim, getattr(torch, given.dtype), given.rounds)
        for r in rows:
            verdict = "" if r["how"] != "ours" else "met" if r["met"] else "MISSED"
            print(
                f"{r['pattern']:26} {r['how']:18} {r['direction']:9} {r['share']:6.1%}"
                f" {r['ms']:9.2f} ms  aim {r['aim_ms']:8.2f}  {verdict}"
            )
        if given.out:
            with open(given.out, "w") as file:
                json.dump(
                    {"arguments": vars(given), "torch": torch.__version__, "rows": rows},
                    file,
                    indent=1,
                )


if __name__ == "__main__":
    main()
