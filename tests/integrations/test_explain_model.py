# SPDX-License-Identifier: Apache-2.0
"""pt.explain(model, inputs) reports the backend of each layer and attention that bypasses us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from support.hugging_face import FAMILIES, inputs_of


def test_each_layer_is_reported(hugging_face: Any) -> None:
    family = FAMILIES["bert"]
    model = family.build("pytransformer")
    pt.integrations.convert(model)
    found = pt.explain(model, inputs_of(family, "right"))
    layer = "bert.encoder.layer.1"
    assert [(c.module, c.op) for c in found.calls if c.module.startswith(layer)] == [
        (f"{layer}.attention.self", "attention"),
        (f"{layer}.attention.output", "add_norm"),
        (layer, "feed_forward"),
        (layer, "add_norm"),
    ]
    assert found.bypassed == []
    with pt.use_backend(attention="reference"):
        forced = pt.explain(model, inputs_of(family, "right"))
    call = next(c for c in forced.calls if c.op == "attention")
    assert call.backend == "reference"
    assert call.reasons, "each backend before it has its reason"
    assert call.extra_bytes > 0
    assert "attention" in str(forced)
    assert "2 calls, first in bert.encoder.layer.0.attention.self" in str(forced)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bypassed_attention_gets_advice_that_works(hugging_face: Any, implementation: str) -> None:
    family = FAMILIES["bert"]
    model = family.build(implementation)
    found = pt.explain(model, **inputs_of(family, "right"))
    assert found.calls == []
    reasons = {name: advice for name, _, advice in found.bypassed}
    expected = f"runs attn_implementation='{implementation}'; call"
    assert reasons["bert.encoder.layer.0.attention.self"].startswith(expected)
    assert "convert(model) would make it layer_norm" in reasons["bert.embeddings.LayerNorm"]
    pt.integrations.transformers.register()
    pt.integrations.transformers.switch(model)
    after = pt.explain(model, **inputs_of(family, "right"))
    assert "attention" in {call.op for call in after.calls}
    assert not any("attn_implementation" in advice for _, _, advice in after.bypassed)


def test_models_that_ignore_the_setting_are_reported(hugging_face: Any) -> None:
    """Bloom accepts attn_implementation but computes attention itself."""
    from transformers import BloomConfig, BloomModel

    model = BloomModel._from_config(BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2))
    model.config._attn_implementation = "pytransformer"
    found = pt.explain(model.eval(), input_ids=torch.ones(1, 4, dtype=torch.long))
    assert ("h.0.self_attention", "BloomAttention") in [
        (name, of) for name, of, _ in found.bypassed
    ]


def test_inputs_by_position_and_hooks_that_raise() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    pt.integrations.convert(model)
    assert [c.module for c in pt.explain(model, (torch.randn(2, 4),)).calls] == ["0"]
    with pytest.raises(ValueError, match="trailing shape"):
        pt.explain(model, torch.randn(2, 5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert pt.explain(model, torch.randn(2, 4)).calls != []
