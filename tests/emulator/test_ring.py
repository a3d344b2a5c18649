# SPDX-License-Identifier: Apache-2.0
"""Tiles of ring attention on the emulated CUDA backend: one rank with its sequence in chunks."""

from __future__ import annotations

import pytest
import torch

from support.ring_tiles import check_tiles

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


@pytest.mark.parametrize("schedule", [1], indirect=True)
@pytest.mark.parametrize("dtype, path", [(torch.float32, "portable"), (torch.bfloat16, "sm90")])
@pytest.mark.parametrize("keywords", ["plain", "causal", "mask", "extreme"])
def test_merged_tiles_equal_one_call(
    keywords: str, dtype: torch.dtype, path: str, schedule: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are merged and differentiated by lse, within the bounds of one call."""
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    check_tiles(keywords, "cuda", dtype)
