# SPDX-License-Identifier: Apache-2.0
"""Attention distances by layer, and plots of position encodings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..console import escape_plot
from ._figure import check_matrix, figure


def mean_distances(distance: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean attention distance of each head, (H,).

    Args:
        distance: (B, H, Lq), sum_j p |j - i - offset| of each query, the "distance" of
            :func:`pytransformer.attention_summary`.
        valid: (B, Lq) bool, queries to include; None: all.
    """
    if valid is None:
        return distance.mean((0, 2))
    kept = valid[:, None].to(distance.dtype)
    return (distance * kept).sum((0, 2)) / kept.sum((0, 2))


def plot_distances(
    distances: torch.Tensor | Sequence[torch.Tensor], *, title: str = "", unit: str = "tokens"
) -> Any:
    """Plot mean attention distance by depth, a point per head (Dosovitskiy et al., figure 7).

    Args:
        distances: (layers, heads).
    """
    if not isinstance(distances, torch.Tensor):
        distances = torch.stack(list(distances))
    distances = check_matrix("plot_distances", distances, 2)
    fig = figure(3.5 + 0.25 * len(distances), 3.6)
    axis = fig.subplots()
    for layer, heads in enumerate(distances.sort(1).values):
        axis.scatter(
            [layer] * len(heads),
            heads.numpy(),
            s=18,
            color="#0072B2",
            alpha=0.7,
            edgecolors="white",
            linewidths=0.4,
        )
    axis.plot(
        range(len(distances)),
        distances.mean(1).numpy(),
        color="#D55E00",
        linewidth=1.2,
        label="mean of the heads",
    )
    axis.set_xlabel("layer")
    axis.set_ylabel(f"mean attention distance, {escape_plot(unit)}")
    axis.set_xticks(range(0, len(distances), max(1, len(distances) // 12)))
    axis.set_ylim(bottom=0)
    axis.grid(color="0.92")
    axis.legend(frameon=False)
    axis.set_title(escape_plot(title), fontsize=10)
    return fig


def plot_positions(table: torch.Tensor, *, title: str = "Position encoding") -> Any:
    """Plot a position table (positions, d) and the cosine similarity of all pairs of positions."""
    table = check_matrix("plot_positions", table, 2)
    fig = figure(9.5, 4)
    values, similar = fig.subplots(1, 2)
    bound = table.abs().max().item() or 1.0
    image = values.imshow(
        table.numpy(), cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto", interpolation="nearest"
    )
    values.set_xlabel("dimension")
    values.set_ylabel("position")
    fig.colorbar(image, ax=values, label="value")
    unit = torch.nn.functional.normalize(table, dim=1)
    image = similar.imshow(
        (unit @ unit.T).numpy(), cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest"
    )
    similar.set_xlabel("position")
    similar.set_ylabel("position")
    fig.colorbar(image, ax=similar, label="cosine similarity")
    fig.suptitle(escape_plot(title), fontsize=11)
    return fig
