# SPDX-License-Identifier: Apache-2.0
"""Committed measurements in pairs, ours and PyTorch's of one line-up, and their figures as cells of a table. Used by performance.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pytransformer.cli.benchmark import report

OURS, PEER = "cpu", "torch"
Row = dict[str, Any]


class Pair(NamedTuple):
    """One of our rows and PyTorch's in the same line-up; None where PyTorch took no part."""

    ours: Row
    peer: Row | None

    @property
    def ratio(self) -> float | None:
        return self.ours["speedup_torch"]

    @property
    def where(self) -> str:
        o = self.ours
        return (
            f"{o['case'].replace('_', ' ')} {report.SHORT[o['dtype']]}, {report.shape_text(o['shape'])}, {report.mode_text(o)}"
        )


# ---- reading


def load(folder: Path, name: str) -> Any:
    """The JSON file of that name, or None where the run has not been committed."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def pairs(document: Row) -> list[Pair]:
    peers = {_line_up(row): row for row in document["rows"] if row["backend"] == PEER}
    return [Pair(row, peers.get(_line_up(row))) for row in document["rows"] if row["backend"] == OURS]


def _line_up(row: Row) -> tuple[Any, ...]:
    return row["op"], row["case"], tuple(row["shape"].items()), row["dtype"], row["mode"], row.get("cache")


def backward(forward: Pair, both: Pair) -> float | None:
    """PyTorch's backward over ours, each as the difference of forward with backward and forward alone."""
    if forward.peer is None or both.peer is None:
        return None
    ours, theirs = (b["median_ms"] - f["median_ms"] for f, b in zip(forward, both))
    return theirs / ours if ours > 0 and theirs > 0 else None


def by_mode(found: Iterable[Pair]) -> dict[tuple[Any, ...], dict[str, Pair]]:
    """The pairs of one problem by mode."""
    problems: dict[tuple[Any, ...], dict[str, Pair]] = {}
    for pair in found:
        o = pair.ours
        key = (o["op"], o["case"], tuple(o["shape"].items()), o["dtype"], o.get("cache"))
        problems.setdefault(key, {})[o["mode"]] = pair
    return problems


def ratio_of(modes: dict[str, Pair], mode: str) -> float | None:
    if mode == "bwd" and "bwd" not in modes:
        return backward(modes["fwd"], modes["fwd+bwd"]) if {"fwd", "fwd+bwd"} <= set(modes) else None
    return modes[mode].ratio if mode in modes else None


# ---- cells


def times(value: float | None) -> str:
    """A ratio; in bold where we are slower."""
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value < 0.995 else f"{value:.2f}"


def span(values: Sequence[float | None]) -> str:
    known = sorted(v for v in values if v is not None)
    if not known:
        return "–"
    return times(known[0]) if len(known) == 1 else f"{times(known[0])} to {times(known[-1])}"


def percent(part: float, whole: float | None) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
