# SPDX-License-Identifier: Apache-2.0
"""Error norms of every op, dtype and case, ours beside naive code and PyTorch's own kernels: the figures of docs/accuracy-tables.md.

    python bench/tools/golden.py --run      # make golden: measure, write the results file, then the document's tables
    python bench/tools/golden.py --write    # the tables anew from the committed results file

||error|| / ||exact|| against float64 of each output and gradient, by the same code that refuses wrong kernels in `pytransformer bench`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from pytransformer.cli.benchmark import check, exact, plan, report, results
from pytransformer.cli.benchmark.runner import SEED
from pytransformer.cli.providers import NAIVE, TORCH, Problem, Unsupported, providers
from pytransformer.console import Console
from pytransformer.ops._core.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "accuracy-tables.md"
RESULTS = ROOT / "bench" / "results" / "amd-epyc-zen5-2-cores" / "accuracy.json"
START, END = "<!-- golden: start, written by bench/tools/golden.py -->", "<!-- golden: end -->"
DTYPES = ("float32", "bfloat16", "float16")
SHAPE = {"Lq": 256, "Lk": 256, "D": 64, "rows": 256, "d": 256, "hidden": 1024, "classes": 1000}
DECODE = {"Lq": 1, "Lk": 1024, "D": 64}
PAGES = ("pages", "decode_pages")  # of the cases that have tests of their own
OURS = "cpu"
Errors = dict[str, float]


def problems() -> Iterator[tuple[plan.Case, str]]:
    """Every case of every op, in each dtype."""
    for op in plan.OPS:
        for case in (*plan.cases(op, "small"), *(c for c in plan.cases(op, "small", {plan.APART}) if c.name in PAGES)):
            for dtype in DTYPES:
                yield plan.resized(case, DECODE if case.name.startswith("decode") else SHAPE), dtype


def errors(case: plan.Case, dtype: str) -> dict[str, Errors]:
    """The errors of each tensor by backend; PyTorch's and naive code's where they compute the case and draw no mask of their own."""
    problem = Problem.make(case, plan.DTYPES[dtype], "cpu", seed=SEED, grad=not case.forward_only)
    grads = check.upstream(problem, SEED)
    solution, found = exact.solve(problem, grads), {}
    for provider in providers(case.op):
        if provider.name not in (OURS, NAIVE, TORCH):
            continue
        try:
            prepared = provider.prepare(problem)
        except Unsupported:
            continue
        if not prepared.own_dropout:
            verdict = check.judge(problem, check.compute(problem, prepared, grads), solution, peer=provider.name != OURS)
            found[provider.name] = dict(verdict.errors)
    return found


def measure() -> dict[str, Any]:
    console, todo, rows = Console(), list(problems()), []
    with console.progress(len(todo)) as progress:
        for case, dtype in todo:
            progress.step(f"{case.op} {case.name} {dtype}")
            rows.append(
                {"op": case.op, "case": case.name, "dtype": dtype, "shape": dict(case.shape), "errors": errors(case, dtype)}
            )
            progress.advance()
    return {"environment": results.environment("cpu", "python bench/tools/golden.py --run"), "rows": rows}


# ---- the document


def ratios(row: dict[str, Any], peer: str) -> list[float]:
    """Our error over the peer's, tensor by tensor; where the peer happens to be exact there is none."""
    ours, theirs = row["errors"].get(OURS, {}), row["errors"].get(peer, {})
    return [ours[name] / theirs[name] for name in ours if theirs.get(name) and theirs[name] == theirs[name]]


def _norms(row: dict[str, Any], backend: str) -> str:
    """The worst output and the worst gradient."""
    found = row["errors"].get(backend)
    if not found:
        return "–"
    outputs = OPS[row["op"]].returned if OPS[row["op"]].differentiable else found  # all that a call without gradients leaves
    halves = ([e for n, e in found.items() if (n in outputs) is out] for out in (True, False))
    return " / ".join(f"{max(half):.1e}" if half else "–" for half in halves)


def _middle(found: list[float]) -> str:
    return f"{median(found):.2f}" if found else "–"


def section(document: dict[str, Any]) -> str:
    """The text between the markers."""
    rows, peers = document["rows"], (NAIVE, TORCH)
    medians = []
    for dtype in DTYPES:
        members = [row for row in rows if row["dtype"] == dtype]
        of = {peer: [ratio for row in members for ratio in ratios(row, peer)] for peer in peers}
        cells = [f"{_middle(of[peer])} ({sum(r <= 1 for r in of[peer])} of {len(of[peer])})" for peer in peers]
        medians.append([report.SHORT[dtype], *cells])
    lines = [
        [row["op"], row["case"].replace("_", " "), report.SHORT[row["dtype"]], *(_norms(row, b) for b in (OURS, *peers)),
         *(_middle(ratios(row, peer)) for peer in peers)]
        for row in rows
    ]  # fmt: skip
    where = document["environment"]
    return "\n\n".join([
        f"Measured by `{where['command']}`: {report.environment_text(where)}",
        "Median over all tensors of all cases of our error over theirs, and in how many it is 1 or less:",
        report.markdown_table(("dtype", "over naive code", "over PyTorch's kernels"), medians),
        "Worst output / worst gradient of each case; the last two columns are medians over its tensors. –: does not compute the case, or "
        "with a dropout mask of its own.",
        report.markdown_table(("op", "case", "dtype", "ours", "naive", "PyTorch", "over naive", "over PyTorch"), lines),
    ])  # fmt: skip


def written(text: str, document: dict[str, Any]) -> str:
    """`text` with what is between the markers brought up to date."""
    before, rest = text.split(START)
    return f"{before}{START}\n{section(document)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure first")
    parser.add_argument("--write", action="store_true", help="rewrite docs/accuracy-tables.md from the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="default %(default)s")
    options = parser.parse_args()
    if options.run:
        options.results.write_text(json.dumps(measure(), indent=1) + "\n")
    document = json.loads(options.results.read_text())
    if options.run or options.write:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), document))
    else:
        print(section(document))


if __name__ == "__main__":
    main()
