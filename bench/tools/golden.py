# SPDX-License-Identifier: Apache-2.0
"""Measure the error norms of every op, dtype and case next to naive code and PyTorch's kernels.

    python bench/tools/golden.py --run      # make golden: write accuracy.csv and docs/accuracy.md
    python bench/tools/golden.py --write    # write the table from the committed accuracy.csv

An error is ||error|| / ||exact|| against float64 for each output and gradient, computed by the code
that rejects wrong kernels in `pytransformer bench`.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from pytransformer.cli.benchmark import check, exact, plan, report, results
from pytransformer.cli.benchmark.runner import SEED
from pytransformer.cli.providers import NAIVE, TORCH, Problem, Unsupported, providers
from pytransformer.console import Console

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "accuracy.md"
RESULTS = ROOT / "bench" / "results" / "amd-epyc-zen3-2-cores" / "accuracy.csv"
START, END = "<!-- golden: start, written by bench/tools/golden.py -->", "<!-- golden: end -->"
DTYPES = ("float32", "bfloat16", "float16")
SHAPE = {"Lq": 256, "Lk": 256, "D": 64, "rows": 256, "d": 256, "hidden": 1024, "classes": 1000}
DECODE = {"Lq": 1, "Lk": 1024, "D": 64}
PAGES = ("pages", "decode_pages")  # cases with separate tests
OURS = "cpu"
COLUMNS = ("op", "case", "dtype", "backend", "errors")
Errors = dict[str, float]


def problems() -> Iterator[tuple[plan.Case, str]]:
    """Yield every case of every op, in each dtype."""
    for op in plan.OPS:
        for case in (
            *plan.cases(op, "small"),
            *(c for c in plan.cases(op, "small", {plan.APART}) if c.name in PAGES),
        ):
            for dtype in DTYPES:
                yield plan.resized(case, DECODE if case.name.startswith("decode") else SHAPE), dtype


def errors(case: plan.Case, dtype: str) -> dict[str, Errors]:
    """Return the errors of each tensor by backend.

    PyTorch and naive code are included if they support the case with the same dropout mask.
    """
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
            verdict = check.judge(
                problem,
                check.compute(problem, prepared, grads),
                solution,
                peer=provider.name != OURS,
            )
            found[provider.name] = dict(verdict.errors)
    return found


def measure() -> dict[str, Any]:
    console, todo, rows = Console(), list(problems()), []
    with console.progress(len(todo)) as progress:
        for case, dtype in todo:
            progress.step(f"{case.op} {case.name} {dtype}")
            rows.append(
                {"op": case.op, "case": case.name, "dtype": dtype, "errors": errors(case, dtype)}
            )
            progress.advance()
    return {
        "environment": results.environment("cpu", "python bench/tools/golden.py --run"),
        "rows": rows,
    }


# ---- the document


def ratios(row: dict[str, Any], peer: str) -> list[float]:
    """Return our error over the peer's by tensor, without tensors that the peer has exact."""
    ours, theirs = row["errors"].get(OURS, {}), row["errors"].get(peer, {})
    return [
        ours[name] / theirs[name]
        for name in ours
        if theirs.get(name) and theirs[name] == theirs[name]
    ]


def save(document: dict[str, Any], path: Path) -> None:
    """Write the errors as CSV below the environment in JSON; a line per case, dtype, backend."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {json.dumps(document['environment'])}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in document["rows"]:
            for backend, found in row["errors"].items():
                errors_text = " ".join(f"{name}={error!r}" for name, error in found.items())
                writer.writerow([row["op"], row["case"], row["dtype"], backend, errors_text])


def load(path: Path) -> dict[str, Any]:
    """Return the document that :func:`save` wrote."""
    rows: dict[tuple[str, str, str], dict[str, Errors]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        environment = json.loads(file.readline().removeprefix("# "))
        for line in csv.DictReader(file):
            pairs = (word.split("=") for word in line["errors"].split())
            key = (line["op"], line["case"], line["dtype"])
            rows.setdefault(key, {})[line["backend"]] = {
                name: float(error) for name, error in pairs
            }
    found = [
        {"op": op, "case": case, "dtype": dtype, "errors": e}
        for (op, case, dtype), e in rows.items()
    ]
    return {"environment": environment, "rows": found}


def _middle(found: list[float]) -> str:
    return f"{median(found):.2f}" if found else "–"


def section(document: dict[str, Any]) -> str:
    """Return the text between the markers."""
    rows, peers = document["rows"], (NAIVE, TORCH)
    medians = []
    for dtype in DTYPES:
        members = [row for row in rows if row["dtype"] == dtype]
        of = {peer: [ratio for row in members for ratio in ratios(row, peer)] for peer in peers}
        cells = [
            f"{_middle(of[peer])} ({sum(r <= 1 for r in of[peer])} of {len(of[peer])})"
            for peer in peers
        ]
        medians.append([report.SHORT[dtype], *cells])
    where = document["environment"]
    return "\n\n".join(
        [
            f"Measured by `{where['command']}`: {report.environment_text(where)}",
            report.markdown_table(("dtype", "over naive code", "over PyTorch's kernels"), medians),
        ]
    )


def written(text: str, document: dict[str, Any]) -> str:
    """Return `text` with a new section between the markers."""
    before, rest = text.split(START)
    return f"{before}{START}\n{section(document)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="measure first")
    parser.add_argument(
        "--write", action="store_true", help="write the table of docs/accuracy.md from the CSV file"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="FILE", help="default %(default)s"
    )
    options = parser.parse_args()
    if options.run:
        save(measure(), options.results)
    document = load(options.results)
    if options.run or options.write:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), document))
    else:
        print(section(document))


if __name__ == "__main__":
    main()
