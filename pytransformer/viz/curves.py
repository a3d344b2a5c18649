# SPDX-License-Identifier: Apache-2.0
"""Line plot of one quantity over another, with one line per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..console import escape_plot
from ._figure import draw_lines, figure


def plot_curves(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    title: str = "",
    log_x: bool = False,
) -> Any:
    """Plot points (x, y) joined by lines, such as accuracy over data size (log_x).

    Args:
        curves: name to points.
        x, y: axis labels.
    """
    fig = figure(5.5, 3.8 + 0.09 * len(curves))
    axis = fig.subplots()
    draw_lines(axis, curves, x, y)
    if log_x:
        axis.set_xscale("log")
        ticks = sorted({x for points in curves.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    axis.set_title(escape_plot(title), fontsize=10)
    return fig
