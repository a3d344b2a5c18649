# SPDX-License-Identifier: Apache-2.0
"""Our generate gives the tokens of transformers' for padded prompts, from every cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytransformer import nn
from pytransformer.models import GPT, T5, Transformer, generate
from support.hugging_face import FAMILIES, inputs_of

NEW = 9
OURS: dict[str, Any] = {"gpt2": GPT, "t5": T5, "marian": Transformer}
# Their beam search divides by length^penalty, ours by Wu et al.'s ((5 + length) / 6)^alpha; without
# a penalty both compare log p. Their temperature precedes top-k, like ours.
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"do_sample": False}),
    "beams": (
        {"beams": 3, "length_penalty": 0.0},
        {"do_sample": False, "num_beams": 3, "length_penalty": 0.0},
    ),
    "drawn": (
        {"sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 1.0},
    ),
}


@pytest.mark.parametrize("cache", ["contiguous", "paged", "pages of 4"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OURS)
def test_tokens_equal_transformers(hugging_face: Any, name: str, how: str, cache: str) -> None:
    family = FAMILIES[name]
    theirs = family.build("eager")
    for part in theirs.modules():
        if (
            "Sinusoidal" in type(part).__name__
        ):  # a fixed table, which the family's larger weights have changed
            part.weight.data = nn.sinusoidal(*part.weight.shape, halves=True)
    model = OURS[name].from_hf(theirs)
    inputs = {
        k: v
        for k, v in inputs_of(family, "left" if name == "gpt2" else "right").items()
        if not k.startswith("decoder_")
    }
    mine, their_words = HOW[how]
    torch.manual_seed(11)
    want = theirs.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, **their_words)[
        :, -NEW:
    ]
    kept = model.make_paged_cache(9 * 6, page_size=4) if cache == "pages of 4" else cache
    torch.manual_seed(11)
    made = generate(
        model, inputs["input_ids"], inputs["attention_mask"], max_new_tokens=NEW, cache=kept, **mine
    )
    assert made.tokens.tolist() == want.tolist()
