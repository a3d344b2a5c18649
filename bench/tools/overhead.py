"""What a call costs before any arithmetic: each op on a tiny problem beside PyTorch's own function for it.

    python bench/tools/overhead.py             # microseconds a call, forward and forward + backward
    python bench/tools/overhead.py --out FILE.json
    python bench/tools/overhead.py --profile attention:fwd+bwd

Calls are interleaved in one process on one thread, a millisecond or less at a time, and the least time of all rounds counts: that
of a round that nobody interrupted, so the columns can be compared even on a busy machine. "beyond" is our time less PyTorch's.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.cli.benchmark import results

Function = Callable[..., torch.Tensor]


def problems() -> dict[str, tuple[list[torch.Tensor], Function, Function]]:
    """The leaves, our function of them and PyTorch's."""
    q, k, v = torch.randn(3, 1, 2, 4, 16)
    x, r, w, b = torch.randn(2, 64), torch.randn(2, 64), torch.randn(64), torch.randn(64)
    w1, b1, w2, b2 = torch.randn(32, 16), torch.randn(32), torch.randn(16, 32), torch.randn(16)
    return {
        "attention": (
            [q, k, v],
            lambda q, k, v: pt.attention(q, k, v, causal="top_left"),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "layer_norm": (
            [x, w, b],
            lambda x, w, b: pt.layer_norm(x, 64, w, b),
            lambda x, w, b: F.layer_norm(x, (64,), w, b),
        ),
        "rms_norm": ([x, w], lambda x, w: pt.rms_norm(x, 64, w), lambda x, w: F.rms_norm(x, (64,), w)),
        "add_norm": (
            [x, r, w, b],
            lambda x, r, w, b: pt.add_norm(x, r, w, b)[0],
            lambda x, r, w, b: F.layer_norm(x + r, (64,), w, b),
        ),
        "feed_forward": (
            [x[:, :16].contiguous(), w1, b1, w2, b2],
            lambda x, w1, b1, w2, b2: pt.feed_forward(x, w1, b1, w2, b2),
            lambda x, w1, b1, w2, b2: F.linear(F.relu(F.linear(x, w1, b1)), w2, b2),
        ),
    }


def calls(name: str, mode: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and PyTorch's, without arguments. Leaves need a gradient in both modes, as parameters do."""
    leaves, ours, theirs = problems()[name]
    leaves = [t.requires_grad_() for t in leaves]
    grad = torch.randn_like(theirs(*leaves))

    def forward(function: Function) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return function(*leaves)

        return call

    def both(function: Function) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves), leaves, grad)

    wrap = forward if mode == "fwd" else both
    return wrap(ours), wrap(theirs)


def microseconds(contenders: tuple[Callable[[], object], ...], rounds: int, repeat: int) -> list[float]:
    """The least over rounds of the time a call takes, each contender once a round."""
    best = [float("inf")] * len(contenders)
    for _ in range(rounds):
        for i, call in enumerate(contenders):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / repeat * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=10, help="calls a round")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--profile", metavar="OP:MODE", help="where the time of one of them goes, instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        ours, _ = calls(*options.profile.split(":"))
        ours()
        profile = cProfile.Profile()
        profile.runcall(lambda: [ours() for _ in range(2000)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rows = []
    print(f"{'op':14}{'mode':10}{'ours µs':>9}{'torch µs':>10}{'beyond':>8}")
    for name in problems():
        for mode in ("fwd", "fwd+bwd"):
            contenders = calls(name, mode)
            microseconds(contenders, 2, 20)
            ours, theirs = microseconds(contenders, options.rounds, options.repeat)
            print(f"{name:14}{mode:10}{ours:9.1f}{theirs:10.1f}{ours - theirs:8.1f}", flush=True)
            rows.append({"op": name, "mode": mode, "ours_us": ours, "torch_us": theirs})
    if options.out is not None:
        where = results.environment("cpu", "python bench/tools/overhead.py")
        options.out.write_text(json.dumps({"environment": where, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
