# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and README's table of speed, from committed results only.

    python bench/tools/performance.py            # print the document
    python bench/tools/performance.py --write    # write docs/performance.md and README's table
    python bench/tools/performance.py --run      # make performance: run everything first (about 25 minutes on two cores), then write

All figures are PyTorch's time over ours in one interleaved run: 2 is twice as fast, and below 1 we are slower.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pytransformer.cli.benchmark import report

sys.path.append(str(Path(__file__).parent))
from speed_pairs import (
    OURS,
    Pair,
    Row,
    by_mode,
    load,
    pairs,
    percent,
    ratio_of,
    span,
    table,
    times,
)  # beside this file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results" / "intel-xeon-amx-2-cores"
DOCUMENT, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
START, END = "<!-- performance: start, written by bench/tools/performance.py -->", "<!-- performance: end -->"
AVX2 = "isa-avx2"
# What fills the folder, in order; run in a folder that is copied there at the end: a run's record of its commit stays clean.
COMMANDS = (
    "-m pytransformer bench --suite aims --out .",
    f"-m pytransformer bench --suite isa --isa avx2 --no-plots --no-memory --providers cpu,torch --out {AVX2}",
    "-m pytransformer bench models --layers 2 --seconds 1.5 --out .",
    "{tools}/step_time.py --out step-time.json",
)
GRID, MISSING = ("full", "causal"), "Not in the committed results."
SHORTEST = 512  # keys, in the tables of plain attention


class Aim(NamedTuple):
    """A promise: cases, dtypes and what is compared (fwd, bwd, fwd+bwd), and the smallest ratio."""

    what: str
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    mode: str
    min_ratio: float
    shortest: int = 0  # key length from which on it counts


BOTH = ("float32", "bfloat16")
AIMS = (
    Aim("attention bf16, forward, L >= 1024", GRID, ("bfloat16",), "fwd", 4.3, 1024),
    Aim("attention bf16, backward, L >= 1024", GRID, ("bfloat16",), "bwd", 2.7, 1024),
    Aim("attention fp32, forward", GRID, ("float32",), "fwd", 2.3, 512),
    Aim("attention fp32, backward", GRID, ("float32",), "bwd", 2.3, 512),
    Aim("key padding, forward + backward", ("key_padding",), BOTH, "fwd+bwd", 4.0),
    Aim("bias with its gradient", ("bias",), BOTH, "fwd+bwd", 6.0),
    Aim("dropout", ("dropout",), BOTH, "fwd+bwd", 6.0),
    Aim("window", ("window",), BOTH, "fwd+bwd", 4.0),
    Aim("add_norm, forward", ("add_norm",), BOTH, "fwd", 2.0),
    Aim("feed_forward fp32, forward", ("feed_forward_gelu", "feed_forward_relu"), ("float32",), "fwd", 2.0),
    Aim("feed_forward bf16, forward", ("feed_forward_gelu", "feed_forward_relu"), ("bfloat16",), "fwd", 1.05),
)

# (what, cases, dtypes, the peak it is held against, the share of it that is the aim); forward only
SHARES = (
    ("attention bf16, forward, L >= 1024, of a matrix product's rate", GRID, ("bfloat16",), "tflops", 0.8),
    ("attention fp32, forward, L >= 1024, of a matrix product's rate", GRID, ("float32",), "tflops", 0.85),
    ("decoding, of read bandwidth", ("decode",), BOTH, "read_gbps", 0.8),
    ("add_norm, forward, of `copy_` into a reused output", ("add_norm",), BOTH, "warm_gbps", 0.9),
)


# ---- sections


def aims(document: Row, found: list[Pair], avx2: Row | None) -> str:
    rows, peaks = [], document.get("peaks") or {}
    for aim in AIMS:
        values = [
            ratio_of(modes, aim.mode)
            for (_, case, shape, dtype, _), modes in by_mode(found).items()
            if case in aim.cases and dtype in aim.dtypes and dict(shape).get("Lk", aim.shortest) >= aim.shortest
        ]
        known = [v for v in values if v is not None]
        met = f"{sum(v >= aim.min_ratio for v in known)} of {len(known)}"
        rows.append([aim.what, f"{aim.min_ratio:g}", span(known), met if known else "–"])
    held = [p.ratio for p in pairs(avx2) if p.ratio is not None] if avx2 else []
    met = f"{sum(v >= 0.9 for v in held)} of {len(held)}" if held else "–"
    rows.append(["every op held to AVX2, PyTorch too", "0.9", span(held), met])
    for what, names, dtypes, key, min_share in SHARES:
        shares = []
        for p in found:
            o, whole = p.ours, peaks.get(key)
            whole = whole.get(o["dtype"]) if isinstance(whole, dict) else whole
            long = o["case"] not in GRID or o["shape"]["Lk"] >= 1024
            if o["case"] in names and o["dtype"] in dtypes and o["mode"] == "fwd" and whole and long:
                shares.append(o["tflops" if key == "tflops" else "gbps"] / whole)
        known = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "–"
        met = f"{sum(s >= min_share for s in shares)} of {len(shares)}" if shares else "–"
        rows.append([what, f"{min_share:.0%}", known, met])
    return table(("what", "aim", "measured, least to most", "aim met by"), rows)


def peaks(document: Row) -> str:
    found = document.get("peaks")
    if not found:
        return MISSING
    rows = [[f"matrix product, {report.SHORT[d]}", f"{1e3 * rate:.0f} GFLOP/s"] for d, rate in found["tflops"].items()]
    for key, what in (
        ("gbps", "copy, buffers larger than the caches, reads and writes counted"),
        ("read_gbps", "reading such a buffer"),
        ("warm_gbps", "copy of 32 MB into a reused output"),
    ):
        if key in found:
            rows.append([what, f"{found[key]:.1f} GB/s"])
    return table(("measured", "rate"), rows)


def grid(document: Row, found: list[Pair]) -> str:
    """Ratios of plain attention against the length: forward / backward / both; and our share of the matrix product's rate."""
    problems = {k: m for k, m in by_mode(found).items() if k[1] in GRID and dict(k[2])["Lq"] == dict(k[2])["Lk"]}
    lengths = sorted({dict(k[2])["Lk"] for k in problems})
    peak = (document.get("peaks") or {}).get("tflops", {})
    lines: dict[tuple[Any, ...], dict[int, tuple[str, str]]] = {}
    for (_, case, shape, dtype, _), modes in problems.items():
        s = dict(shape)
        ratios = " / ".join(times(ratio_of(modes, mode)) for mode in ("fwd", "bwd", "fwd+bwd"))
        rates = [modes[mode].ours["tflops"] for mode in ("fwd", "fwd+bwd") if mode in modes]
        shares = " / ".join(percent(rate, peak.get(dtype)) for rate in rates)
        lines.setdefault((report.SHORT[dtype], case, s["D"], s["B"] * s["Hq"]), {})[s["Lk"]] = ratios, shares
    columns = ("dtype", "mask", "D", "batch x heads", *(f"L = {length}" for length in lengths))
    parts = []
    for place, title in enumerate((
        "Forward / backward / forward with backward (backward alone is the difference of the other two):",
        "Useful operations over the rate of a large matrix product, forward / forward with backward:",
    )):  # fmt: skip
        cells = [[*map(str, key), *(at[n][place] if n in at else "–" for n in lengths)] for key, at in sorted(lines.items())]
        parts += [title, table(columns, cells)]
    return "\n\n".join(parts if peak else parts[:2]) if lines else MISSING


def cases(found: list[Pair]) -> str:
    rows = []
    for (_, case, _, dtype, _), modes in by_mode(found).items():
        first = next(iter(modes.values())).ours
        cells = [times(ratio_of(modes, mode)) for mode in ("fwd", "fwd+bwd")]
        versus = [f"{modes[m].ours['speedup_naive']:.2f}" if m in modes and modes[m].ours["speedup_naive"] else "–"
                  for m in ("fwd", "fwd+bwd")]  # fmt: skip
        last = modes.get("fwd+bwd", modes.get("fwd"))
        kept = [report.megabytes(r.get("saved_bytes")) if r else "–" for r in (last.ours, last.peer)]
        peak = [report.megabytes(r["peak_bytes"]) if r else "–" for r in (last.ours, last.peer)]
        rows.append([case.replace("_", " "), report.shape_text(first["shape"]), report.SHORT[dtype], *cells, " / ".join(versus),
                     " / ".join(kept), " / ".join(peak)])  # fmt: skip
    heads = (
        "case",
        "shape",
        "dtype",
        "forward",
        "forward + backward",
        "over naive code",
        "kept MB, ours / PyTorch",
        "peak MB",
    )
    return table(heads, rows) if rows else MISSING


def bandwidth(document: Row, found: list[Pair], key: str, of: str) -> str:
    whole = (document.get("peaks") or {}).get(key)
    rows = [
        [p.ours["case"].replace("_", " "), report.shape_text(p.ours["shape"]), report.SHORT[p.ours["dtype"]],
         report.mode_text(p.ours), times(p.ratio), f"{p.ours['gbps']:.1f}", percent(p.ours["gbps"], whole),
         *([report.limit_text(p.ours)] if limited(found) else [])]
        for p in found
    ]  # fmt: skip
    return table(("case", "shape", "dtype", "mode", "PyTorch / ours", "GB/s", of, *limited(found)), rows) if rows else MISSING


def limited(found: list[Pair]) -> tuple[str, ...]:
    """The title of the column that says what limits a row; none in files that are older than it."""
    return ("what limits it",) if any(p.ours.get("limit") for p in found) else ()


def models(document: Row | None) -> str:
    if document is None:
        return MISSING
    rows: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in document["rows"]:
        rows.setdefault((row["model"], row["batch"], report.SHORT[row["dtype"]]), {})[row["mode"], row["variant"]] = row
    cells = []
    for key, at in rows.items():
        ours = [at[mode, "pytransformer"] for mode in ("forward", "training_step")]
        peak = [report.megabytes(at["training_step", variant]["peak_bytes"]) for variant in ("pytransformer", "sdpa", "eager")]
        ratios = [f"{times(m['speedup_sdpa'])} / {times(m['speedup_eager'])}" for m in ours]
        cells.append([*key, *ratios, " / ".join(peak)])
    heads = (
        "model",
        "batch",
        "dtype",
        "forward: over sdpa / eager",
        "training step: over sdpa / eager",
        "its peak MB: ours / sdpa / eager",
    )
    return table(heads, cells)


def step(document: Row | None) -> str:
    if document is None:
        return MISSING
    rows, shapes = document["rows"], document["shapes"]
    cells = [[name, f"{row['median_ms']:.0f}", times(row["ratio"])] for name, row in rows.items()]
    words = f"`{document['model']}`, source {shapes['input_ids']}, target {shapes['labels']}, with Adam:"
    return f"{words}\n\n" + table(("who", "ms", "its time over ours"), cells)


def held(document: Row | None) -> str:
    """Both held to AVX2."""
    if document is None:
        return MISSING
    if not (found := pairs(document)):
        reasons = sorted({e["reason"] for e in document["not_run"] if e["backend"] == OURS})
        return f"Not run: {'; '.join(reasons)}"
    return f"{report.environment_text(document['environment'])}\n\n" + cases(found)


def losses(found: list[Pair]) -> str:
    lost = sorted((p for p in found if p.ratio is not None and p.ratio < 0.995), key=lambda p: p.ratio)
    told = f"{len(lost)} of {len(found)} measurements are slower than PyTorch's own"
    if not lost:
        return f"{told}."
    rows = [[p.where, times(p.ratio), *([report.limit_text(p.ours)] if limited(lost) else [])] for p in lost]
    return f"{told}, the worst first:\n\n" + table(("what", "PyTorch / ours", *limited(lost)), rows)


def refused(document: Row) -> str:
    wrong = [e for e in document["not_run"] if e["status"] in ("wrong", "failed")]
    if not wrong:
        return "Nobody."
    rows = [[e["backend"], e["case"].replace("_", " "), report.SHORT[e["dtype"]], e["mode"], e["reason"]] for e in wrong]
    return report.markdown_table(("who", "case", "dtype", "mode", "why"), rows)


def images(folder: Path, names: Iterable[str], base: Path) -> str:
    """Those of the pictures that are committed."""
    there = [name for name in names if (folder / name).exists()]
    path = "/".join([*[".."] * len(base.relative_to(ROOT).parts), *folder.relative_to(ROOT).parts])
    return "\n\n".join(f"![{name.removesuffix('.png').replace('_', ' ')}]({path}/{name})" for name in there)


def text(folder: Path = FOLDER) -> str:
    """docs/performance.md."""
    document = load(folder, "results.json")
    found = pairs(document)
    attention = [p for p in found if "Lk" in p.ours["shape"] and p.ours["case"] not in GRID and p.ours["case"] != "decode"]
    short = [p for p in found if p.ours["case"] in GRID and p.ours["shape"]["Lk"] < SHORTEST]
    decode = [p for p in found if p.ours["case"] == "decode"]
    rowwise = [p for p in found if "Lk" not in p.ours["shape"]]
    norms = [p for p in rowwise if set(p.ours["shape"]) == {"rows", "d"}]  # no product: bound by memory
    others = [p for p in rowwise if p not in norms]
    curves = sorted(path.name for path in folder.glob("speed_by_*.png"))
    parts = [
        "# Performance",
        "Written by `bench/tools/performance.py` from committed results alone; [benchmarks.md](benchmarks.md) says how they are measured "
        "and with which commands. Unless a column says otherwise a figure is **PyTorch's time over ours** in one interleaved run: 2 is "
        "twice as fast; below 1, in bold, we are slower. Every contender was first checked against float64. GPUs: not yet run on one.",
        f"CPU: {report.environment_text(document['environment'])} Command: `{document['environment']['command']}`.",
        "## Aims and what was reached", aims(document, found, load(folder, f"{AVX2}/results.json")),
        "## Where we lose", losses(found),
        "## What the machine can do", peaks(document), images(folder, ["roofline.png"], DOCUMENT.parent),
        "## Attention, plain", grid(document, [p for p in found if p not in short]), images(folder, curves, DOCUMENT.parent),
        "## Attention: masks, biases, dropout, short sequences", cases(attention + short),
        "## Decoding: one token over a long cache", bandwidth(document, decode, "read_gbps", "of read bandwidth"),
        "## Norms", bandwidth(document, norms, "warm_gbps", "of `copy_`"),
        "## feed_forward and linear_cross_entropy", cases(others),
        "## Held to AVX2", held(load(folder, f"{AVX2}/results.json")),
        "## What a tiny call costs", "[call-cost.md](call-cost.md), from a run of its own: what a call costs before any arithmetic.",
        "## Whole models", models(load(folder, "models.json")),
        "## A training step", step(load(folder, "step-time.json")),
        "## Burst and sustained", _regimes(document),
        "## Refused", "Contenders that were wrong or failed, and were not timed:", refused(document),
        "## Every row", f"[results.json](../{folder.relative_to(ROOT)}/results.json): `bench/tools/redraw.py` makes a report of it",
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def _regimes(document: Row) -> str:
    rows = report.regime_rows(document["rows"])
    return report.markdown_table(report.REGIME_COLUMNS, rows, report.REGIME_COLUMNS[5:]) if rows else MISSING


# ---- README


def summary(folder: Path = FOLDER) -> str:
    """README's part: a line for each group of cases, and what is slower."""
    document = load(folder, "results.json")
    found = pairs(document)
    groups: dict[str, list[Pair]] = {}
    for pair in found:
        groups.setdefault(_group(pair.ours), []).append(pair)
    rows = []
    for name, members in groups.items():
        of = {m: [p.ratio for p in members if p.ours["mode"] == m] for m in ("fwd", "fwd+bwd")}
        slower = sum(p.ratio is not None and p.ratio < 0.995 for p in members)
        rows.append([name, span(of["fwd"]), span(of["fwd+bwd"]), f"{slower} of {len(members)}"])
    for row in (load(folder, "step-time.json") or {"rows": {}})["rows"].items():
        if row[0] == "torch":
            rows.append(
                ["a training step of a small translator, against torch.nn.Transformer", "–", times(row[1]["ratio"]), "–"]
            )
    where = document["environment"]
    base = folder.relative_to(ROOT)
    curves = [n for n in ("speed_by_l_bf16_fwd.png", "speed_by_l_f32_fwd_bwd.png") if (folder / n).exists()]
    plots = "\n\n".join(f"![{n.removesuffix('.png').replace('_', ' ')}]({base}/{n})" for n in [*curves, "speed.png"])
    return "\n\n".join([
        f"PyTorch's time over ours, least to most, in one interleaved run on {where['cores']} cores of an {where['cpu']} "
        f"({where['isa']}), torch {where['torch']}; below 1, in bold, we are slower:",
        table(("", "forward", "forward + backward", "slower in"), rows),
        "Each case, where we lose, peaks, models and decoding: [docs/performance.md](docs/performance.md); "
        "what a call costs: [docs/call-cost.md](docs/call-cost.md).",
        plots,
    ])  # fmt: skip


def _group(row: Row) -> str:
    dtype = report.SHORT[row["dtype"]]
    if "Lk" not in row["shape"]:
        return f"{row['op']} {dtype}"
    if row["case"] == "decode":
        return f"attention, decoding, {dtype}"
    return f"attention, {'full and causal' if row['case'] in GRID else 'masks, biases, dropout'}, {dtype}"


def readme(old: str, folder: Path = FOLDER) -> str:
    before, rest = old.split(START)
    return f"{before}{START}\n{summary(folder)}\n{END}{rest.split(END)[1]}"


def run_all() -> None:
    """Every command, in a folder of its own, whose files then replace those of FOLDER."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory() as made:
        for command in COMMANDS:
            print(f"\n---- python {command.format(tools='bench/tools')}", flush=True)
            words = command.format(tools=ROOT / "bench" / "tools").split()
            done = subprocess.run([sys.executable, *words], cwd=made, env=environment)
            if done.returncode > 1:  # 1: one of ours was wrong, which the document tells
                raise SystemExit(f"exit code {done.returncode}: {command}")
        for path in FOLDER.glob("*.png"):
            path.unlink()
        shutil.copytree(made, FOLDER, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run everything first")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md and README's table")
    options = parser.parse_args()
    if options.run:
        run_all()
    if options.run or options.write:
        DOCUMENT.write_text(text())
        README.write_text(readme(README.read_text()))
    else:
        print(text())


if __name__ == "__main__":
    main()
