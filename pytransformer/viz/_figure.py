# SPDX-License-Identifier: Apache-2.0
"""Figures without pyplot: no global state, no display, reproducible bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .._html import COLORS
from ..console import escape_plot
from ..extras import require

SUFFIXES = (".png", ".svg")
DASHES = ("-", "--", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LARGEST = 40.0  # inches; viewers fail on larger figures


def figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure; sizes are in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    require("matplotlib", "viz", "drawing")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(
        figsize=(min(width, LARGEST), min(height, LARGEST)), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(made)
    return made


def legend_below(axis: Any, columns: int = 2) -> None:
    """Put the legend under the axis, where it covers nothing."""
    axis.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def draw_lines(
    axis: Any, curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str
) -> None:
    """Draw one line per curve, each with its own color and dash, and a legend below."""
    for i, (name, points) in enumerate(curves.items()):
        axis.plot(
            *zip(*points),
            label=escape_plot(name),
            color=COLORS[i % len(COLORS)],
            linestyle=DASHES[i // len(COLORS) % len(DASHES)],
            marker=MARKS[i % len(MARKS)] if len(points) < 30 else None,
            markersize=4,
        )
    axis.set_xlabel(escape_plot(x))
    axis.set_ylabel(escape_plot(y))
    axis.grid(color="0.92")
    axis.set_axisbelow(True)
    if curves:
        legend_below(axis, 2 if len(curves) <= 6 else 3)


def save(drawn: Any, path: str | Path) -> Path:
    """Write a figure as PNG or SVG, by the path's suffix.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"save: expected a path that ends with {' or '.join(SUFFIXES)}, got {path}"
        )
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "pytransformer"}):
        drawn.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    return path


def labels(tokens: Sequence[str]) -> list[str]:
    """Return readable tokens: a space for the word-start mark, quotes around blank tokens."""
    shown = [escape_plot(token.replace("▁", " ").strip()) for token in tokens]
    return [text or repr(token) for text, token in zip(shown, tokens)]


def check_matrix(name: str, weights: torch.Tensor, ndim: int) -> torch.Tensor:
    """Return the weights as float32 on the CPU.

    Raises:
        TypeError: not a tensor.
        ValueError: a tensor that is empty or has another number of dimensions.
    """
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{name}: weights must be a tensor, got {type(weights).__name__}")
    if weights.dim() != ndim or weights.numel() == 0:
        raise ValueError(
            f"{name}: weights must have {ndim} dimensions, none of them 0, got shape"
            f" {tuple(weights.shape)}"
        )
    return weights.detach().float().cpu()


def check_tokens(
    name: str, argument: str, tokens: Sequence[str] | None, count: int
) -> list[str] | None:
    """Return readable labels, one per row or column."""
    if tokens is None:
        return None
    if len(tokens) != count:
        raise ValueError(f"{name}: expected {count} {argument}, one for each, got {len(tokens)}")
    return labels(tokens)
