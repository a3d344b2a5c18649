# SPDX-License-Identifier: Apache-2.0
"""Tiles of ring attention on the interpreted Triton backend: one rank, its sequence in chunks."""

from __future__ import annotations

import pytest
import torch

from support.ring_tiles import check_tiles


@pytest.mark.parametrize("keywords", ["plain", "causal", "mask", "extreme"])
def test_merged_tiles_equal_one_call(keywords: str) -> None:
    """Tiles are merged and differentiated by lse, within the bounds of one call."""
    check_tiles(keywords, "triton", torch.float32)
