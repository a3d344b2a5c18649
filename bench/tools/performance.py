# SPDX-License-Identifier: Apache-2.0
"""docs/performance*.md and README's table of speed, from committed results only.

    python bench/tools/performance.py                        # print the documents
    python bench/tools/performance.py --write                # write them and README's table
    python bench/tools/performance.py --run [--machine NAME] # make performance: run everything first (about 25 minutes on two cores)

All figures are PyTorch's time over ours in one interleaved run: 2 is twice as fast, and below 1 we are slower.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pytransformer.cli.benchmark import report

sys.path.append(str(Path(__file__).parent))
from performance_aims import GRID, aims  # beside this file
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
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS, DOCS, README = ROOT / "bench" / "results", ROOT / "docs", ROOT / "README.md"
# The folders of results and their documents; README shows some of them side by side, one for each instruction set.
MACHINES = {
    "amd-epyc-zen5-2-cores": "performance.md",
    "intel-xeon-amx-2-cores": "performance-amx.md",
    "amd-epyc-zen4-2-cores": "performance-zen4.md",
    "amd-epyc-zen2-2-cores": "performance-zen2.md",
}
IN_README = ("amd-epyc-zen5-2-cores", "intel-xeon-amx-2-cores", "amd-epyc-zen2-2-cores")
START, END = "<!-- performance: start, written by bench/tools/performance.py -->", "<!-- performance: end -->"
AVX2 = "isa-avx2"
# What fills a folder, in order; run in a folder that is copied there at the end: a run's record of its commit stays clean.
COMMANDS = (
    "-m pytransformer bench --suite aims --out .",
    f"-m pytransformer bench --suite isa --isa avx2 --no-plots --no-memory --providers cpu,torch --out {AVX2}",
    "-m pytransformer bench models --layers 2 --seconds 1.5 --out .",
    "{tools}/step_time.py --out step-time.json",
)
PICTURES = ("speed*.png", "memory*.png", "accuracy.png", "roofline.png")  # of the suite, as many as it has lengths
MISSING = "Not in the committed results."
SHORTEST = 512  # keys, in the tables of plain attention


# ---- sections


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
    rows = [
        [p.where, times(p.ratio), str(p.ours["samples"]), *([report.limit_text(p.ours)] if limited(lost) else [])]
        for p in lost
    ]
    return f"{told}, the worst first:\n\n" + table(("what", "PyTorch / ours", "samples", *limited(lost)), rows)


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


def text(folder: Path) -> str:
    """The document of one machine."""
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
        "twice as fast; below 1, in bold, we are slower. Every contender was first checked against float64. "
        "GPUs: [an H100](cuda/first-gpu-run.md).",
        _others(folder.name),
        f"CPU: {report.environment_text(document['environment'])} Command: `{document['environment']['command']}`.",
        "## Aims and what was reached", aims(document, found, load(folder, f"{AVX2}/results.json")),
        "What limits them: attention's [phases](ops/attention-cpu.md), the norms' kernels [beside a copy](ops/layer_norm.md#cpu-kernel), "
        "decoding [by shape](ops/attention-pages.md), feed_forward's [products](ops/feed_forward.md#cpu-kernel).",
        "## Where we lose", losses(found),
        "## What the machine can do", peaks(document), images(folder, ["roofline.png"], DOCS),
        "## Attention, plain", grid(document, [p for p in found if p not in short]), images(folder, curves, DOCS),
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


def _others(machine: str) -> str:
    links = [f"[{name}]({page})" for name, page in MACHINES.items() if name != machine]
    return f"Other machines: {', '.join(links)}."


def _regimes(document: Row) -> str:
    rows = report.regime_rows(document["rows"])
    return report.markdown_table(report.REGIME_COLUMNS, rows, report.REGIME_COLUMNS[5:]) if rows else MISSING


# ---- README


def summary(folders: Sequence[Path]) -> str:
    """README's part: a line for each group of cases, and what is slower, on each machine."""
    machines, heads, lines = [], [], {}
    for place, folder in enumerate(folders):
        document = load(folder, "results.json")
        where = document["environment"]
        machines.append(
            f"{where['isa']}: {where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['date'][:10]}"
        )
        heads += [f"{where['isa']}: forward", "with backward", "slower in"]
        for group, cells in _groups(folder, document).items():
            lines.setdefault(group, [["–"] * 3 for _ in folders])[place] = cells
    base = folders[0].relative_to(ROOT)
    curves = [n for n in ("speed_by_l_bf16_fwd.png", "speed_by_l_f32_fwd_bwd.png") if (folders[0] / n).exists()]
    plots = "\n\n".join(f"![{n.removesuffix('.png').replace('_', ' ')}]({base}/{n})" for n in [*curves, "speed.png"])
    pages = ", ".join(f"[docs/{MACHINES[f.name]}](docs/{MACHINES[f.name]})" for f in folders if f.name in MACHINES)
    return "\n\n".join([
        f"PyTorch's time over ours, least to most, each machine in one interleaved run; below 1, in bold, we are slower. "
        f"{'; '.join(machines)}. MKL refuses AVX-512 to AMD's processors: PyTorch's float32 products take twice the time there. "
        "Without AVX-512 PyTorch has no fast product of bfloat16.",
        table(("", *heads), [[name, *(c for cells in row for c in cells)] for name, row in lines.items()]),
        f"Each case, where we lose, peaks, models and decoding: {pages}; "
        "what a call costs: [docs/call-cost.md](docs/call-cost.md).",
        plots,
    ])  # fmt: skip


def _groups(folder: Path, document: Row) -> dict[str, list[str]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs(document):
        groups.setdefault(_group(pair.ours), []).append(pair)
    rows = {}
    for name, members in groups.items():
        if all(p.ratio is None for p in members):  # PyTorch has no such op
            continue
        of = {m: [p.ratio for p in members if p.ours["mode"] == m] for m in ("fwd", "fwd+bwd")}
        slower = sum(p.ratio is not None and p.ratio < 0.995 for p in members)
        rows[name] = [span(of["fwd"]), span(of["fwd+bwd"]), f"{slower} of {len(members)}"]
    steps = (load(folder, "step-time.json") or {"rows": {}})["rows"]
    if "torch" in steps:
        rows["a training step of a small translator, against torch.nn.Transformer"] = [
            "–",
            times(steps["torch"]["ratio"]),
            "–",
        ]
    return rows


def _group(row: Row) -> str:
    dtype = report.SHORT[row["dtype"]]
    if "Lk" not in row["shape"]:
        return f"{row['op']} {dtype}"
    if row["case"] == "decode":
        return f"attention, decoding, {dtype}"
    return f"attention, {'full and causal' if row['case'] in GRID else 'masks, biases, dropout'}, {dtype}"


def readme(old: str) -> str:
    before, rest = old.split(START)
    return f"{before}{START}\n{summary([RESULTS / name for name in IN_README])}\n{END}{rest.split(END)[1]}"


def run_all(folder: Path) -> None:
    """Every command, in a folder of its own, whose files then replace those of `folder`."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    with tempfile.TemporaryDirectory() as made:
        for command in COMMANDS:
            print(f"\n---- python {command.format(tools='bench/tools')}", flush=True)
            words = command.format(tools=ROOT / "bench" / "tools").split()
            done = subprocess.run([sys.executable, *words], cwd=made, env=environment)
            if done.returncode > 1:  # 1: one of ours was wrong, which the document tells
                raise SystemExit(f"exit code {done.returncode}: {command}")
        for path in (path for pattern in PICTURES for path in folder.glob(pattern)):
            path.unlink()
        shutil.copytree(made, folder, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run everything first")
    parser.add_argument(
        "--machine", choices=MACHINES, default=next(iter(MACHINES)), help="whose results --run replaces (%(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="write the documents and README's table")
    options = parser.parse_args()
    if options.run:
        run_all(RESULTS / options.machine)
    for name, page in MACHINES.items():
        if options.run or options.write:
            (DOCS / page).write_text(text(RESULTS / name))
        else:
            print(text(RESULTS / name))
    if options.run or options.write:
        README.write_text(readme(README.read_text()))


if __name__ == "__main__":
    main()
