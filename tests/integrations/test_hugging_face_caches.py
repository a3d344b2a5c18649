# SPDX-License-Identifier: Apache-2.0
"""transformers' generate with each cache class: tokens of eager code and sdpa, no dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytransformer.ops._core.registry import trace
from support.hugging_face import FAMILIES, inputs_of

pytestmark = pytest.mark.usefixtures("one_thread")

HOW: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}
NEW = 14  # longer than the windows of mistral and gemma2, so that their caches roll


@pytest.fixture
def no_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytransformer.integrations.hugging_face import lowering, mask

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dense mask was made")

    for module in (lowering, mask):
        monkeypatch.setattr(module, "dense_mask", refuse)
    monkeypatch.setattr(mask.Mask, "touched", refuse)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "t5", "bart"])
def test_tokens_equal_eager_and_sdpa(
    hugging_face: Any, no_dense_mask: None, name: str, cache: str, how: str
) -> None:
    """The batch has sequences of different lengths."""
    family = FAMILIES[name]
    inputs = {k: v for k, v in inputs_of(family, "left").items() if not k.startswith("decoder_")}
    settings = dict(max_new_tokens=NEW, min_new_tokens=NEW, **HOW[how])
    if cache == "static":
        settings.update(cache_implementation="static", disable_compile=True)

    def tokens(implementation: str) -> torch.Tensor:
        torch.manual_seed(11)
        found: torch.Tensor = family.build(implementation).generate(**inputs, **settings)
        return found

    with trace() as ran:
        ours = tokens("pytransformer")
    assert {op for op, _ in ran} == {"attention_fwd"}
    assert {backend for _, backend in ran} == {"cpu"}
    for theirs in ("eager", "sdpa"):
        if theirs == "sdpa" and name == "gemma2":
            continue  # sdpa does not support softcap
        assert torch.equal(ours, tokens(theirs)), theirs
