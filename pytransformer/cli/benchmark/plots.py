# SPDX-License-Identifier: Apache-2.0
"""Plots from the rows of a results.json; needs matplotlib.

speedup.png  PyTorch's time over each implementation's, per case, bars from p20 to
             p80; one panel per mode
speed.png    time per case, one mark per implementation, bars from p20 to p80;
             one panel per mode
memory.png   peak memory above the inputs, likewise
accuracy.png error by speed, both relative to PyTorch: good is low and right
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pytransformer.cli.benchmark import results
from pytransformer.cli.benchmark.report import SHORT, environment_text, label_of, shape_text
from pytransformer.console import EXTRA_HINT, escape_plot

Row = dict[str, Any]

# One color and mark per implementation, in every figure: Okabe and Ito's colors, then darker ones.
STYLES = {
    "cpu": ("#0072B2", "o"),
    "cuda": ("#D55E00", "P"),
    "triton": ("#009E73", "^"),
    "reference": ("#56B4E9", "v"),
    "cuda_any_order": ("#F4A582", "P"),
    "torch": ("#E69F00", "D"),
    "naive": ("#999999", "s"),
    "torch_flash": ("#CC79A7", "D"),
    "torch_efficient": ("#C2B200", "D"),
    "torch_cudnn": ("#222222", "D"),
    "torch_math": ("#B8A07A", "D"),
    "compile": ("#5B5B8C", "s"),
    "flex": ("#6A3D9A", "X"),
    "flash_attn": ("#8B4513", "*"),
    "liger": ("#7FA31A", "h"),
    "quack": ("#1B7F8C", "h"),
}
CHARACTERS_PER_INCH, INCHES_PER_NAME = 16, 2.3  # of a legend's title and names
_CONTENDERS = (("#B2182B", "p"), ("#1F4E5F", "d"), ("#7A0177", "H"))


def styles(rows: list[Row]) -> dict[str, tuple[str, str]]:
    """Return color and mark of each implementation of the rows, a user's contenders last."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    more = [name for name in names if name not in STYLES]
    added = {name: _CONTENDERS[i % len(_CONTENDERS)] for i, name in enumerate(more)}
    return {name: style for name, style in (STYLES | added).items() if name in names}


def why_not() -> str | None:
    """Return why plots cannot be drawn and the remedy, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"no plots: matplotlib is not installed. {EXTRA_HINT}"
    return None


def draw_all(folder: Path, document: dict[str, Any]) -> list[str]:
    """Draw what the rows allow and return the file names."""
    rows = one_shape_each(document["rows"])
    compared = [row for row in rows if row["speedup_torch"] and row["backend"] != "torch"]
    with_memory = [row for row in rows if row["peak_bytes"] is not None]
    charts = (
        ("speedup.png", compared, "speed-up over PyTorch (1: equal)",
            "Speed-up over PyTorch by case (right is faster)", _speedup),
        ("speed.png", rows, "time of one call, ms", "Speed by case (left is faster)", _speed),
        ("memory.png", with_memory, "peak memory above the inputs, MB",
            "Peak memory by case (left is less)", _memory),
    )  # fmt: skip
    drawn = []
    for name, members, unit, title, value in charts:
        if members:
            _by_case(folder / name, document, members, unit, title, value)
            drawn.append(name)
    against = [row for row in document["rows"] if row["error"] and row["speedup_torch"]]
    if against:
        _error_against_speed(folder / "accuracy.png", document, against)
        drawn.append("accuracy.png")
    return drawn


def one_shape_each(rows: list[Row]) -> list[Row]:
    """Return, for each case with several shapes, the rows of one shape.

    The shape is the one with the most contenders and, among those, the most work. The tables and
    the plots of curves.py have the rest.
    """
    shapes: dict[tuple[str, ...], dict[tuple[tuple[str, int], ...], list[Row]]] = {}
    for row in rows:
        key = (row["op"], row["case"], row["dtype"])
        shapes.setdefault(key, {}).setdefault(tuple(row["shape"].items()), []).append(row)

    def weight(shape: tuple[tuple[str, int], ...], members: list[Row]) -> tuple[int, int]:
        return len({row["backend"] for row in members}), math.prod(size for _, size in shape)

    kept = {key: max(of, key=lambda shape: weight(shape, of[shape])) for key, of in shapes.items()}
    return [
        row
        for row in rows
        if tuple(row["shape"].items()) == kept[row["op"], row["case"], row["dtype"]]
    ]


def figure_of(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: no global state, no display
    return figure


def _speed(row: Row) -> tuple[float, float, float]:
    return row["median_ms"], row["p20_ms"], row["p80_ms"]


def _speedup(row: Row) -> tuple[float, float, float]:
    ratio = row["speedup_torch"]
    low, middle, high = row.get("time_over_torch") or (1 / ratio, 1 / ratio, 1 / ratio)
    return 1 / middle, 1 / high, 1 / low


def _memory(row: Row) -> tuple[float, float, float]:
    # Clamp to the resolution, so that a call which needs no memory shows on the log axis.
    value = max(row["peak_bytes"] / 1e6, 0.1)
    return value, value, value


def _label(row: Row) -> str:
    # A case named after its op ("layer_norm") needs no op beside it.
    name = (
        row["case"]
        if row["case"].startswith(row["op"].split("_varlen")[0])
        else f"{row['op']}: {row['case']}"
    )
    return escape_plot(
        f"{name} {SHORT[row['dtype']]}"
        f" ({shape_text(row['shape'])}){' cold' * (row.get('cache') == 'cold')}"
    )


def _by_case(
    path: Path,
    document: Row,
    rows: list[Row],
    unit: str,
    title: str,
    value: Callable[[Row], tuple[float, float, float]],
) -> None:
    labels = list(dict.fromkeys(_label(row) for row in rows))
    place = {label: i for i, label in enumerate(labels)}
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    marks = styles(rows)
    backends = list(marks)
    figure = figure_of(3.5 + 4.5 * len(modes), 1.9 + 0.36 * len(labels))
    axes = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axis, mode in zip(axes, modes, strict=True):
        for turn, backend in enumerate(backends):
            colour, mark = marks[backend]
            members = [row for row in rows if row["mode"] == mode and row["backend"] == backend]
            # Offset marks within a case's line, so that equal values do not hide each other.
            ys = [
                place[_label(row)] + 0.55 * ((turn + 0.5) / len(backends) - 0.5) for row in members
            ]
            triples = [value(row) for row in members]
            spread = [
                [middle - low for middle, low, _ in triples],
                [high - middle for middle, _, high in triples],
            ]
            axis.errorbar(
                [t[0] for t in triples], ys, xerr=spread if members else None, fmt=mark,
                color=colour, markersize=5.5,
                elinewidth=1.4, label=label_of(backend),
                markeredgecolor="white", markeredgewidth=0.4,
            )  # fmt: skip
        axis.set_xscale("log")
        if value is _speedup:
            axis.axvline(1, color=STYLES["torch"][0], linewidth=1.2, label="PyTorch = 1")
        axis.set_title(mode, fontsize=10)
        axis.set_xlabel(unit)
        axis.grid(axis="x", which="major", color="0.85")
        axis.grid(axis="x", which="minor", color="0.94")
        axis.set_axisbelow(True)
        for line in range(0, len(labels), 2):
            axis.axhspan(line - 0.5, line + 0.5, color="0.96", zorder=0)
        axis.set_ylim(len(labels) - 0.5, -0.5)
        plain_ticks(axis.xaxis)
    axes[0].set_yticks(range(len(labels)), labels)
    legend_and_title(figure, axes[:1], document, title)
    figure.savefig(path)


def _error_against_speed(path: Path, document: Row, rows: list[Row]) -> None:
    # A row with a note was checked without dropout, so its error is no baseline.
    torch_error = {
        results.step_key(row): row["error"]
        for row in rows
        if row["backend"] == "torch" and not row["note"]
    }
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    marks = styles([row for row in rows if row["backend"] != "torch"])
    backends = list(marks)
    figure = figure_of(2.0 + 4.5 * len(modes), 5.4)
    axes = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axis, mode in zip(axes, modes, strict=True):
        for backend in backends:
            colour, mark = marks[backend]
            members = [
                r
                for r in rows
                if r["mode"] == mode
                and r["backend"] == backend
                and torch_error.get(results.step_key(r))
            ]
            axis.scatter(
                [r["speedup_torch"] for r in members],
                [r["error"] / torch_error[results.step_key(r)] for r in members],
                c=colour, marker=mark, s=40 if len(rows) < 120 else 18, label=label_of(backend),
                edgecolors="white", linewidths=0.4, zorder=3,
            )  # fmt: skip
        axis.axvline(1, color=STYLES["torch"][0], linewidth=1.2)
        axis.axhline(1, color=STYLES["torch"][0], linewidth=1.2, label="PyTorch = 1")
        finish(axis, mode, "speed, times PyTorch's")
    axes[0].set_ylabel("error against float64, times PyTorch's")
    title = "Error against speed, one mark per case (low and right is good)"
    legend_and_title(figure, axes[:1], document, title)
    figure.savefig(path)


def finish(axis: Any, title: str, x_label: str) -> None:
    """Set a plot's title, label, log scales, grid and ticks."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label)
    axis.grid(which="major", color="0.88")
    axis.set_axisbelow(True)
    plain_ticks(axis.xaxis)
    plain_ticks(axis.yaxis)


def plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    # Few decades: label 1, 2 and 5 of each. Many decades: label the decades only, never as "10^-1".
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / max(low, 1e-30) < 300 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_and_title(figure: Any, axes: Iterable[Any], document: Row, title: str) -> None:
    """Add one legend of all axes, the environment and the title."""
    import textwrap

    legend: dict[str, Any] = {}
    for axis in axes:
        legend |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels())}
    columns = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    place = textwrap.fill(environment_text(document["environment"], escape_plot), columns)
    figure.legend(
        legend.values(), legend.keys(), loc="outside lower center", frameon=False,
        ncols=max(1, min(len(legend), int(figure.get_figwidth() / INCHES_PER_NAME))),
        title=place, title_fontsize=7,
    )  # fmt: skip
    figure.suptitle(title, fontsize=12, fontweight="bold")
