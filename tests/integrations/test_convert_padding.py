# SPDX-License-Identifier: Apache-2.0
"""convert(model, kinds=[..., "padding"]): BERT's layers on real tokens only, against eager code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from pytransformer.integrations.convert.rules import KINDS, ON_REQUEST
from pytransformer.ops._core.registry import trace
from support.drop_in_table import LIMIT
from support.hugging_face import FAMILIES, distance, flat, inputs_of, run


@pytest.fixture(autouse=True)
def _quick_and_strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def packed(name: str, implementation: str = "pytransformer") -> nn.Module:
    model = FAMILIES[name].build(implementation)
    done = pt.integrations.convert(model, kinds=(*KINDS, *ON_REQUEST))
    assert "layers without padding" in {what for _, _, what in done.converted}
    return model


def attentions(model: nn.Module, inputs: dict[str, Any]) -> set[str]:
    with torch.no_grad(), trace() as ran:
        model(**inputs)
    return {op for op, _ in ran if op.startswith("attention")}


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_results_at_real_tokens_equal_eager(hugging_face: Any, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "right")
    logits, grads = run(family.build("eager"), family, inputs)
    model = packed(name)
    with trace() as ran:
        ours, our_grads = run(model, family, inputs)
    assert {op for op, _ in ran if op.startswith("attention")} == {
        "attention_varlen_fwd",
        "attention_varlen_bwd",
    }
    assert distance(ours, logits) < LIMIT and distance(flat(our_grads), flat(grads)) < LIMIT
    trunk = getattr(model, name)
    hidden = trunk(**inputs).last_hidden_state
    assert (
        not hidden[~inputs["attention_mask"].bool()].any()
        and hidden[inputs["attention_mask"].bool()].any(-1).all()
    )


def test_checkpoints_repeat_dropout_and_stay_packed(hugging_face: Any) -> None:
    family = FAMILIES["bert"]
    inputs, model = inputs_of(family, "right"), packed("bert").train()

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(4)
        return run(model, family, inputs)

    logits, grads = step()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with trace() as ran:
        again, grads_again = step()
    assert sum(op == "attention_varlen_fwd" for op, _ in ran) == 2 * family.attentions
    assert torch.equal(again, logits) and distance(flat(grads_again), flat(grads)) < LIMIT


def test_padding_remains_if_its_outputs_are_visible(hugging_face: Any) -> None:
    """Padding is removed only if no caller can read it."""
    family, model = FAMILIES["bert"], packed("bert")
    right = inputs_of(family, "right")
    assert attentions(model, right) == {"attention_varlen_fwd"}
    assert attentions(model, inputs_of(family, "left")) == {"attention_fwd"}
    assert attentions(model, inputs_of(family, "none")) == {"attention_fwd"}
    assert attentions(model, {**right, "output_hidden_states": True}) == {"attention_fwd"}
    assert attentions(model, {**right, "output_attentions": True}) == {"attention_fwd"}
    assert attentions(packed("bert", "sdpa"), right) == set()
    assert attentions(packed("bert-decoder"), inputs_of(FAMILIES["bert-decoder"], "right")) == {
        "attention_fwd"
    }
    default = family.build("pytransformer")
    pt.integrations.convert(default)
    assert attentions(default, right) == {"attention_fwd"}


@pytest.mark.unpoisoned
def test_compiled_models_keep_padding(hugging_face: Any) -> None:
    family, model = FAMILIES["bert"], packed("bert")
    inputs = inputs_of(family, "right")
    with torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        real = inputs["attention_mask"].bool()
        assert (
            distance(compiled(**inputs).logits[real], family.build("eager")(**inputs).logits[real])
            < LIMIT
        )
