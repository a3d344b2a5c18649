# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models with attn_implementation="pytransformer" against their eager code."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import (
    AS_EXACT,
    FAMILIES,
    MANY,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    real_tokens,
    run,
)

# Faults that test_wrong_masks_exceed_the_limit must detect.
LIMIT = model_distance_limit(torch.float32)

PADDED = [
    (name, padding)
    for name, f in FAMILIES.items()
    for padding in (["none"] if f.kind in ("image", "audio") else ["none", "left", "right"])
]
GENERATIVE = [name for name, f in FAMILIES.items() if f.kind in ("decoder", "seq2seq")]


@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_outputs_and_gradients_equal_eager(
    hugging_face: Any, backend: str, name: str, padding: str
) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, padding)
    logits, grads = run(family.build("eager"), family, inputs)
    with trace() as ran:
        ours, our_grads = run(family.build("pytransformer"), family, inputs)
    assert (
        ran
        == [("attention_fwd", backend)] * family.attentions
        + [("attention_bwd", backend)] * family.attentions
    )
    assert distance(ours, logits) < LIMIT
    assert our_grads.keys() == grads.keys()
    assert distance(flat(our_grads), flat(grads)) < LIMIT
    for n, g in grads.items():
        if "relative_attention_bias" in n:
            assert g.norm() > 0
            assert distance(our_grads[n], g) < LIMIT


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", GENERATIVE)
def test_generation_equals_eager(
    hugging_face: Any, backend: str, name: str, cache: str | None
) -> None:
    family = FAMILIES[name]
    inputs = {k: v for k, v in inputs_of(family, "left").items() if not k.startswith("decoder_")}
    settings = dict(
        max_new_tokens=7, min_new_tokens=7, do_sample=False, use_cache=cache is not None
    )  # random models may end at once
    if cache == "static":
        settings.update(cache_implementation="static", disable_compile=True)
    tokens = family.build("eager").generate(**inputs, **settings)
    with trace() as ran:
        ours = family.build("pytransformer").generate(**inputs, **settings)
    assert torch.equal(ours, tokens)
    assert len(ran) >= 2 * 7
    assert {b for _, b in ran} == {backend}


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit"])
def test_bfloat16_is_as_accurate_as_eager(hugging_face: Any, backend: str, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "right", batch=MANY)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    exact, _ = run(family.build("eager"), family, inputs)
    eager, _ = run(family.build("eager", torch.bfloat16), family, half)
    ours, _ = run(family.build("pytransformer", torch.bfloat16), family, half)
    assert distance(ours.float(), exact) < AS_EXACT * distance(eager.float(), exact)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompts_in_two_parts_equal_eager(hugging_face: Any, backend: str, name: str) -> None:
    """Several queries follow cached keys: the causal diagonal is aligned to the last key."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def second_part(implementation: str) -> torch.Tensor:
        model = family.build(implementation)
        with torch.no_grad():
            first = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
            more = model(
                input_ids=ids[:, 6:], attention_mask=mask, past_key_values=first.past_key_values
            )
        return more.logits[mask[:, 6:].bool()]

    assert distance(second_part("pytransformer"), second_part("eager")) < LIMIT


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_user_masks_equal_eager(hugging_face: Any, backend: str, name: str, kind: str) -> None:
    """A 4-dimensional mask is complete: nothing is added to it, not even causality."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "none")
    allowed = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(5)) < 0.5
    allowed |= torch.eye(11, dtype=torch.bool)
    additive = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    real = real_tokens(family, inputs)
    logits, grads = run(family.build("eager"), family, {**inputs, "attention_mask": additive}, real)
    mine = {**inputs, "attention_mask": allowed if kind == "bool" else additive}
    ours, our_grads = run(family.build("pytransformer"), family, mine, real)
    assert distance(ours, logits) < LIMIT
    assert distance(flat(our_grads), flat(grads)) < LIMIT


@pytest.mark.parametrize("name", FAMILIES)  # GPT-2 does not pass the request on to its attention
def test_attention_weights_equal_eager(hugging_face: Any, backend: str, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "right")
    with torch.no_grad():
        eager = family.build("eager")(**inputs, output_attentions=True)
        ours = family.build("pytransformer")(**inputs, output_attentions=True)
    names = [n for n in eager if n.endswith("attentions") and eager[n]]
    assert names
    for n in names:
        queries = inputs.get(
            "decoder_attention_mask"
            if n != "encoder_attentions" and family.kind == "seq2seq"
            else "attention_mask"
        )
        for theirs, weights in zip(eager[n], ours[n], strict=True):
            assert weights.shape == theirs.shape
            if (
                queries is not None and theirs.shape[2] == queries.shape[1]
            ):  # a padding row may see no key: zeros
                theirs, weights = (t.transpose(1, 2)[queries.bool()] for t in (theirs, weights))
            assert distance(weights, theirs) < LIMIT


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_gradient_checkpointing_equals_eager(
    hugging_face: Any, backend: str, name: str, reentrant: bool
) -> None:
    """The lowered mask survives the replay, which detaches it."""
    family = FAMILIES[name]
    inputs = inputs_of(family, "left")
    _, grads = run(family.build("eager"), family, inputs)
    model = family.build("pytransformer").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with trace() as ran:
        _, ours = run(model, family, inputs)
    assert len(ran) == 6, "two layers, each forward twice and backward once"
    assert distance(flat(ours), flat(grads)) < LIMIT


@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mistral"))]
)
def test_compiles_without_a_graph_break(hugging_face: Any, backend: str, name: str) -> None:
    family = FAMILIES[name]
    inputs = inputs_of(family, "right")
    real = real_tokens(family, inputs)
    with torch.no_grad():
        logits = family.build("eager")(**inputs).logits[real]
        torch._dynamo.reset()
        compiled = torch.compile(family.build("pytransformer"), backend="aot_eager", fullgraph=True)
        with trace() as ran:
            ours = compiled(**inputs).logits[real]
    assert ran == [("attention_fwd", backend)] * 2
    assert distance(ours, logits) < LIMIT


def test_dropout_follows_the_global_seed(hugging_face: Any, backend: str) -> None:
    family = FAMILIES["gpt2"]
    inputs = inputs_of(family, "right")
    model = family.build("pytransformer")
    model.transformer.h[0].attn.attn_dropout.p = 0.5
    model.transformer.h[0].attn.train()

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(**inputs).logits

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))


def test_wrong_masks_exceed_the_limit(
    hugging_face: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault must exceed the limit of the tests above."""
    from transformers import AttentionMaskInterface

    from pytransformer.integrations import hugging_face as ours

    def no_padding(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return ours.attention_mask(*args, **kwargs)

    def no_causality(*args: Any, **kwargs: Any) -> Any:
        return replace(ours.attention_mask(*args, **kwargs), causal=None, window=None)

    def no_window(*args: Any, **kwargs: Any) -> Any:
        return replace(ours.attention_mask(*args, **kwargs), window=None)

    def read_as_another(*args: Any, **kwargs: Any) -> Any:
        mask = ours.attention_mask(*args, **kwargs)
        return replace(mask, causal="bottom_right" if mask.causal is None else "top_left")

    def bare(*args: Any, **kwargs: Any) -> Any:
        """Return a padding mask as a plain tensor, which has no causality."""
        return ours.attention_mask(*args, **kwargs).padding

    def shifted(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return ours.attention_mask(*args, attention_mask=attention_mask.roll(1, 1), **kwargs)

    wrong = [
        ("bert", no_padding),
        ("t5", no_padding),
        ("llama", no_padding),
        ("llama", no_causality),
        ("mistral", no_window),
        ("gpt2", shifted),
        ("bart", no_padding),
        ("bert", read_as_another),
        ("llama", bare),
        ("t5", no_causality),
    ]
    for name, mutant in wrong:
        family = FAMILIES[name]
        inputs = inputs_of(family, "left")
        logits, grads = run(family.build("eager"), family, inputs)
        AttentionMaskInterface.register("wrong", mutant)
        hugging_face.AttentionInterface.register("wrong", ours.attention_forward)
        try:
            bad, bad_grads = run(family.build("wrong"), family, inputs)
        finally:
            AttentionMaskInterface._global_mapping.pop("wrong")
            hugging_face.AttentionInterface._global_mapping.pop("wrong")
        assert distance(bad, logits) > 100 * LIMIT, (name, mutant.__name__)
        assert distance(flat(bad_grads), flat(grads)) > 100 * LIMIT, (name, mutant.__name__)


@pytest.mark.parametrize("name", ["bert", "t5", "clip"])
def test_switch_reaches_inner_models(hugging_face: Any, name: str) -> None:
    family = FAMILIES[name]
    model = family.build("sdpa")
    for implementation, calls in (("pytransformer", family.attentions), ("sdpa", 0)):
        pt.integrations.transformers.switch(model, implementation)
        with trace() as ran:
            run(model, family, inputs_of(family, "none"))
        assert sum(op == "attention_fwd" for op, _ in ran) == calls


def test_without_transformers_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers; run pip install transformers"):
        pt.integrations.transformers.register()
