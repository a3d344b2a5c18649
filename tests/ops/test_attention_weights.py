# SPDX-License-Identifier: Apache-2.0
"""Weights and summaries recomputed from lse equal those of attention.

With the identity as value, attention returns its weights.
"""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt

B, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 9, 13, 8

FEATURES = {
    "plain": {},
    "causal": {"causal": "bottom_right", "window": (5, 2), "key_lengths": torch.tensor([13, 7])},
    "mask": {"attn_mask": torch.arange(9 * 13).reshape(1, 1, 9, 13) % 5 != 0, "softcap": 3.0},
    "row_mask": {"attn_mask": torch.arange(9).reshape(1, 1, 9, 1) != 4},
    "bias": {
        "bias": torch.linspace(-2, 2, 4 * 13, dtype=torch.float64).reshape(1, 4, 1, 13),
        "scale": 0.7,
    },
    "alibi": {
        "bias": pt.AlibiBias(torch.tensor([0.5, 0.25, 0.1, 0.0], dtype=torch.float64)),
        "causal": "top_left",
    },
    "t5": {
        "bias": pt.RelativePositionBias(
            torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4), True, 16
        )
    },
    "sinks": {
        "sinks": torch.tensor([0.0, 2.0, -1.0, 30.0], dtype=torch.float64),
        "causal": "bottom_right",
    },
    "segments": {
        "query_segments": torch.arange(18).reshape(2, 9) // 4,
        "key_segments": torch.arange(26).reshape(2, 13) // 5,
    },
    "prefix": {
        "causal": "top_left",
        "prefix_lengths": torch.tensor([3, 0]),
        "query_lengths": torch.tensor([9, 4]),
    },
}


@pytest.fixture(params=FEATURES)
def problem(request: pytest.FixtureRequest):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(B, HEADS, QUERIES, DIM, dtype=torch.float64, generator=generator)
    key = torch.randn(B, KV_HEADS, KEYS, DIM, dtype=torch.float64, generator=generator)
    value = torch.eye(KEYS, dtype=torch.float64).expand(B, KV_HEADS, KEYS, KEYS)
    keywords = FEATURES[request.param]
    weights, lse = pt.attention(query, key, value, return_lse=True, backend="reference", **keywords)
    return query, key, lse, keywords, weights


def test_weights_equal_attention_of_the_identity(problem):
    query, key, lse, keywords, weights = problem
    torch.testing.assert_close(pt.attention_weights(query, key, lse, **keywords), weights)


def test_selected_rows_and_heads_equal_those_of_all(problem):
    query, key, lse, keywords, weights = problem
    chosen = pt.attention_weights(query, key, lse, rows=[7, 2, -1], heads=[3, 0], **keywords)
    torch.testing.assert_close(chosen, weights[:, [3, 0]][:, :, [7, 2, -1]])


@pytest.mark.parametrize("block_bytes", [1, 64 << 20])
def test_summaries_equal_those_of_the_weights(problem, block_bytes, monkeypatch):
    query, key, lse, keywords, weights = problem
    monkeypatch.setattr(pt.ops.attention_weights, "BLOCK_BYTES", block_bytes)
    found = pt.attention_summary(query, key, lse, **keywords)
    torch.testing.assert_close(found["column_sum"], weights.sum(2))
    torch.testing.assert_close(found["entropy"], -torch.xlogy(weights, weights).sum(-1))
    seen = weights.sum(-1) > 0
    assert torch.equal(found["argmax"], torch.where(seen, weights.argmax(-1), -1))
    alibi = pt.attention_weights(query, key, lse, **keywords)
    assert found["distance"].shape == (B, HEADS, QUERIES) and (found["distance"][~seen] == 0).all()
    if "causal" not in keywords:
        i, j = torch.arange(QUERIES)[:, None], torch.arange(KEYS)
        torch.testing.assert_close(found["distance"], (alibi * (j - i).abs()).sum(-1))


def test_no_rows_give_empty_results():
    empty = torch.zeros(1, 2, 0, 4)
    found = pt.attention_summary(empty, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0))
    assert found["column_sum"].shape == (1, 2, 3) and found["argmax"].shape == (1, 2, 0)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"rows": [9]}, ValueError, "between -9 and 8"),
        ({"rows": [[1]]}, ValueError, "list of indices"),
        ({"dropout_p": 0.5}, TypeError, "dropout_p"),
        ({"lse": torch.zeros(2, 4, 8)}, ValueError, "lse must be"),
    ],
)
def test_bad_input_is_named(keywords, error, message):
    query, key, lse = (
        torch.zeros(2, 4, 9, 8),
        torch.zeros(2, 2, 13, 8),
        keywords.pop("lse", torch.zeros(2, 4, 9)),
    )
    with pytest.raises(error, match=message):
        pt.attention_weights(query, key, lse, **keywords)
