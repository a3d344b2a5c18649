# SPDX-License-Identifier: Apache-2.0
"""Messages of frequent mistakes name the way out."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._attention_arguments import ELSEWHERE

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


@pytest.mark.parametrize("name", [*ELSEWHERE, "no_such"])
def test_keywords_of_other_libraries_name_ours(name: str) -> None:
    """The call and ``explain`` refuse them; a hint names an argument or a class that exists."""
    for call in (pt.attention, lambda *a, **k: pt.explain("attention", *a, **k)):
        with pytest.raises(TypeError, match=f"attention: unexpected argument '{name}'; ") as error:
            call(Q, Q, Q, **{name: True})
    hint = str(error.value).partition("; ")[2]
    ours = [*inspect.signature(pt.attention).parameters, *dir(pt), "Hq"]
    assert any(re.search(rf"\b{word}\b", hint) for word in ours), hint


def test_unknown_keywords_of_packed_calls_are_refused() -> None:
    packed, ends = Q[0].transpose(0, 1), torch.tensor([0, 8])
    call = (packed, packed, packed, ends, ends, 8, 8)
    with pytest.raises(TypeError, match="attention_varlen: unexpected argument 'softmax_scale'; "):
        pt.attention_varlen(*call, softmax_scale=1.0)


def test_switch_refuses_a_model_that_is_not_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(ValueError, match=r"Linear; pytransformer\.activate"):
        pt.integrations.transformers.switch(torch.nn.Linear(2, 2))
