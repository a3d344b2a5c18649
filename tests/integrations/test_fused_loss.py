# SPDX-License-Identifier: Apache-2.0
"""fused_loss(): the loss of transformers' language models, without logits in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pytransformer as pt
from support.hugging_face import (
    FAMILIES,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
)

LIMIT = model_distance_limit(torch.float32)
LANGUAGE = [n for n, f in FAMILIES.items() if f.kind in ("encoder", "decoder", "seq2seq")]


def without_dropout(family: Any) -> nn.Module:
    """Return the model in training mode, with every dropout off and a bias of logits."""
    model = family.build("eager").train()
    for m in model.modules():
        for name in ("p", "dropout", "activation_dropout", "attention_dropout"):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)
    if getattr(model, "final_logits_bias", None) is not None:
        torch.manual_seed(1)
        model.final_logits_bias.normal_()
    return model


def batch(family: Any) -> dict[str, torch.Tensor]:
    inputs = inputs_of(family, "right")
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[:, 2] = -100
    return {**inputs, "labels": labels}


def loss_and_gradients(model: nn.Module, **inputs: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("items", [None, 17, torch.tensor(17)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_loss_and_gradients_equal_the_models(hugging_face: Any, name: str, items: Any) -> None:
    family = FAMILIES[name]
    model = without_dropout(family)
    fused = copy.deepcopy(model)
    pt.integrations.transformers.fused_loss(fused)
    more = {} if items is None else {"num_items_in_batch": items}
    expected, grads = loss_and_gradients(model, **batch(family), **more)
    found, our_grads = loss_and_gradients(fused, **batch(family), **more)
    assert found.logits is None and expected.logits is not None
    assert distance(found.loss, expected.loss) < LIMIT
    assert distance(flat(our_grads), flat(grads)) < LIMIT and our_grads.keys() == grads.keys()


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_decoder_inputs_come_from_the_labels(hugging_face: Any, name: str) -> None:
    family = FAMILIES[name]
    model = without_dropout(family)
    inputs = {n: t for n, t in batch(family).items() if not n.startswith("decoder_")}
    inputs["labels"] = inputs["input_ids"].clone()
    expected = model(**inputs).loss
    pt.integrations.transformers.fused_loss(model)
    assert distance(model(**inputs).loss, expected) < LIMIT


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.size = max(self.size, t.numel())
        return out


def test_training_stores_no_logits(hugging_face: Any) -> None:
    """At 32,000 words no tensor reaches the size of the logits; unfused one does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words, length = 32_000, 512
    config = LlamaConfig(
        vocab_size=words, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    ids = torch.randint(words, (1, length), generator=torch.Generator().manual_seed(0))
    sizes = []
    for fused in (False, True):
        if fused:
            pt.integrations.transformers.fused_loss(model)
        with _Largest() as largest:
            model(input_ids=ids, labels=ids).loss.backward()
        sizes.append(largest.size)
    assert sizes[0] >= words * length > 8 * sizes[1], sizes


def test_accumulated_gradients_equal_one_large_batch(hugging_face: Any) -> None:
    family = FAMILIES["llama"]
    model = without_dropout(family)
    pt.integrations.transformers.fused_loss(model)
    inputs = batch(family)
    items = int((inputs["labels"][:, 1:] != -100).sum())
    whole, grads = loss_and_gradients(model, **inputs)
    grads = {n: g.clone() for n, g in grads.items()}
    model.zero_grad()
    total = 0.0
    for row in range(3):
        part = {n: t[row : row + 1] for n, t in inputs.items()}
        loss = model(**part, num_items_in_batch=items).loss
        loss.backward()
        total += float(loss.detach())
    assert abs(total - float(whole.loss)) < LIMIT * abs(total)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert distance(flat(found), flat(grads)) < LIMIT


def test_models_own_forward_runs_where_it_must(hugging_face: Any) -> None:
    family = FAMILIES["llama"]
    model = without_dropout(family)
    pt.integrations.transformers.fused_loss(model)
    inputs = batch(family)
    assert model(**inputs).logits is None
    assert model(**{**inputs, "labels": None}).logits is not None
    shifted = torch.roll(inputs["labels"], -1, 1)
    assert model(**inputs, shift_labels=shifted).logits is not None
    handle = model.lm_head.register_forward_hook(lambda m, args, out: 2 * out)
    assert model(**inputs).logits is not None
    handle.remove()
    assert model.eval()(**inputs).logits is not None
    del model.forward
    assert model.train()(**inputs).logits is not None


@pytest.mark.parametrize("name", ["gemma2", "recurrent_gemma", "t5gemma"])
def test_a_softcap_changes_loss_and_gradients(hugging_face: Any, name: str) -> None:
    """A cap far below the logits, by each name that models give it, and in a config of parts."""
    import transformers as T

    sizes = dict(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    if name == "gemma2":
        config = T.Gemma2Config(**sizes, final_logit_softcapping=0.1)
    elif name == "recurrent_gemma":
        sizes["num_hidden_layers"] = 3  # its first layer of attention
        config = T.RecurrentGemmaConfig(**sizes, lru_width=32, logits_soft_cap=0.1)
    else:
        config = T.T5GemmaConfig(
            encoder=sizes, decoder={**sizes, "final_logit_softcapping": 0.1}, vocab_size=99,
            dropout_rate=0.0,
        )  # fmt: skip
    auto = T.AutoModelForSeq2SeqLM if name == "t5gemma" else T.AutoModelForCausalLM
    model = auto.from_config(config).train()
    fused = copy.deepcopy(model)
    pt.integrations.transformers.fused_loss(fused)
    ids = torch.randint(99, (2, 9))
    expected, grads = loss_and_gradients(model, input_ids=ids, labels=ids)
    found, our_grads = loss_and_gradients(fused, input_ids=ids, labels=ids)
    assert found.logits is None and expected.logits.abs().max() > 0.09
    assert distance(found.loss, expected.loss) < LIMIT
    assert distance(flat(our_grads), flat(grads)) < LIMIT and our_grads.keys() == grads.keys()


def test_a_model_that_scales_its_logits_is_refused(hugging_face: Any) -> None:
    from transformers import CohereConfig, CohereForCausalLM

    config = CohereConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = CohereForCausalLM(config)
    with pytest.raises(ValueError, match="fused_loss: CohereForCausalLM is not supported"):
        pt.integrations.transformers.fused_loss(model)
    assert "forward" not in vars(model)


def test_a_model_without_words_is_refused(hugging_face: Any) -> None:
    with pytest.raises(ValueError, match="its output layer is NoneType"):
        pt.integrations.transformers.fused_loss(FAMILIES["vit"].build("eager"))
