# SPDX-License-Identifier: Apache-2.0
"""Plots of attention and positions as PNG or SVG, with matplotlib (extra `viz`).

Each function accepts tensors and returns a figure; :func:`save` writes it. `attention_of` computes
the attention of a model for given layers, heads and rows, from the lse that the fused kernels
return.
"""

from ._figure import draw_lines, figure, save
from .blocks import block_map
from .curves import plot_curves
from .depth import mean_distances, plot_distances, plot_positions
from .maps import gallery, head_lines, heat_map
from .models import Returned, Seen, attention_of, load_model, position_table
from .patterns import Found, Text, find_patterns, pattern_scores, plot_patterns

__all__ = [
    "Found",
    "Returned",
    "Seen",
    "Text",
    "attention_of",
    "block_map",
    "draw_lines",
    "figure",
    "find_patterns",
    "gallery",
    "head_lines",
    "heat_map",
    "load_model",
    "mean_distances",
    "pattern_scores",
    "plot_curves",
    "plot_distances",
    "plot_patterns",
    "plot_positions",
    "position_table",
    "save",
]
