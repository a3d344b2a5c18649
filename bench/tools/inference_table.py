# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/embedders.md from the committed runs of inference.py.

    python bench/tools/inference_table.py           # print the tables
    python bench/tools/inference_table.py --write   # write them into the page

The runs are bench/results/MACHINE/inference.csv. A figure is the time of transformers with sdpa
over the engine's in one interleaved run: 2 is twice as fast. The fastest engine of a row is bold.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "embedders.md"
START = "<!-- engines: start, written by bench/tools/inference_table.py -->"
END = "<!-- engines: end -->"
BASE, SHORT = "sdpa", {"float32": "f32", "bfloat16": "bf16"}

Rows = list[dict[str, str]]


def load(path: Path) -> tuple[dict[str, Any], Rows]:
    """Return the environment and the rows of a run."""
    with path.open(encoding="utf-8", newline="") as file:
        environment = json.loads(file.readline().removeprefix("#"))["environment"]
        return environment, list(csv.DictReader(file))


def table(rows: Rows) -> list[str]:
    """Return the lines of a table: one row per work and dtype, one column per engine."""
    names = [n for n in dict.fromkeys(r["engine"] for r in rows) if n != BASE]
    lines = [f"| work | dtype | {BASE}, ms | {' | '.join(names)} |"]
    lines.append(f"|{'---|' * (3 + len(names))}")
    for work, dtype in dict.fromkeys((r["work"], r["dtype"]) for r in rows):
        ms = {
            r["engine"]: float(r["median_ms"])
            for r in rows
            if (r["work"], r["dtype"]) == (work, dtype) and r["median_ms"]
        }
        best = min(ms, key=ms.__getitem__)
        cells = [
            "–"
            if n not in ms
            else f"{'**' * (n == best)}{ms[BASE] / ms[n]:.2f}{'**' * (n == best)}"
            for n in names
        ]
        lines.append(f"| {work} | {SHORT[dtype]} | {ms[BASE]:.1f} | {' | '.join(cells)} |")
    return lines


def section() -> str:
    """Return the page's generated part."""
    parts = []
    for path in sorted(RESULTS.glob("*/inference.csv")):
        where, rows = load(path)
        versions = {
            r["engine"]: r["version"] for r in rows if r["version"] and r["engine"] != "eager"
        }
        weights = sorted({r["work"].split(",")[0] for r in rows if r["weights"] == "real"})
        parts += [
            f"### {path.parent.name}",
            "",
            f"{where['device_name']}, {where['isa']}, {where['threads']} thread, load"
            f" {where['load']} at the start, {where['date'][:10]};"
            f" {', '.join(f'{name} {version}' for name, version in versions.items())}."
            f" Real weights: {', '.join(weights) or 'none'}.",
            "",
            *table(rows),
            "",
        ]
        reasons = dict.fromkeys(f"{r['engine']}: {r['reason']}" for r in rows if r["reason"])
        parts += [f"- {reason}" for reason in reasons] + [""]
    return "\n".join(parts).rstrip()


def replaced(page: str, text: str) -> str:
    """Return the page with the text between the marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{text}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(replaced(page, section()), encoding="utf-8")
    else:
        print(section())


if __name__ == "__main__":
    main()
