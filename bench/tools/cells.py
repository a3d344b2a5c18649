# SPDX-License-Identifier: Apache-2.0
"""Print the best peer's time over ours for each cell of benchmark results, the slowest first.

    python bench/tools/cells.py FOLDER

FOLDER has results.json files of `pytransformer bench` and turns.json of bench/tools/turns.py, at
any depth. A cell is a problem and a mode; `cuda_any_order` has cells of its own. Times are of the
kernels if both sides have them, else of the call. The output fits 12,000 characters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pytransformer.cli.providers import PEERS

LIMIT = 12_000  # characters
ANY_ORDER = "cuda_any_order"
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


class Cell(NamedTuple):
    problem: str
    ours: str
    our_ms: float
    peer: str
    peer_ms: float
    base: float | None  # base over candidate

    @property
    def speed(self) -> float:
        return self.peer_ms / self.our_ms

    def line(self) -> str:
        change = "" if self.base is None else f"{self.base:.3f}"
        return (
            f"| {self.problem} | {self.ours} {self.our_ms:.4g} | {self.peer} {self.peer_ms:.4g} |"
            f" {self.speed:.2f} | {change} |"
        )


def title(row: dict[str, Any]) -> str:
    shape = "x".join(f"{name}{size}" for name, size in row["shape"].items())
    words = (row["op"], row["case"], row["dtype"], row["mode"], shape)
    return " ".join(SHORT.get(word, word) for word in words)


def milliseconds(row: dict[str, Any], kernels: bool) -> float:
    return row["kernel_ms"] if kernels else row["median_ms"]


def best(rows: list[dict[str, Any]], kernels: bool) -> dict[str, Any]:
    return min(rows, key=lambda row: milliseconds(row, kernels))


def cells(
    rows: Iterable[dict[str, Any]], changes: dict[str, dict[str, list[float]]]
) -> Iterator[Cell]:
    """Yield the cells with a backend of ours and a peer."""
    problems: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        problems.setdefault(title(row), []).append(row)
    for problem, members in problems.items():
        peers = [r for r in members if r["backend"] in PEERS]
        any_order = [r for r in members if r["backend"] == ANY_ORDER]
        ours = [r for r in members if r["backend"] not in (*PEERS, ANY_ORDER, "reference")]
        for group in (ours, any_order):
            if not group or not peers:
                continue
            kernels = all(r.get("kernel_ms") for r in (*group, *peers))
            mine, theirs = best(group, kernels), best(peers, kernels)
            ratio = changes.get(problem, {}).get(mine["backend"])
            yield Cell(
                problem,
                mine["backend"],
                milliseconds(mine, kernels),
                theirs["backend"],
                milliseconds(theirs, kernels),
                ratio and ratio[1],
            )


def load(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, list[float]]]]:
    """Return all rows, and base/candidate by problem and backend.

    Problems that only turns.json has become rows of call times.
    """
    rows = [
        row
        for path in sorted(folder.rglob("results.json"))
        for row in json.loads(path.read_text())["rows"]
    ]
    known, changes = {title(row) for row in rows}, {}
    for path in sorted(folder.rglob("turns.json")):
        for turn in json.loads(path.read_text()):
            changes[title(turn)] = turn["base_over_candidate"]
            if title(turn) in known:
                continue
            rows += [
                {**turn, "backend": name.removeprefix("candidate "), **figures}
                for name, figures in turn["contenders"].items()
                if not name.startswith("base ")
            ]
    return rows, changes


def table(found: Iterable[Cell], limit: int = LIMIT) -> str:
    """Return the table, the slowest cells first, without those beyond the limit."""
    ordered = sorted(found, key=lambda cell: cell.speed)
    lines = [
        "| cell | ours, ms | best peer, ms | peer/ours | base/candidate |",
        "|---|---|---|---|---|",
    ]
    won = sum(cell.speed >= 1.03 for cell in ordered)
    last = f"{won} of {len(ordered)} cells at 1.03 or more"
    room = limit - len(last) - 60 - sum(len(line) + 1 for line in lines)
    for n, cell in enumerate(ordered):
        line = cell.line()
        if len(line) + 1 > room:
            last += f"; {len(ordered) - n} faster cells left out"
            break
        lines.append(line)
        room -= len(line) + 1
    return "\n".join([*lines, last])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    found = list(cells(*load(parser.parse_args(argv).folder)))
    print(table(found))
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
