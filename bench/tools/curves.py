# SPDX-License-Identifier: Apache-2.0
"""Time by length: attention with each pattern beside its peers, and attention beside convolution and recurrence.

    OMP_NUM_THREADS=1 python bench/tools/curves.py patterns [--out FOLDER]      # patterns.json, patterns.png
    OMP_NUM_THREADS=1 python bench/tools/curves.py complexity [--out FOLDER]    # complexity.json, complexity.png
    python bench/tools/curves.py draw [--out FOLDER]                            # the pictures and the page's tables again, from the JSON

CPU time of one thread, every case of a length once in each round, medians. One head of 64, float32. A case that is not measured has a
``reason`` in its row: too large for a dense mask, or an error.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer import BlockMask
from pytransformer.cli.benchmark import results
from pytransformer.testing.patterns import PATTERNS, Pattern
from pytransformer.viz._figure import figure, save

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "amd-epyc-zen5-2-cores"
PAGE = ROOT / "docs" / "ops" / "attention-by-length.md"
HEAD_DIM, SECONDS_TO_COMPILE = 64, 90
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
WIDTHS = (64, 128, 256, 512, 1024)
BY_LABEL = {pattern.label: pattern for pattern in PATTERNS.values()}
FIRST = next(iter(BY_LABEL))  # whose dense mask stands for all: PyTorch's kernel and naive code skip nothing
# By the way of computing: the longest sequence for which its (L, L) tensors are made here.
LONGEST = {"ours": 65536, "ours, no mask": 8192, "torch sdpa, dense mask": 8192, "naive": 4096, "FlexAttention": 4096}
FORWARD, BACKWARD = "forward", "backward"
Call = Callable[[], torch.Tensor]
Row = dict[str, Any]


# ---- measuring


def once(call: Call, leaves: list[torch.Tensor], backward: bool) -> dict[str, float]:
    """Seconds of this thread: a forward, and the backward of it."""
    start = time.thread_time()
    out = call()
    found = {FORWARD: time.thread_time() - start}
    if backward:
        grad = torch.ones_like(out)
        start = time.thread_time()
        torch.autograd.grad(out, leaves, grad)
        found[BACKWARD] = time.thread_time() - start
    return found


def rounds_of(calls: dict[str, tuple[Call, list[torch.Tensor], bool]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by case and direction; the first round warms up and is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    for turn in range(rounds + 1):
        for name, (call, leaves, backward) in calls.items():
            for direction, seconds in once(call, leaves, backward).items():
                if turn:
                    found[name].setdefault(direction, []).append(1e3 * seconds)
    return found


def figures(times: list[float]) -> Row:
    ordered = sorted(times)
    return {"ms": statistics.median(ordered), "least_ms": ordered[0], "most_ms": ordered[-1], "rounds": len(ordered)}


@contextmanager
def limited(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# ---- patterns


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (query @ key.mT / HEAD_DIM**0.5).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value


def flex(leaves: list[torch.Tensor], pattern: Pattern, blocks: BlockMask, mask: torch.Tensor) -> Call:
    """Compiled; its backward does not exist on the CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = (t.detach() for t in leaves)
    length = query.shape[2]
    made = create_block_mask(pattern.mask_mod(blocks), None, None, length, length, device="cpu")
    run = torch.compile(flex_attention, dynamic=False)

    @torch.no_grad()
    def call() -> torch.Tensor:
        return run(query, key, value, block_mask=made)

    with limited(SECONDS_TO_COMPILE):
        out = call()
    torch.testing.assert_close(out, naive(query, key, value, mask), rtol=1e-4, atol=1e-4)  # no wrong kernel is timed
    return call


def at_length(length: int, rounds: int) -> list[Row]:
    leaves = [torch.randn(1, 1, length, HEAD_DIM, requires_grad=True) for _ in range(3)]
    query, key, value = leaves
    shares: dict[str, float] = {"none": 1.0}
    rows: list[Row] = []
    calls: dict[str, tuple[Call, list[torch.Tensor], bool]] = {}

    def left_out(pattern: str, how: str, reason: str) -> None:
        rows.append({"pattern": pattern, "how": how, "length": length, "share": shares.get(pattern), "reason": reason})

    if length <= LONGEST["ours, no mask"]:
        calls["none|ours"] = (lambda: pt.attention(query, key, value), leaves, True)
    else:
        left_out("none", "ours", "quadratic: longer than the budget of this run")
    for name, pattern in BY_LABEL.items():
        mask = pattern.make(length, "cpu")
        shares[name] = mask.share
        calls[f"{name}|ours"] = (lambda mask=mask: pt.attention(query, key, value, attn_mask=mask), leaves, True)
        dense = mask.to_dense() if length <= max(LONGEST[how] for how in ("torch sdpa, dense mask", "naive")) else None
        ways: dict[str, Callable[[torch.Tensor], Call]] = {
            "torch sdpa, dense mask": lambda m: lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=m),
            "naive": lambda m: lambda: naive(query, key, value, m),
            "FlexAttention": partial(flex, leaves, pattern, mask),
        }
        for how, way in ways.items():
            if dense is None or length > LONGEST[how]:
                left_out(name, how, f"its (L, L) tensors: measured up to {LONGEST[how]} tokens")
                continue
            if how != "FlexAttention" and name != FIRST:
                left_out(name, how, f"skips nothing: see {FIRST}")
                continue
            try:
                calls[f"{name}|{how}"] = (way(dense), leaves, how != "FlexAttention")
            except Exception as error:
                left_out(name, how, f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}")
    for case, by_direction in rounds_of(calls, rounds).items():
        name, _, how = case.partition("|")
        for direction, times in by_direction.items():
            about = {"pattern": name, "how": how, "length": length, "share": shares[name], "direction": direction}
            rows.append({**about, **figures(times)})
    return rows


def patterns() -> list[Row]:
    return [row for length in LENGTHS for row in at_length(length, 7 if length <= 4096 else 3)]


# ---- complexity


def layers(length: int, width: int) -> dict[str, tuple[Call, int]]:
    """Forward of what mixes tokens, (1, L, d) to the same, without the projections of attention; and its longest L d."""
    heads = width // HEAD_DIM
    x = torch.randn(1, length, width)
    q, k, v = (torch.randn(1, heads, length, HEAD_DIM) for _ in range(3))
    conv, depthwise = torch.nn.Conv1d(width, width, 5, padding=2), torch.nn.Conv1d(width, width, 5, padding=2, groups=width)
    gru, lstm = torch.nn.GRU(width, width, batch_first=True), torch.nn.LSTM(width, width, batch_first=True)
    return {
        "attention": (lambda: pt.attention(q, k, v), 8192),
        "window attention, 128 each side": (lambda: pt.attention(q, k, v, window=(128, 128)), 65536),
        "convolution, kernel 5": (lambda: conv(x.mT).mT, 65536),
        "depthwise convolution, kernel 5": (lambda: depthwise(x.mT).mT, 65536),
        "GRU": (lambda: gru(x)[0], 16384),
        "LSTM": (lambda: lstm(x)[0], 16384),
    }


@torch.no_grad()
def complexity() -> list[Row]:
    rows = []
    sizes = [("length", n, HEAD_DIM) for n in LENGTHS] + [("width", 1024, d) for d in WIDTHS]
    for by, length, width in sizes:
        chosen = {n: (call, [], False) for n, (call, longest) in layers(length, width).items() if length <= longest}
        for name, found in rounds_of(chosen, 7 if length * width <= 1 << 19 else 3).items():
            rows.append({"layer": name, "by": by, "length": length, "width": width, **figures(found[FORWARD])})
    return rows


def exponent(points: dict[int, float]) -> float:
    """Of the power law through the last two doublings: log2 of the ratio, a doubling."""
    sizes = sorted(points)[-3:]
    return math.log(points[sizes[-1]] / points[sizes[0]]) / math.log(sizes[-1] / sizes[0])


# ---- the page


def table(document: Row) -> str:
    """Forward / backward by length, and the exponent through the last two doublings; complexity by what grows."""
    rows = [r for r in document["rows"] if "ms" in r]
    if "layer" in rows[0]:
        lines = ["| forward grows by | length^ | at the longest | width^, up to 1,024 |", "|---|---|---|---|"]
        for name in dict.fromkeys(r["layer"] for r in rows):
            by = {k: {r[k]: r["ms"] for r in rows if (r["layer"], r["by"]) == (name, k)} for k in ("length", "width")}
            lines.append(
                f"| {name} | {exponent(by['length']):.2f} | {max(by['length']):,} tokens: {by['length'][max(by['length'])]:.1f} ms "
                f"| {exponent(by['width']):.2f} |"
            )
        return "\n".join(lines)
    shown = (1024, 4096, 16384, 65536)
    heads = " | ".join(f"{n:,}" for n in shown)
    lines = [f"| pattern | computed by | {heads} | length^ | share at the longest |", "|---" * (len(shown) + 4) + "|"]
    for pattern, how in dict.fromkeys((r["pattern"], r["how"]) for r in rows):
        mine = [r for r in rows if (r["pattern"], r["how"]) == (pattern, how)]
        by = {d: {r["length"]: r["ms"] for r in mine if r["direction"] == d} for d in (FORWARD, BACKWARD)}
        cells = [" / ".join(f"{by[d][n]:.1f}" for d in by if n in by[d]) or "–" for n in shown]
        grows = " / ".join(f"{exponent(points):.2f}" for points in by.values() if points)
        lines.append(f"| {pattern} | {how} | {' | '.join(cells)} | {grows} | {mine[-1]['share']:.1%} |")
    return "\n".join(lines)


def written(name: str, document: Row, text: str) -> str:
    """``text`` with the table of these rows between its marks."""
    start, end = f"<!-- {name}: start, written by bench/tools/curves.py -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(start)
    return f"{before}{start}\n\n{table(document)}\n\n{end}{rest.partition(end)[2]}"


# ---- pictures


def curve(axes: Any, points: dict[int, float], label: str, style: str) -> None:
    sizes = sorted(points)
    grows = f", grows as x^{exponent(points):.2f}" if len(sizes) > 2 else ""
    axes.plot(sizes, [points[n] for n in sizes], style, label=f"{label}{grows}", markersize=3)


def panel(axes: Any, title: str, x: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel="ms of CPU time, one thread", title=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)


def draw_patterns(document: Row, path: Path) -> None:
    drawn = figure(13, 5.5)
    for axes, direction in zip(drawn.subplots(1, 2), (FORWARD, BACKWARD)):
        rows = [r for r in document["rows"] if r.get("direction") == direction]
        for pattern, how in dict.fromkeys((r["pattern"], r["how"]) for r in rows):
            if how == "ours" or pattern == "local 256":
                points = {r["length"]: r["ms"] for r in rows if (r["pattern"], r["how"]) == (pattern, how)}
                curve(axes, points, f"{how}, {pattern}", "o-" if how == "ours" else "s--")
        panel(axes, f"{direction}, {document['environment']['cpu']}", "tokens")
    save(drawn, path)


def draw_complexity(document: Row, path: Path) -> None:
    drawn = figure(13, 5.5)
    for axes, by in zip(drawn.subplots(1, 2), ("length", "width")):
        rows = [r for r in document["rows"] if r["by"] == by]
        for name in dict.fromkeys(r["layer"] for r in rows):
            curve(axes, {r[by]: r["ms"] for r in rows if r["layer"] == name}, name, "o-")
        panel(axes, f"forward by {by}, {document['environment']['cpu']}", "tokens" if by == "length" else "features")
    save(drawn, path)


WHAT: dict[str, tuple[Callable[[], list[Row]], Callable[[Row, Path], None]]] = {
    "patterns": (patterns, draw_patterns),
    "complexity": (complexity, draw_complexity),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*WHAT, "draw"))
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # FlexAttention is compiled for each pattern and length
    for name, (measure, draw) in WHAT.items():
        file = given.out / f"{name}.json"
        if given.what == name:
            document = {"environment": results.environment("cpu", f"python bench/tools/curves.py {name}"), "rows": measure()}
            given.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(document, indent=1) + "\n")
        if given.what in (name, "draw") and file.exists():
            document = json.loads(file.read_text())
            draw(document, file.with_suffix(".png"))
            if given.out == FOLDER:
                PAGE.write_text(written(name, document, PAGE.read_text()))
            print(file, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
