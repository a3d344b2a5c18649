# SPDX-License-Identifier: Apache-2.0
"""Plot of a block mask: full, partial and skipped blocks."""

from __future__ import annotations

from typing import Any

from ..console import escape_plot
from ..ops._block_lists import block_states
from ..ops.block_mask import BlockMask
from ._figure import figure

FULL, PARTIAL = "#2171b5", "#9ecae1"


def block_map(mask: BlockMask, *, title: str = "") -> Any:
    """Plot the blocks of the first batch element and head.

    Full blocks are dark, partial blocks light, and skipped blocks white.

    Raises:
        TypeError: not a :class:`pytransformer.BlockMask`.
    """
    if not isinstance(mask, BlockMask):
        raise TypeError(f"block_map: expected a pytransformer.BlockMask, got {type(mask).__name__}")
    rows, keys = mask.block_size
    fig = figure(5.5, 5.5)
    from matplotlib.collections import PolyCollection

    axis = fig.subplots()
    for colour, label, (q, k) in zip(
        (FULL, PARTIAL), ("all pairs", "some pairs"), block_states(mask.blocks)
    ):
        spans = [(float(j) * keys, float(i) * rows) for i, j in zip(q.tolist(), k.tolist())]
        corners = [[(x, y), (x + keys, y), (x + keys, y + rows), (x, y + rows)] for x, y in spans]
        axis.add_collection(
            PolyCollection(corners, facecolors=colour, edgecolors="none", label=label)
        )
    axis.set_xlim(0, mask.shape[3])
    axis.set_ylim(mask.shape[2], 0)
    axis.set_aspect("equal")
    axis.xaxis.tick_top()
    axis.xaxis.set_label_position("top")
    axis.set_xlabel("key")
    axis.set_ylabel("query")
    axis.set_title(escape_plot(title or f"{mask.share:.1%} of the blocks run"), fontsize=10)
    axis.legend(loc="upper right", fontsize=8)
    return fig
