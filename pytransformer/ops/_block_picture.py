# SPDX-License-Identifier: Apache-2.0
"""Drawing of a block mask with characters."""

from __future__ import annotations

import torch

from ._block_lists import block_states
from ._problem.blocks import Blocks

ROWS, COLUMNS = 16, 32  # maximum number of characters
SHADES = " ░▒▓█"


def picture(blocks: Blocks) -> str:
    """Return a picture of the first batch element and head.

    A character covers one or more blocks and is darker if more of its pairs are visible. A partial
    block counts as half.
    """
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
