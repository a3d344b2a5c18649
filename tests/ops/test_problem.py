# SPDX-License-Identifier: Apache-2.0
"""Lowering of attention's arguments, shared by all backends: see ops/_problem/attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytransformer.ops.attention import attention_op
from pytransformer.ops.attention_varlen import attention_varlen_op
from support.attention_check import check_attention

B, H, LQ, LK = 3, 4, 5, 70
KEYS = torch.arange(LK) % 7 != 2
BY_SEQUENCE = torch.arange(LK) < torch.tensor([LK, 1, 40])[:, None]
BY_HEAD = torch.arange(LK) % 7 > torch.arange(H)[:, None]
FULL = torch.arange(LQ)[:, None] >= torch.arange(LK) - 66
# name -> (mask, shape of the equivalent key padding, or None)
MASKS = {
    "keys": (KEYS, (1, 1, 1, LK)),
    "one row": (KEYS[None], (1, 1, 1, LK)),
    "one row, expanded": (KEYS.expand(B, H, LQ, LK), (1, 1, 1, LK)),
    "by sequence": (BY_SEQUENCE[:, None, None], (B, 1, 1, LK)),
    "by sequence, expanded": (BY_SEQUENCE[:, None, None].expand(B, H, LQ, LK), (B, 1, 1, LK)),
    "by sequence, queries apart": (
        BY_SEQUENCE[:, None, None].expand(B, 1, LQ, LK).contiguous(),
        None,
    ),
    "by head": (BY_HEAD[:, None], (1, H, 1, LK)),
    "by head, expanded": (BY_HEAD[:, None].expand(B, H, LQ, LK), (1, H, 1, LK)),
    "by query": (FULL, None),
    "by query, expanded": (FULL.expand(B, H, LQ, LK), None),
    "floating": (torch.where(KEYS, 0.0, -torch.inf), None),
    "floating, expanded": (torch.where(KEYS, 0.0, -torch.inf).expand(B, H, LQ, LK), None),
}


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, n, 16) for n in (LQ, LK, LK)]


def _problem(**kwargs: Any) -> Any:
    return attention_op.prepare(*_inputs(), **kwargs)[0]


@pytest.mark.parametrize("name", MASKS)
def test_key_padding_masks_are_recognized(name: str) -> None:
    mask, shape = MASKS[name]
    a = _problem(attn_mask=mask)
    assert shape == (None if a.key_padding is None else tuple(a.key_padding.shape))
    assert (a.mask_by_pair is None) == (shape is not None) and a.by_pair == (shape is None)
    if shape is not None:
        assert torch.equal(a.key_padding.expand(B, H, LQ, LK), mask.expand(B, H, LQ, LK))
        assert a.key_padding.data_ptr() == mask.data_ptr()


@pytest.mark.parametrize("name", MASKS)
def test_expanded_masks_stay_within_the_bound(name: str) -> None:
    check_attention(tuple(_inputs()), {"attn_mask": MASKS[name][0]}, "cpu")


def test_a_packed_problem_has_every_field_of_a_padded_one() -> None:
    packed, padded = attention_varlen_op.Arguments, attention_op.Arguments
    for name in padded._fields:
        assert hasattr(packed, name)
    t = torch.randn(12, 2, 8)
    cu = torch.tensor([0, 5, 12])
    a = attention_varlen_op.prepare(t, t, t, cu, cu, 7, 9, causal="bottom_right")[0]
    assert (a.packed, a.sequences, a.num_queries, a.num_keys, a.heads, a.group) == (
        True,
        2,
        7,
        9,
        2,
        1,
    )
    assert (a.align, a.query_start, a.key_start, a.lengths, a.mask, a.bias) == (
        2,
        0,
        0,
        (None,) * 5,
        None,
        None,
    )
    assert a.ragged and a.bounded and not a.added and not a.empty
    b = _problem()
    assert (b.packed, b.sequences, b.num_queries, b.num_keys, b.cu_seqlens_q) == (
        False,
        B,
        LQ,
        LK,
        None,
    )
    assert not b.ragged and not b.bounded and b._replace(causal="top_left").bounded


def test_score_features_are_derived_from_the_arguments() -> None:
    bias = torch.zeros(1, 1, 1, LK)
    assert list(_problem(attn_mask=FULL, bias=bias).added) == ["bias"]
    assert list(_problem(attn_mask=bias, bias=bias).added) == ["mask", "bias"]
    everything = {
        "attn_mask": FULL,
        "softcap": 2.0,
        "dropout_p": 0.1,
        "query_segments": torch.zeros(B, LQ, dtype=torch.int64),
    }
    assert (
        _problem(
            **everything, bias=bias, key_segments=torch.zeros(B, LK, dtype=torch.int64)
        ).by_pair
        == 5
    )
