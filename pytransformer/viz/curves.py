# SPDX-License-Identifier: Apache-2.0
"""A quantity by another, a line for each of several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..console import escape_plot
from ._figure import figure


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, *, title: str = "", log_x: bool = False
) -> Any:
    """Points (x, y) joined by lines: accuracy by the size of the data (log_x), a distance over the steps of training.

    Args:
        curves: name to points.
        x, y: what the axes say.
    """
    fig = figure(5.5, 3.8)
    axis = fig.subplots()
    for name, points in curves.items():
        axis.plot(*zip(*points), marker="o", markersize=4, label=escape_plot(name))
    if log_x:
        axis.set_xscale("log")
        ticks = sorted({x for points in curves.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.set_xlabel(escape_plot(x))
    axis.set_ylabel(escape_plot(y))
    axis.grid(color="0.92")
    axis.legend(frameon=False)
    axis.set_title(escape_plot(title), fontsize=10)
    return fig
