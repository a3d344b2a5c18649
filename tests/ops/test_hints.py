# SPDX-License-Identifier: Apache-2.0
"""Messages of frequent mistakes name the way out."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt

Q = torch.randn(2, 4, 8, 16)


@pytest.mark.parametrize(
    ("call", "kind", "hint"),
    [
        (lambda: pt.attention(Q, Q, Q, causal=True), ValueError, "got True; use 'top_left'"),
        (
            lambda: pt.attention(Q, Q, Q, window=(-1, -1)),
            ValueError,
            "None leaves a side unbounded",
        ),
        (
            lambda: pt.attention(Q, Q, Q, attn_mask=lambda b, h, i, j: i >= j),
            TypeError,
            "BlockMask.from_function",
        ),
        (
            lambda: pt.attention(Q, Q, Q, attn_mask=torch.ones(2, 1, 1, 8, dtype=torch.long)),
            TypeError,
            r"use \.bool\(\), or key_lengths",
        ),
        (
            lambda: pt.BlockMask.from_function(
                lambda b, h, i, j: (i - j).float(), None, None, 8, 8
            ),
            TypeError,
            "mask_mod must return a bool, got torch.float32",
        ),
        (
            lambda: pt.BlockMask.sliding_window(64, 5),
            TypeError,
            "window must be a tuple of ints, got 5",
        ),
        (
            lambda: pt.integrations.convert(torch.nn.Sequential(torch.nn.LayerNorm(16)))(Q),
            TypeError,
            "works in place, so call the model itself",
        ),
    ],
)
def test_frequent_mistakes_name_the_way_out(call, kind, hint) -> None:
    with pytest.raises(kind, match=hint):
        call()


def test_switch_refuses_a_model_that_is_not_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(ValueError, match=r"Linear; pytransformer\.activate"):
        pt.integrations.transformers.switch(torch.nn.Linear(2, 2))
