# SPDX-License-Identifier: Apache-2.0
"""Write pytransformer/ops/_core/preferences.csv from the committed GPU results.

    python bench/tools/preferences.py            # print the table
    python bench/tools/preferences.py --write    # write it; tests/ops/test_preference.py compares

The newest committed time of each cell and backend counts, kernel time if recorded, because it hides
a warm call's host time. kernels.csv beside the results has times from a profiler.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytransformer.ops._core import dispatch
from pytransformer.ops._core.dispatch import Cell, Entry, Row
from pytransformer.ops._core.registry import OPS
from pytransformer.testing.cases import case

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"sm_90": ROOT / "bench" / "results" / "nvidia-h100-80gb-hbm3"}
OURS = ("cuda", "triton")
LAST_RUN = "2026-11-26T23"  # kernels.csv has times from after every run of that day

Shape = tuple[tuple[str, int], ...]
Measured = dict[tuple[Cell, str, Shape], dict[Entry, float]]  # by cell, case and shape


def rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every committed row with the date of its run."""
    for path in folder.rglob("results.json"):
        content = json.loads(path.read_text())
        for row in content["rows"]:
            if row.get("median_ms"):
                yield content["environment"]["date"], row
    for path in folder.rglob("kernels.csv"):
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                pairs = (item.split("=") for item in line["shape"].split())
                shape = {name: int(n) for name, n in pairs}
                shape |= {"Hkv": shape["Hq"]} if "Hq" in shape else {}
                yield LAST_RUN, line | {"shape": shape, "kernel_ms": float(line["kernel_ms"])}


def entry_of(row: dict[str, Any]) -> Entry | None:
    """Return our backend for a row's implementation, or None if no backend would run it."""
    name, forward = row["backend"], row["mode"] == "fwd"
    if name in OURS:
        return name, None
    if "torch" not in OPS[row["op"]].backends:
        return None
    plain = row["case"] in ("full", "causal")
    if name == "torch_cudnn" and plain and forward:
        return "torch", "cudnn"
    if name == "torch_efficient" and row["case"] in ("key_padding", "bool_mask"):
        return "torch", "efficient"
    # This run used any order in backward, but the backend uses a fixed order, which takes longer.
    if (name == "torch_flash" and plain and not forward) or (
        name == "torch" and row["case"] == "decode"
    ):
        return "torch", None
    return None


@functools.cache
def measured(folder: Path) -> Measured:
    """Return the newest time of each cell, shape and backend."""
    newest: dict[Any, tuple[str, float]] = {}
    for date, row in rows(folder):
        entry = entry_of(row)
        if entry is None:
            continue
        shape = tuple(sorted(row["shape"].items()))
        key = (row["op"], row["case"], shape, row["dtype"], row["mode"], entry)
        newest[key] = max(
            newest.get(key, ("", 0.0)), (date, row.get("kernel_ms") or row["median_ms"])
        )
    found: Measured = defaultdict(dict)
    for (op, name, shape, dtype, mode, entry), (_, ms) in newest.items():
        found[cell(op, name, dict(shape), dtype, mode), name, shape][entry] = ms
    return found


def cell(op: str, name: str, shape: dict[str, int], dtype: str, mode: str) -> Cell:
    """Return the cell of a benchmark's call, from arguments on the meta device."""
    # Page tables depend on lengths' values, so contiguous keys replace them.
    if name == "decode_pages":
        return replace(cell(op, "decode", shape, dtype, mode), kind="pages")
    sized = case(name).resize(**{k: v for k, v in shape.items() if k in case(name).shape})
    with FakeTensorMode():
        args, kwargs = sized.make("cpu", getattr(torch, dtype), seed=0)
        return dispatch.cell_of(OPS[op], OPS[op].prepare(*args, **kwargs)[0], mode)


def table(folder: Path) -> list[Row]:
    """Return a row per cell: the geometric mean over the shapes that all backends have."""
    by_cell: dict[Cell, list[dict[Entry, float]]] = defaultdict(list)
    for (where, _, _), times in measured(folder).items():
        by_cell[where].append(times)
    result = []
    for where, several in by_cell.items():
        entries = [e for e in several[0] if all(e in times for times in several)]
        means = {e: math.exp(sum(math.log(t[e]) for t in several) / len(several)) for e in entries}
        result.append(Row(where, means))
    return sorted(result, key=lambda row: tuple(map(str, vars(row.cell).values())))


def text() -> str:
    """Return the contents of preferences.csv."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("arch", "op", "direction", "dtype", "kind", "size", "length", "ms"))
    for arch, folder in FOLDERS.items():
        for row in table(folder):
            names = {":".join(filter(None, e)): ms for e, ms in sorted(row.times.items(), key=str)}
            ms = " ".join(f"{name}={value:.4g}" for name, value in names.items())
            writer.writerow((arch, *vars(row.cell).values(), ms))
    return out.getvalue()


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        dispatch.PREFERENCES.write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
