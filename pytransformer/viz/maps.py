# SPDX-License-Identifier: Apache-2.0
"""Plots of attention weights: one head as a heat map or lines, all heads as a gallery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..console import escape_plot
from ._figure import check_matrix, check_tokens, figure

COLOURS = "Blues"
_INCHES = 0.28  # cell size, enough for a 9-point label
_MOST_LABELS = 100


def heat_map(
    weights: torch.Tensor,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    title: str = "",
    rows_are: str = "query",
) -> Any:
    """Plot one head, queries by keys; dark means a weight near 1.

    Args:
        weights: (Lq, Lk).
        queries, keys: labels of the rows and columns; numbers by default.
        rows_are: label of the axis of queries.
    """
    weights = check_matrix("heat_map", weights, 2)
    rows, columns = weights.shape
    row_labels = check_tokens("heat_map", "queries", queries, rows)
    column_labels = check_tokens("heat_map", "keys", keys, columns)
    longest = max(map(len, [*(row_labels or []), *(column_labels or []), ""]))
    side = _INCHES if max(rows, columns) <= _MOST_LABELS else 10 / max(rows, columns)
    fig = figure(2.2 + 0.08 * longest + side * columns, 1.4 + 0.08 * longest + side * rows)
    axis = fig.subplots()
    image = axis.imshow(
        weights.numpy(), vmin=0, vmax=1, cmap=COLOURS, aspect="equal", interpolation="nearest"
    )
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    _ticks(axis.xaxis, column_labels, columns, rotation=90)
    _ticks(axis.yaxis, row_labels, rows)
    axis.set_xlabel("attends to")
    axis.set_ylabel(rows_are)
    axis.set_title(escape_plot(title), fontsize=10)
    fig.colorbar(image, ax=axis, shrink=0.8, label="weight")
    return fig


def gallery(
    weights: torch.Tensor,
    *,
    title: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Any:
    """Plot every head of every layer as a small map, layers by heads.

    Each map has a separate color scale, so faint patterns are visible; a number in its corner is
    its largest weight, the darkest color.

    Args:
        weights: (layers, heads, Lq, Lk).
        layers, heads: labels of the rows and columns; counted from 0 by default.
    """
    weights = check_matrix("gallery", weights, 4)
    layers = range(weights.shape[0]) if layers is None else layers
    heads = range(weights.shape[1]) if heads is None else heads
    if (len(layers), len(heads)) != tuple(weights.shape[:2]):
        raise ValueError(
            f"gallery: expected names of {tuple(weights.shape[:2])} layers and heads, got"
            f" {len(layers)}, {len(heads)}"
        )
    fig = figure(0.9 + 1.15 * len(heads), 0.9 + 1.15 * len(layers))
    axes = fig.subplots(len(layers), len(heads), squeeze=False)
    for i, layer in enumerate(layers):
        for j, head in enumerate(heads):
            axis = axes[i][j]
            axis.imshow(
                weights[i, j].numpy(), vmin=0, cmap=COLOURS, aspect="auto", interpolation="nearest"
            )
            axis.set_xticks([])
            axis.set_yticks([])
            axis.text(
                0.97, 0.95, f"{weights[i, j].max().item():.2f}", fontsize=6, ha="right", va="top",
                transform=axis.transAxes, bbox={"pad": 1, "fc": "white", "ec": "none"},
            )  # fmt: skip
            if i == 0:
                axis.set_title(f"head {head}", fontsize=8)
            if j == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
    fig.suptitle(escape_plot(title), fontsize=11)
    fig.supxlabel("keys; the number is the largest weight, drawn darkest", fontsize=8)
    fig.supylabel("queries", fontsize=8)
    return fig


def head_lines(
    weights: torch.Tensor,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    title: str = "",
    least: float = 0.02,
) -> Any:
    """Plot one head as lines from each query (left) to its keys (right); opacity is the weight.

    Args:
        weights: (Lq, Lk).
        queries, keys: the tokens.
        least: minimum weight to draw.
    """
    weights = check_matrix("head_lines", weights, 2)
    rows, columns = weights.shape
    left = check_tokens("head_lines", "queries", queries, rows) or []
    right = check_tokens("head_lines", "keys", keys, columns) or []
    fig = figure(
        3.0 + 0.08 * (max(map(len, left)) + max(map(len, right))), 0.8 + 0.25 * max(rows, columns)
    )
    axis = fig.subplots()
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection

    pairs = [(i, j) for i, j in (weights >= least).nonzero().tolist()]
    colour = colormaps["tab10"]
    lines = LineCollection(
        [[(0, i), (1, j)] for i, j in pairs],
        colors=[(*colour(i % 10)[:3], weights[i, j].clamp(0, 1).item()) for i, j in pairs],
        linewidths=1.8,
    )
    axis.add_collection(lines)
    for x, words, side in ((-0.03, left, "right"), (1.03, right, "left")):
        for y, word in enumerate(words):
            axis.text(x, y, word, ha=side, va="center", fontsize=9)
    axis.set_xlim(-0.02, 1.02)
    axis.set_ylim(max(rows, columns) - 0.5, -0.5)
    axis.set_axis_off()
    fig.suptitle(escape_plot(title), fontsize=10)
    return fig


def _ticks(axis: Any, words: Sequence[str] | None, count: int, rotation: int = 0) -> None:
    """Label each row or column if the labels are readable; otherwise use matplotlib's numbers."""
    if words is not None and count <= _MOST_LABELS:
        axis.set_ticks(range(count), words, rotation=rotation, fontsize=9)
