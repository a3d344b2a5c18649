# SPDX-License-Identifier: Apache-2.0
"""``python -m support.sweep``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pytransformer.console import Console

from .. import sweep as sweep_package
from . import report
from .run import Rows, sweep
from .subjects import model_types


def main() -> int:
    parser = argparse.ArgumentParser(
        description=sweep_package.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "types", nargs="*", metavar="type", help="model types, as in config.json (default: all)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="model types at a time (default 1)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows there, as they come"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out the model types whose rows FILE has already",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=(
            f"put them into {report.RESULTS.name}, and write {report.DOC.name} and its table in"
            " docs"
        ),
    )
    arguments = parser.parse_args()
    known = model_types()
    if unknown := set(arguments.types) - set(known):
        parser.error(f"no such model type: {', '.join(sorted(unknown))}")
    rows: Rows = {}
    if arguments.resume and arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    had = {name.partition("/")[0] for name in rows}
    chosen = [model_type for model_type in arguments.types or known if model_type not in had]
    console = Console(sys.stderr)
    with console.progress(len(chosen)) as progress:
        progress.step("importing transformers")
        for model_type, found in sweep(chosen, arguments.jobs):
            rows |= found
            if arguments.json:
                put(arguments.json, json.dumps(report.clean(rows), indent=1, ensure_ascii=False))
            progress.advance()
            progress.step(
                f"{model_type}:"
                f" {', '.join(row['verdict'] for row in found.values()) or 'a part of others'}"
            )
    if arguments.write:
        import transformers

        place = report.place(transformers.__version__)
        earlier = report.load(place)["rows"] if arguments.types else {}
        report.save(earlier | rows, place)
        report.DOC.write_text(report.page(report.load(), report.load(report.OLDER)))
        page = report.COMPATIBILITY
        page.write_text(report.with_table(page.read_text(), report.load()["rows"]))
    console = Console()
    console.table(
        ("class", "verdict", "differs"),
        [(name, row["verdict"], told(row)) for name, row in rows.items()],
    )
    console.print(", ".join(f"{verdict} {count}" for verdict, count in report.counts(rows).items()))
    return 1 if report.counts(rows)["wrong"] else 0


def put(path: Path, text: str) -> None:
    """Write atomically, so that an interrupted run preserves earlier rows."""
    whole = path.with_name(path.name + ".part")
    whole.write_text(text)
    whole.replace(path)


def told(row: dict) -> str:  # type: ignore[type-arg]
    cells = {name: cell for name, cell in row.get("cells", {}).items() if cell not in ("same", "–")}
    return row.get("reason", "") or "; ".join(f"{name} {cell}" for name, cell in cells.items())


if __name__ == "__main__":
    sys.exit(main())
