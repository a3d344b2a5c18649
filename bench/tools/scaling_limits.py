# SPDX-License-Identifier: Apache-2.0
"""On paper: where computing hides what a ring of GPUs sends, and the longest sequence that fits.

    python bench/tools/scaling_limits.py              the tables of docs/scaling-limits.md
    python bench/tools/scaling_limits.py --write      puts them there

Nothing here was measured on a GPU. Rates of links and sizes of memory are the vendor's, FLOP/s an assumption that is an argument; bytes of
activations are counted from what our models save on the CPU (tests/distributed/test_scaling_limits.py).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch

from pytransformer import models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling-limits.md"
BEGIN, END = "<!-- scaling_limits.py: begin -->", "<!-- end -->"
LINKS = {"NVLink 4, 450 GB/s each way": 450e9, "InfiniBand NDR, 50 GB/s": 50e9}
MEMORY = {"H100, 80 GB": 80e9, "H200, 141 GB": 141e9}
FREE = 0.9  # of the memory: the rest is the context, the allocator's gaps, buffers of NCCL
PARAMETER = 16  # bytes: bfloat16 weight and gradient, float32 weight and two moments of Adam
ELEMENT, SUM = 2, 4  # bytes of bfloat16, and of the float32 in which gradients of keys travel
# What a token leaves for backward, in elements of d (hidden layer 4 d, dropout, as many key heads), beside some bytes of statistics.
ENCODER, DECODER = 14, 21  # a layer without cross-attention, one with
RING = 12 + 18  # bytes / d of a token, once: keys in flight and merged out, then the gradients on their way


class Passes(NamedTuple):
    """A pass of attention over one pair of chunks of c rows: FLOPs / (B Hq c² D) and bytes / (B Hkv c D)."""

    flops: float
    sent: float


FORWARD = Passes(4.0, 2.0 * ELEMENT)
BACKWARD = Passes(10.0, 2.0 * (ELEMENT + SUM))


def rows_that_hide(of: Passes, flops: float, link: float, groups: int = 1, causal: bool = False) -> float:
    """Rows a rank (L / n) from which a step's tiles take as long as its messages: flops c² Hq / F = bytes c Hkv / W.

    Args:
        flops: FLOP/s of the kernel. link: bytes / s of a rank, each way.
        groups: Hq / Hkv. causal: zigzag, which computes half of the pairs and sends the same chunks.
    """
    return of.sent / of.flops * flops / link / groups * (2 if causal else 1)


class Size(NamedTuple):
    """A preset: parameters, d, and the layers without and with cross-attention that a token goes through."""

    parameters: int
    width: int
    encoder: int
    decoder: int = 0

    @property
    def saved(self) -> float:
        """Bytes a token of a sequence keeps for backward."""
        return (ENCODER * self.encoder + DECODER * self.decoder) * self.width * ELEMENT

    @property
    def recomputed(self) -> float:
        """The same where each block keeps its input alone, and one block at a time is computed again."""
        return (self.encoder + self.decoder + max(ENCODER, DECODER if self.decoder else 0)) * self.width * ELEMENT


def sizes() -> dict[str, Size]:
    found = {}
    with torch.device("meta"):
        for name, kind, preset in (("BERT", models.BERT, "base"), ("BERT", models.BERT, "large"), ("GPT", models.GPT, "base"),
                                   ("GPT", models.GPT, "xl"), ("T5", models.T5, "base"), ("T5", models.T5, "large")):  # fmt: skip
            model = kind.from_preset(preset)
            c = model.config
            layers = (c.num_layers, c.num_layers) if name == "T5" else (c.num_layers, 0)
            found[f"{name} {preset}"] = Size(sum(p.numel() for p in model.parameters()), c.d_model, *layers)
    return found


def longest(size: Size, memory: float, ranks: int, *, recompute: bool, shard: bool) -> int:
    """Rows of one sequence over so many ranks, a power of two; 0: the parameters do not fit."""
    left = FREE * memory - PARAMETER * size.parameters / (ranks if shard else 1)
    per_row = (size.recomputed if recompute else size.saved) + RING * size.width
    rows = ranks * left / per_row
    return 0 if rows < 1 else 2 ** int(math.log2(rows))


def _rows(n: float) -> str:
    return f"{round(n, -2 if n >= 1000 else -1):,.0f}"


def _tokens(n: int) -> str:
    return "-" if n == 0 else f"{n // 2**20} M" if n >= 2**20 else f"{n // 2**10} k"


def tables(flops: float) -> str:
    rates = f"{flops / 1e12:.0f} TFLOP/s forward and {flops * 0.8 / 1e12:.0f} backward"
    lines = [f"Rows a rank from which a step hides its messages, at {rates}:", ""]
    lines += ["| link | mask | forward | backward | both with 8 query heads a key head |", "|---|---|---|---|---|"]
    for link, rate in LINKS.items():
        for mask, causal in (("none", False), ("causal, zigzag", True)):
            there, back = (rows_that_hide(p, f, rate, causal=causal) for p, f in ((FORWARD, flops), (BACKWARD, 0.8 * flops)))
            lines.append(f"| {link} | {mask} | {_rows(there)} | {_rows(back)} | {_rows(max(there, back) / 8)} |")
    lines += ["", "Longest sequence, batch 1, rounded down to a power of two; blocks kept / computed again:", ""]
    ranks = (1, 8, 64)
    columns = [f"{gpu.partition(',')[0]}, {n}" for gpu in MEMORY for n in ranks]
    lines += [f"| model | parameters | {' | '.join(columns)} |"]
    lines += ["|---" * (2 + len(MEMORY) * len(ranks)) + "|"]
    for name, size in sizes().items():
        cells = [
            " / ".join(_tokens(longest(size, memory, n, recompute=again, shard=n > 1)) for again in (False, True))
            for memory in MEMORY.values()
            for n in ranks
        ]
        lines.append(f"| {name} | {size.parameters / 1e6:,.0f} M | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(flops: float = 600e12) -> str:
    """docs/scaling-limits.md with its tables made anew."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(flops)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tflops", type=float, default=600.0, help="of attention forward in bfloat16 (default %(default)g)")
    parser.add_argument("--write", action="store_true", help="into the page; only with the default rate")
    given = parser.parse_args()
    if given.write:
        PAGE.write_text(page())
    else:
        print(tables(given.tflops * 1e12))


if __name__ == "__main__":
    main()
