# SPDX-License-Identifier: Apache-2.0
"""Checks of feed_forward that hold for every GPU backend."""

from __future__ import annotations

import torch

import pytransformer as pt
from pytransformer.reference.philox import TAG_FEED_FORWARD, column_keep_mask
from pytransformer.testing import bounds


def check_dropout_mask(backend: str) -> None:
    """Raise AssertionError unless the dropped hidden elements equal the reference's."""
    x, eye = (
        torch.ones(1000, 512, device="cuda", dtype=torch.bfloat16),
        torch.eye(512, device="cuda", dtype=torch.bfloat16),
    )
    out = pt.feed_forward(
        x, eye, None, eye, None, dropout_p=0.3, dropout_seed=-77, backend=backend, strict=True
    )
    assert torch.equal(
        (out != 0).cpu(), column_keep_mask(torch.tensor(-77), 0.3, 1000, 512, TAG_FEED_FORWARD)
    )


def check_addresses(backend: str) -> None:
    """Raise AssertionError unless rows that start beyond 2^31 elements are correct."""
    x = torch.zeros(2**31 // 1024 + 40, 1024, device="cuda", dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, 1024, device="cuda")
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32
    y = pt.feed_forward(x, weight, None, weight, None, backend=backend, strict=True)
    assert bounds.agree(
        y[-40:], pt.feed_forward(x[-40:], weight, None, weight, None, backend="reference")
    )
