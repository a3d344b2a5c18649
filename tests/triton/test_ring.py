# SPDX-License-Identifier: Apache-2.0
"""Tiles of ring attention on the Triton backend, interpreted: one rank that has its sequence in
chunks, so that nothing is sent."""

from __future__ import annotations

import pytest
import torch

from support.ring_tiles import check_tiles


@pytest.mark.parametrize("keywords", ["plain", "causal", "mask", "extreme"])
def test_tiles_of_a_row(keywords: str) -> None:
    """Each merged by lse, and differentiated by the row's: values and gradients within the bounds
    of one call."""
    check_tiles(keywords, "triton", torch.float32)
