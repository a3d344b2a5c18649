# SPDX-License-Identifier: Apache-2.0
"""torch.export with an unbacked batch size for each optional argument.

A boolean index gives such a size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pytransformer as pt

L, D = 9, 16
QUERY = torch.randn(4, 2, L, D)
KEEP = torch.tensor([True, False, True, True])
WEIGHT = torch.ones(D)
ZEROS = torch.zeros(4, L, dtype=torch.int64)
LENGTHS = torch.tensor([L, 3, 4, 5])


def masked(**keywords: str) -> Callable[..., Any]:
    """Call attention with the second tensor as these arguments."""
    return lambda q, other: pt.attention(
        q, q, q, causal="top_left", **dict.fromkeys(keywords, other)
    )


def appended(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    positions = torch.zeros(q.shape[0], L, dtype=torch.int64)
    return pt.append_kv(q, q, q, pt.KeyValues(cache.clone(), cache.clone()), positions)


def summarized(q: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return pt.attention_summary(q, q, lse)["entropy"]


CALLS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "mask": (masked(attn_mask=""), torch.ones(4, 1, L, L, dtype=torch.bool)),
    "mask of heads": (masked(attn_mask=""), torch.ones(4, 2, L, L, dtype=torch.bool)),
    "padding": (masked(attn_mask=""), torch.ones(4, 1, 1, L, dtype=torch.bool)),
    "additive mask": (masked(attn_mask=""), torch.randn(4, 1, L, L)),
    "bias": (masked(bias=""), torch.randn(4, 2, L, L)),
    "lengths": (masked(query_lengths="", key_lengths=""), LENGTHS),
    "prefix": (masked(prefix_lengths=""), LENGTHS),
    "segments": (masked(query_segments="", key_segments=""), ZEROS),
    "weights": (lambda q, lse: pt.attention_weights(q, q, lse), torch.zeros(4, 2, L)),
    "summary": (summarized, torch.zeros(4, 2, L)),
    "layer_norm": (lambda q, _: pt.layer_norm(q, D), ZEROS),
    "rms_norm": (lambda q, _: pt.rms_norm(q, D, WEIGHT), ZEROS),
    "add_norm": (lambda q, residual: pt.add_norm(q, residual, WEIGHT)[0], torch.randn(4, 2, L, D)),
    "feed_forward": (lambda q,
        _: pt.feed_forward(q, torch.ones(8, D), None, torch.ones(D, 8), None), ZEROS),
    "cross entropy": (
        lambda q, target: pt.linear_cross_entropy(q, torch.ones(7, D), target),
        torch.zeros(4, 2, L, dtype=torch.int64),
    ),
    "rotary": (pt.rotary, ZEROS),
    "append_kv": (appended, torch.zeros(4, 2, 12, D)),
    "torch's op": (
        lambda q, mask: torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        torch.ones(4, 1, L, L, dtype=torch.bool),
    ),
}  # fmt: skip


class Selected(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, keep: torch.Tensor, query: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        rows = torch.nonzero(keep).squeeze(-1)
        result: torch.Tensor = self.call(query[rows], other[rows])
        return result


@pytest.mark.parametrize("name", CALLS)
def test_unbacked_batch_can_be_exported(name: str) -> None:
    call, other = CALLS[name]
    with pt.activate() if name == "torch's op" else contextlib.nullcontext():
        program = torch.export.export(Selected(call), (KEEP, QUERY, other), strict=False).module()
        for keep in (KEEP, ~KEEP):
            torch.testing.assert_close(
                program(keep, QUERY, other), Selected(call)(keep, QUERY, other)
            )
