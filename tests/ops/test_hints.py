# SPDX-License-Identifier: Apache-2.0
"""Messages of frequent mistakes name the way out."""

from __future__ import annotations

import functools
import inspect
import re

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._attention_arguments import ELSEWHERE, PACKED_ELSEWHERE
from pytransformer.ops._core.registry import OPS

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


PACKED, ENDS = Q[0].transpose(0, 1), torch.tensor([0, 8])
CALLS = {
    "attention": ((Q, Q, Q), ELSEWHERE),
    "attention_varlen": ((PACKED, PACKED, PACKED, ENDS, ENDS, 8, 8), PACKED_ELSEWHERE),
}


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, (_, hints) in CALLS.items() for name in (*hints, "no_such")]
)
def test_keywords_of_other_libraries_name_ours(op: str, name: str) -> None:
    """The call and ``explain`` refuse them; a hint names what the op or the package has."""
    for call in (getattr(pt, op), functools.partial(pt.explain, op)):
        with pytest.raises(TypeError, match=f"^{op}: unexpected argument '{name}'; ") as error:
            call(*CALLS[op][0], **{name: True})
    hint = str(error.value).partition("; ")[2]
    ours = {*inspect.signature(getattr(pt, op)).parameters, *dir(pt), "shapes"}
    assert ours & set(re.findall(r"\w+", hint)), hint
    arguments = set(re.findall(r"\b(\w+)=|use (\w+)", hint))
    assert {a or b for a, b in arguments} <= ours, hint


@pytest.mark.parametrize("op", OPS)
def test_explain_names_the_op_in_refused_keywords(op: str) -> None:
    with pytest.raises(TypeError, match=rf"^{op}: .*(missing|unexpected)"):
        pt.explain(op, no_such=1)


def test_switch_refuses_a_model_that_is_not_of_transformers() -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    with pytest.raises(ValueError, match=r"Linear; pytransformer\.activate"):
        pt.integrations.transformers.switch(torch.nn.Linear(2, 2))
