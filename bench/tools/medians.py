# SPDX-License-Identifier: Apache-2.0
"""Write the medians of a benchmark run as one CSV file, the committed form of a run.

    python bench/tools/medians.py RUN bench/results/MACHINE/medians.csv

RUN is the folder of `pytransformer bench --out`. Next to its results.json the tool reads, if they
exist, isa-avx2/results.json, models.json and step-time.json. The CSV has one row per measurement of
our backend and of PyTorch. Its first line is a comment with the machine and its peak rates in JSON.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, str]
PROVIDERS = ("cpu", "torch")
COLUMNS = (
    "suite", "op", "case", "dtype", "direction", "cache", "shape", "implementation", "isa",
    "threads", "median_ms", "p20_ms", "p80_ms", "torch_over_this", "tflops", "gbps", "error",
    "peak_bytes",
)  # fmt: skip
KEPT_OF_ENVIRONMENT = (
    "cpu",
    "cores",
    "threads",
    "isa",
    "torch",
    "commit",
    "date",
    "load",
    "command",
)


class Run(NamedTuple):
    """A machine's committed measurements."""

    environment: dict[str, Any]
    peaks: dict[str, Any]
    rows: list[Row]


def read(path: Path) -> Run:
    """Return the run in a CSV file that :func:`write` wrote."""
    with path.open(newline="", encoding="utf-8") as file:
        head = json.loads(file.readline().removeprefix("# "))
        return Run(head["environment"], head["peaks"], list(csv.DictReader(file)))


def write(path: Path, run: Run) -> None:
    """Write a run as CSV below one line of JSON."""
    head = {"environment": run.environment, "peaks": run.peaks}
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {json.dumps(head)}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.rows)


def collect(folder: Path) -> Run:
    """Return the medians of the run in a folder."""
    document = _load(folder / "results.json")
    if document is None:
        raise SystemExit(f"medians: {folder} must be a benchmark's folder, got no results.json")
    environment = {key: document["environment"].get(key) for key in KEPT_OF_ENVIRONMENT}
    peaks = {
        key: _round(value) for key, value in (document["peaks"] or {}).items() if key != "copy_gbps"
    }
    rows = list(_of_suite("aims", document))
    rows += _of_suite("isa", _load(folder / "isa-avx2" / "results.json") or {"rows": []})
    rows += _of_models(_load(folder / "models.json") or {"rows": []})
    rows += _of_step(_load(folder / "step-time.json") or {"rows": {}})
    return Run(environment, peaks, rows)


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _round(value: Any) -> Any:
    """Return numbers with six significant digits, in nested dictionaries too."""
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _row(environment: dict[str, Any], times: dict[str, Any], **cells: Any) -> Row:
    cells |= {key: times[key] for key in ("median_ms", "p20_ms", "p80_ms")}
    cells |= {"isa": environment["isa"], "threads": environment["threads"]}
    return {key: "" if cells.get(key) is None else f"{_round(cells[key])}" for key in COLUMNS}


def _of_suite(suite: str, document: dict[str, Any]) -> Iterator[Row]:
    for row in document["rows"]:
        if row["backend"] in PROVIDERS:
            yield _row(
                document["environment"],
                row,
                suite=suite,
                direction=row["mode"],
                shape=" ".join(f"{name}={size}" for name, size in row["shape"].items()),
                implementation=row["backend"],
                torch_over_this=row["speedup_torch"],
                **{
                    key: row[key]
                    for key in ("op", "case", "dtype", "tflops", "gbps", "error", "peak_bytes")
                },
                cache=row.get("cache"),
            )


def _of_models(document: dict[str, Any]) -> Iterator[Row]:
    for row in document["rows"]:
        yield _row(
            document["environment"],
            row,
            suite="models",
            op="model",
            case=row["model"],
            dtype=row["dtype"],
            direction=row["mode"],
            shape=row["batch"],
            implementation="cpu" if row["variant"] == "pytransformer" else row["variant"],
            torch_over_this=row["speedup_sdpa"],
            error=(
                row["gradients_error"] if row["mode"] == "training_step" else row["outputs_error"]
            ),
            peak_bytes=row["peak_bytes"],
        )


def _of_step(document: dict[str, Any]) -> Iterator[Row]:
    rows = document["rows"]
    for name, row in rows.items():
        yield _row(
            document["environment"],
            row,
            suite="step",
            op="model",
            case=document["model"],
            dtype="bfloat16" if document["bf16"] else "float32",
            direction="training_step",
            shape=(
                f"source {document['shapes']['input_ids']}, target {document['shapes']['labels']}"
            ),
            implementation="cpu" if name == "pytransformer" else name,
            torch_over_this=rows["torch"]["ratio"] / row["ratio"] if "torch" in rows else None,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder with a results.json")
    parser.add_argument("csv", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    run = collect(options.run)
    options.csv.parent.mkdir(parents=True, exist_ok=True)
    write(options.csv, run)
    print(f"{options.csv}: {len(run.rows)} rows")


if __name__ == "__main__":
    main()
