# SPDX-License-Identifier: Apache-2.0
"""``BlockMask.strided`` evaluates only blocks with a visible pair."""

from __future__ import annotations

import pytest
import torch

from pytransformer import BlockMask
from pytransformer.ops._block_lists import stripes


@pytest.mark.parametrize("sizes", [(32, 32), (64, 128), (128, 32)])
@pytest.mark.parametrize("stride", [1, 40, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_strided_evaluates_only_blocks_with_visible_pairs(
    sizes: tuple[int, int], stride: int, causal: bool
) -> None:
    for length in (768, 700):
        i = torch.arange(length)
        apart = i[:, None] - i
        mask = BlockMask.strided(length, stride, causal=causal, block_size=sizes)
        seen = ((apart.abs() < stride) | (apart % stride == 0)) & ((apart >= 0) | (not causal))
        assert torch.equal(mask.to_dense()[0, 0], seen)
        asked = stripes(length, stride, causal, sizes, torch.device("cpu")).numel()
        visible = mask.blocks.entries.shape[0]
        assert (
            asked == visible if length % 128 == 0 else asked >= visible
        )  # some of a block's pairs lie outside the tensors
