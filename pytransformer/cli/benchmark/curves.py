# SPDX-License-Identifier: Apache-2.0
"""Plots of a sweep, one line per implementation, and the roofline.

speed_by_<x>.png    TFLOP/s by size, one panel per case, dtype and mode; one file
                    per dtype and mode if there are many
memory_by_<x>.png   peak memory, likewise
roofline.png        TFLOP/s by operations per byte, under the measured peaks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pytransformer.cli.benchmark.plots import (
    Row,
    figure_of,
    finish,
    legend_and_title,
    plain_ticks,
    styles,
)
from pytransformer.cli.benchmark.report import SHORT, label_of
from pytransformer.console import escape_plot

MOST_PANELS = 12


def draw_all(folder: Path, document: dict[str, Any]) -> list[str]:
    """Draw what the rows allow and return the file names."""
    rows, drawn = document["rows"], []
    for name, swept in sweeps(rows).items():
        for ending, groups in _figures(swept).items():
            measured = [[row for row in group if row["peak_bytes"] is not None] for group in groups]
            for what, some, unit, value in (
                ("speed", groups, "TFLOP/s", lambda row: row["tflops"]),
                ("memory", [group for group in measured if len(group) > 1], "peak memory, MB",
                    lambda row: max(row["peak_bytes"] / 1e6, 0.1)),
            ):  # fmt: skip
                if some:
                    drawn.append(f"{what}_by_{name.lower()}{ending}.png")
                    _panels(folder / drawn[-1], document, some, name, unit, value)
    if document.get("peaks") and rows:
        _roofline(folder / "roofline.png", document)
        drawn.append("roofline.png")
    return drawn


def sweeps(rows: Sequence[Row]) -> dict[str, list[list[Row]]]:
    """Return rows that differ in one dimension (L: Lq and Lk together), by its name.

    If several dimensions vary, a sweep needs at least three sizes with the rest of the shape equal.
    """
    cases: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(
            (row["op"], row["case"], row["dtype"], row["mode"], row.get("cache", "warm")), []
        ).append(row)
    found: dict[str, list[list[Row]]] = {}
    for members in cases.values():
        varying = [
            name for name in members[0]["shape"] if len({row["shape"][name] for row in members}) > 1
        ]
        names = [n for n in varying if n not in ("Lq", "Lk")]
        if {"Lq", "Lk"} <= set(varying) and all(
            row["shape"]["Lq"] == row["shape"]["Lk"] for row in members
        ):
            names.append("L")
        else:
            names += [n for n in varying if n in ("Lq", "Lk")]
        for name in names:
            alike: dict[tuple[tuple[str, int], ...], list[Row]] = {}
            for row in members:
                alike.setdefault(_rest(row, name), []).append(row)
            min_points = 2 if len(names) == 1 else 3
            groups = [
                group
                for group in alike.values()
                if len({_size(row, name) for row in group}) >= min_points
            ]
            if groups:
                found.setdefault(name, []).extend(groups)
    return found


def _rest(row: Row, name: str) -> tuple[tuple[str, int], ...]:
    swept = ("Lq", "Lk") if name == "L" else (name,)
    return tuple((dim, size) for dim, size in row["shape"].items() if dim not in swept)


def _figures(groups: list[list[Row]]) -> dict[str, list[list[Row]]]:
    """Return figure suffix -> readable number of panels, split by dtype and mode if needed."""
    if len(groups) <= MOST_PANELS:
        return {"": groups}
    found: dict[str, list[list[Row]]] = {}
    for group in groups:
        first = group[0]
        found.setdefault(f"_{SHORT[first['dtype']]}_{first['mode'].replace('+', '_')}", []).append(
            group
        )
    return {ending: some[:MOST_PANELS] for ending, some in found.items()}


def _many(groups: list[list[Row]]) -> bool:
    """Return True if some case has several panels, whose titles then need the shape."""
    names = [(group[0]["case"], group[0]["dtype"], group[0]["mode"]) for group in groups]
    return len(set(names)) < len(names)


def _size(row: Row, name: str) -> int:
    return row["shape"]["Lk" if name == "L" else name]


def _panels(
    path: Path,
    document: Row,
    groups: list[list[Row]],
    name: str,
    unit: str,
    value: Callable[[Row], float],
) -> None:
    columns = min(4 if len(groups) % 4 == 0 else 3, len(groups))
    lines = -(-len(groups) // columns)
    figure = figure_of(1.0 + 3.9 * columns, 1.2 + 3.1 * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    for axis, members in zip(axes, groups):
        for backend, (colour, mark) in styles(members).items():
            line = sorted(
                (row for row in members if row["backend"] == backend),
                key=lambda row: _size(row, name),
            )
            if line:
                axis.plot(
                    [_size(row, name) for row in line], [value(row) for row in line], marker=mark,
                    color=colour, label=label_of(backend),
                    markersize=5, linewidth=1.5, markeredgecolor="white", markeredgewidth=0.4,
                )  # fmt: skip
        first = members[0]
        rest = (
            " ".join(f"{dim}={size}" for dim, size in _rest(first, name) if dim in ("B", "Hq", "D"))
            if _many(groups)
            else ""
        )
        axis.set_title(
            escape_plot(f"{first['case']} {SHORT[first['dtype']]} {first['mode']} {rest}".strip()),
            fontsize=9,
        )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        sizes = sorted({_size(row, name) for row in members})
        axis.set_xticks(sizes, [str(n) for n in sizes])
        axis.minorticks_off()
        axis.grid(color="0.88")
        axis.set_axisbelow(True)
        axis.set_xlabel({"L": "length", "Lk": "keys"}.get(name, name))
        plain_ticks(axis.yaxis)
    for axis in axes[::columns]:
        axis.set_ylabel(unit)
    what = unit.split(",")[0]
    title = f"{what[0].upper()}{what[1:]} against {'length' if name == 'L' else name}"
    legend_and_title(figure, axes[: len(groups)], document, title)
    figure.savefig(path)


def _roofline(path: Path, document: Row) -> None:
    """Draw speed by operations per byte of compulsory traffic, under the measured peaks."""
    rows, peaks = document["rows"], document["peaks"]
    dtypes = [d for d in dict.fromkeys(row["dtype"] for row in rows) if d in peaks["tflops"]]
    figure = figure_of(1.0 + 5.0 * len(dtypes), 4.8)
    axes = figure.subplots(1, len(dtypes), squeeze=False)[0]
    for axis, dtype in zip(axes, dtypes):
        members = [row for row in rows if row["dtype"] == dtype and row["gbps"] > 0]
        spots = [
            (1e3 * row["tflops"] / row["gbps"], row["tflops"], row["backend"]) for row in members
        ]
        low, high = min(s[0] for s in spots) / 2, max(s[0] for s in spots) * 2
        roof, slope = peaks["tflops"][dtype], peaks["gbps"] * 1e-3
        corner = roof / slope
        xs = sorted({low, high, min(max(corner, low), high)})
        ys = [min(roof, slope * x) for x in xs]
        axis.plot(xs, ys, color="0.2", linewidth=1.5, label="measured peak")
        top = max([roof, *(s[1] for s in spots)])  # above every mark
        for x, y, text, side in (
            (high, 1.35 * top, f"peak {roof * 1e3:.0f} GFLOP/s", "right"),
            (low, 0.45 * slope * low, f"copy {peaks['gbps']:.0f} GB/s", "left"),
        ):
            axis.text(
                x, y, text, ha=side, va="bottom", fontsize=8, zorder=4,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )  # fmt: skip
        axis.set_ylim(0.4 * min([slope * low, *(s[1] for s in spots)]), 2.2 * top)
        size = 36 if len(spots) < 60 else 16
        for backend, (colour, mark) in styles(members).items():
            mine = [s for s in spots if s[2] == backend]
            if mine:
                axis.scatter(
                    [s[0] for s in mine], [s[1] for s in mine], c=colour, marker=mark, s=size,
                    label=label_of(backend),
                    edgecolors="white", linewidths=0.4, zorder=3, alpha=0.8,
                )  # fmt: skip
        finish(axis, SHORT[dtype], "operations per byte read or written at least")
    axes[0].set_ylabel("TFLOP/s")
    title = "Roofline: the peaks are measured (matrix product, copy)"
    legend_and_title(figure, axes, document, title)
    figure.savefig(path)
