# SPDX-License-Identifier: Apache-2.0
"""`F.scaled_dot_product_attention` as it is and under `pt.activate()`, interleaved: is a program ever slower for having added the line?

    python bench/tools/activated_attention.py --out FILE.json      # attention as in `pytransformer bench --suite aims`
    python bench/tools/activated_attention.py --write              # the committed run's table, into docs/ops/attention-torch.md

Both call the same function with the same tensors, masks as a program would keep them. Which backend computes is what the machine's
result says (`pytransformer verify` before it). "ratio" is the time under activate() over PyTorch's, round by round: [p20, median, p80];
above 1.03 the line costs something. Results are compared with float64 first, dropout's own masks apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import pytransformer as pt
from pytransformer.cli.benchmark import check, clock, exact, results
from pytransformer.cli.benchmark.plan import Step, dtype_name
from pytransformer.cli.benchmark.suites import SUITES
from pytransformer.cli.providers import TORCH, Outputs, Prepared, Problem, Unsupported, providers
from pytransformer.ops._core import preference
from pytransformer.ops._core.registry import OPS, trace

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "bench" / "results" / "amd-epyc-zen5-2-cores" / "activated.json"
DOCUMENT = ROOT / "docs" / "ops" / "attention-torch.md"
START, END = "<!-- activated: start, written by bench/tools/activated_attention.py --write -->", "<!-- activated: end -->"
COMMAND = "python bench/tools/activated_attention.py"
WAYS = {"torch": contextlib.nullcontext, "activated": pt.activate}
SLOWER = 1.03  # what noise alone does to the median of a row on a shared machine
PLAIN, MODES = ("full", "causal"), ("fwd", "fwd+bwd")


def steps(longest: int) -> Iterator[Step]:
    """Padded attention, warm caches, at most so many queries."""
    found = (step for step in SUITES["aims"]() if step.case.op == "attention" and not step.cold)
    return (step for step in found if step.case.shape["Lq"] <= longest)


def contender(problem: Problem, prepared: Prepared, grads: list[torch.Tensor], way: str) -> clock.Contender:
    def forward() -> Outputs:
        with torch.no_grad():
            return prepared.forward()

    def both() -> object:
        return check.gradients(problem, prepared.forward(), grads)

    return clock.Contender(both if problem.grad else forward, WAYS[way])


def measure(step: Step, seconds: float) -> dict[str, Any]:
    """One row, or {"wrong": why} for it."""
    problem = Problem.make(step.case, step.dtype, "cpu", seed=1, grad=step.mode != "fwd")
    (theirs,) = (p for p in providers("attention") if p.name == TORCH)
    prepared = theirs.prepare(problem)
    grads = check.upstream(problem, seed=2)
    with pt.activate(), trace() as ran:
        outputs = prepared.forward()
        if problem.grad:
            check.gradients(problem, outputs, grads)
    row = {"case": step.case.name, "shape": dict(step.case.shape), "dtype": dtype_name(step.dtype), "mode": step.mode}
    row["ran"] = [f"{op}: {backend}" for op, backend in ran] or ["PyTorch's own function"]
    if not prepared.own_dropout:
        found = check.compute(problem, Prepared("", prepared.forward, pt.activate), grads if problem.grad else None)
        verdict = check.judge(problem, found, exact.solve(problem, grads if problem.grad else None), peer=False)
        if verdict.wrong:
            return row | {"wrong": verdict.wrong}
    times = clock.interleaved({way: contender(problem, prepared, grads, way) for way in WAYS}, min_time=seconds)
    return row | {f"{way}_ms": t.median_ms for way, t in times.items()} | {"ratio": times["activated"].over(times["torch"])}


def run(seconds: float, only: str, longest: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for step in steps(longest):
        if only not in step.title:
            continue
        try:
            row = measure(step, seconds)
        except Unsupported as reason:
            row = {"case": step.case.name, "dtype": dtype_name(step.dtype), "mode": step.mode, "left_out": str(reason)}
        rows.append(row)
        told = f"{row['ratio'][1]:6.2f}  {row['ran'][0]}" if row.get("ratio") else row.get("wrong") or row.get("left_out")
        print(f"{step.title:44} {' '.join(f'{k}={v}' for k, v in step.case.shape.items()):44} {told}", flush=True)
    order = list(preference.cpu_order(OPS["attention"]))
    return {"environment": results.environment("cpu", COMMAND), "order": order, "rows": rows}


def table(document: dict[str, Any]) -> str:
    """By group, dtype and mode: the least, the median and the greatest of the rows' medians, and which rows are slower."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in document["rows"]:
        if row.get("ratio"):
            group = "full and causal" if row["case"] in PLAIN else "masks, biases, dropout, grouped heads"
            groups.setdefault((group, row["dtype"]), {}).setdefault(row["mode"], []).append(row)

    def cell(rows: list[dict[str, Any]]) -> str:
        ratios = sorted(row["ratio"][1] for row in rows)
        slower = sum(r > SLOWER for r in ratios)
        return f"{ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f} | {slower} of {len(rows)}"

    lines = ["| | forward | slower | forward + backward | slower |", "|---|---|---|---|---|"]
    for (group, dtype), modes in groups.items():
        lines.append(f"| {group}, {dtype} | {' | '.join(cell(modes[mode]) if mode in modes else '– | –' for mode in MODES)} |")
    where = document["environment"]
    head = (
        f"Time under `pt.activate()` over that of PyTorch's function alone, least / median / greatest of the rows; slower: above {SLOWER}. "
        f"{where['cpu']} ({where['isa']}), threads: {where['threads']}, torch {where['torch']}, commit {where['commit']}, order of the "
        f"backends: {', '.join(document['order'])}."
    )
    return f"{head}\n\n" + "\n".join(lines)


def written(document: dict[str, Any], text: str) -> str:
    """The page with the table of this run."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n\n{table(document)}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.2, help="each way is timed for, a row (default %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose title has this text")
    parser.add_argument("--longest", type=int, default=1 << 30, metavar="L", help="rows of at most so many queries")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--write", action="store_true", help="put the committed run's table into the docs, instead")
    options = parser.parse_args()
    if options.write:
        DOCUMENT.write_text(written(json.loads(COMMITTED.read_text()), DOCUMENT.read_text()))
        return
    torch.set_num_threads(options.threads)
    document = run(options.seconds, options.only, options.longest)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
