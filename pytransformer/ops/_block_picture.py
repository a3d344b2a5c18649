# SPDX-License-Identifier: Apache-2.0
"""A block mask drawn with characters."""

from __future__ import annotations

import torch

from ._block_lists import block_states
from ._problem.blocks import Blocks

ROWS, COLUMNS = 16, 32  # characters at most
SHADES = " ░▒▓█"


def picture(blocks: Blocks) -> str:
    """The first batch element and head: a character for one block or several, darker the more of its pairs are visible; a partial
    block counts as half."""
    down, across = blocks.offsets.shape[2] - 1, blocks.key_offsets.shape[2] - 1
    if not down or not across:
        return ""
    tall, wide = -(-down // ROWS), -(-across // COLUMNS)
    weight = torch.zeros(-(-down // tall), -(-across // wide))
    for amount, (q, k) in zip((1.0, 0.5), block_states(blocks)):
        weight.index_put_((q.cpu() // tall, k.cpu() // wide), torch.tensor(amount), accumulate=True)
    rows = torch.full((weight.shape[0],), float(tall))
    rows[-1] = down - tall * (weight.shape[0] - 1)
    columns = torch.full((weight.shape[1],), float(wide))
    columns[-1] = across - wide * (weight.shape[1] - 1)
    shade = (weight / (rows[:, None] * columns) * (len(SHADES) - 1)).ceil().long()
    return "\n".join("".join(SHADES[n] for n in line) for line in shade.tolist())
