# SPDX-License-Identifier: Apache-2.0
"""Assisted generation of transformers on our attention gives sdpa's tokens.

Drafts come from a smaller model or from the prompt.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytransformer.ops._core.registry import trace
from support.hugging_face import FAMILIES, inputs_of

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 16


def repeated(name: str) -> torch.Tensor:
    """Return a prompt (1, 24) with a repeated part to look up."""
    ids = inputs_of(FAMILIES[name], "none")["input_ids"][:1, :8]
    return ids.repeat(1, 3)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("how", ["a model", "a worse model", "looked up"])
def test_tokens_equal_sdpa(hugging_face: Any, name: str, how: str) -> None:
    """One call reads several drafts behind the cache; rejected ones are cropped from it."""
    ids, family = repeated(name), FAMILIES[name]

    def tokens(implementation: str, assisted: bool = True) -> torch.Tensor:
        torch.manual_seed(11)
        model = family.build(implementation)
        given: dict[str, Any] = {}
        if how == "looked up":
            given = {"prompt_lookup_num_tokens": 4}
        elif assisted:
            given = {"assistant_model": family.build(implementation)}
            if how == "a worse model":
                with torch.no_grad():
                    for parameter in given["assistant_model"].parameters():
                        parameter.add_(0.05 * torch.randn_like(parameter))
        if not assisted:
            given = {}
        found: torch.Tensor = model.generate(
            ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, **given
        )
        return found

    with trace() as ran:
        ours = tokens("pytransformer")
    assert {op for op, _ in ran} == {"attention_fwd"} and {backend for _, backend in ran} == {"cpu"}
    assert ours.shape[1] == ids.shape[1] + NEW
    assert torch.equal(ours, tokens("sdpa"))
    assert torch.equal(ours, tokens("pytransformer", assisted=False))
