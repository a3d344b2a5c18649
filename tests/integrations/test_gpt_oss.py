# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS on our attention: sinks in sliding and full layers, logits, gradients, generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pytransformer as pt
from support.hugging_face import distance, model_distance_limit
from support.models import random_sum

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "GptOssConfig"):
    pytest.skip(f"transformers {transformers.__version__} has no GPT-OSS", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("one_thread")
LIMIT = model_distance_limit(torch.float64)


@pytest.fixture(scope="module")
def eager() -> Any:
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=64, pad_token_id=0,
        eos_token_id=60, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = (
        "eager"  # grouped products do not support float64
    )
    model = transformers.GptOssForCausalLM(config).double().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.randn(4) * 2)
    return model


@pytest.fixture(scope="module")
def ours(eager: Any) -> Any:
    pt.integrations.transformers.register()
    model = copy.deepcopy(eager)
    model.set_attn_implementation("pytransformer")
    return model


@pytest.fixture(scope="module")
def inputs() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 60, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0  # padding on the left
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_logits_and_gradients_equal_eager(
    eager: Any, ours: Any, inputs: dict[str, torch.Tensor]
) -> None:
    """All parameters are compared, each layer's sinks among them."""
    seen, grads = inputs["attention_mask"].bool(), []
    for model in (eager, ours):
        model.zero_grad()
        logits = model(**inputs).logits[seen]
        random_sum(logits).backward()
        grads.append(
            {
                "logits": logits,
                **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            }
        )
    want, got = grads
    assert want.keys() == got.keys() and sum("sinks" in name for name in got) == 4
    for name in want:
        assert distance(got[name], want[name]) < LIMIT, name
    assert all(bool(got[name].any()) for name in got if "sinks" in name)


def test_generation_with_a_cache_equals_eager(
    eager: Any, ours: Any, inputs: dict[str, torch.Tensor]
) -> None:
    """Tokens and each step's scores are compared beyond the window of five."""
    options = dict(
        max_new_tokens=12,
        do_sample=False,
        use_cache=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    want, got = (model.generate(**inputs, **options) for model in (eager, ours))
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores, want.scores, strict=True):
        assert distance(a, b) < LIMIT


def test_each_layer_is_one_call_with_sinks(
    ours: Any, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No multiplication follows the call."""
    from pytransformer.integrations.hugging_face import attention

    given = []
    monkeypatch.setattr(attention, "gate_of_sinks", None)
    run = attention.attention
    monkeypatch.setattr(
        attention, "attention", lambda *a, **k: (given.append(k["sinks"]), run(*a, **k))[1]
    )
    with torch.no_grad():
        ours(**inputs)
    assert [
        s is layer.self_attn.sinks for s, layer in zip(given, ours.model.layers, strict=True)
    ] == [True] * 4
