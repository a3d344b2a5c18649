# SPDX-License-Identifier: Apache-2.0
"""Longformer, LED, BigBird and BigBird-Pegasus converted: states and gradients equal eager code."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.integrations.convert import long_rules
from pytransformer.ops._core.registry import trace
from support.hugging_face import distance, flat, model_distance_limit
from support.models import random_sum

pytestmark = pytest.mark.usefixtures("one_thread")
NO_DROPOUT = dict(
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    attention_probs_dropout_prob=0.0,
    hidden_dropout_prob=0.0,
)
ENCODER = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    pad_token_id=1, bos_token_id=0,
    eos_token_id=2, sep_token_id=2, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
)  # fmt: skip
SEQ2SEQ = dict(
    vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=1, decoder_start_token_id=2, **NO_DROPOUT,
)  # fmt: skip
BLOCKS = dict(attention_type="block_sparse", block_size=4, num_random_blocks=2)
# model, config, settings, and the length from which its sparse attention runs
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "longformer": (
        "LongformerModel", "LongformerConfig",
        dict(ENCODER, attention_window=[4, 8], max_position_embeddings=130)),
    "led": ("LEDModel", "LEDConfig", dict(
        SEQ2SEQ, attention_window=[8, 4], max_encoder_position_embeddings=130,
        max_decoder_position_embeddings=40)),
    "big_bird": ("BigBirdModel", "BigBirdConfig",
        dict(ENCODER, **BLOCKS, max_position_embeddings=130)),
    "bigbird_pegasus": ("BigBirdPegasusModel", "BigBirdPegasusConfig",
        dict(SEQ2SEQ, **BLOCKS, max_position_embeddings=130)),
}  # fmt: skip
ATTENTION = (
    "LongformerSelfAttention LEDEncoderSelfAttention LEDDecoderAttention"
    " BigBirdBlockSparseAttention BigBirdSelfAttention BigBirdPegasusBlockSparseAttention"
    " BigBirdPegasusSelfAttention"
).split()


def built(hugging_face: Any, name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    model, config, settings = MODELS[name]
    made = getattr(hugging_face, config)(**copy.deepcopy({**settings, **more}))
    torch.manual_seed(7)
    built = getattr(hugging_face, model)(made)
    with torch.no_grad():
        for p in built.parameters():
            p.mul_(3.0) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    return built.to(dtype).eval()


def converted(model: Any) -> Any:
    ours = copy.deepcopy(model)
    found = pt.integrations.convert(ours, kinds=("attention",))
    assert not [s for s in found.skipped if s[1] in ATTENTION], found
    return ours


def inputs_of(
    name: str, length: int, padding: str = "none", tokens: str = "none"
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 61, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, : length // 3] = 0
        mask[1, :5] = 0
        mask = mask if padding == "left" else mask.flip(1)
    found = dict(input_ids=ids.masked_fill(mask == 0, 1), attention_mask=mask)
    if name in ("led", "bigbird_pegasus"):
        found["decoder_input_ids"] = torch.randint(5, 61, (3, 6), generator=generator)
    if tokens != "none":  # one sequence without padding, another with padding, which does not count
        expected = torch.zeros_like(ids)
        expected[:, 0] = 1
        if tokens == "several":
            expected[1, [3, length // 2, length - 1]] = 1
            expected[2] = 0
        found["global_attention_mask"] = expected
    return found


def states(output: Any) -> list[torch.Tensor]:
    """Return the hidden states of every layer of encoder and decoder."""
    names = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
    return [t for name in names for t in getattr(output, name, None) or ()]


def results(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    found = torch.cat([t.flatten() for t in states(model(**inputs, output_hidden_states=True))])
    random_sum(found).backward()
    return found.detach(), flat(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    )


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Longformer's eager code compute its softmax in float64 instead of float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


CASES = [
    (name, length, padding, tokens)
    for name in MODELS
    for length, padding, tokens in (
        (64, "none", "none"),
        (64, "right", "first"),
        (59, "left", "several"),
        (59, "right", "several"),
        (61, "left", "none"),
    )
    if tokens == "none" or name in ("longformer", "led")
] + [
    (name, length, padding, "none")
    for name in ("big_bird", "bigbird_pegasus")
    for length, padding in ((59, "right"), (90, "left"))
]


@pytest.mark.parametrize(
    ("name", "length", "padding", "tokens", "dtype"),
    [(*case, torch.float64) for case in CASES]
    + [(*case, torch.float32) for case in CASES if case[1] == 59 and case[2] == "right"],
)
def test_states_and_gradients_equal_eager(
    hugging_face: Any,
    exact_softmax: None,
    name: str,
    length: int,
    padding: str,
    tokens: str,
    dtype: torch.dtype,
) -> None:
    model = built(hugging_face, name, dtype)
    inputs = inputs_of(name, length, padding, tokens)
    want, want_gradients = results(model, inputs)
    with trace() as ran:
        got, gradients = results(converted(model), inputs)
    calls = sum(op == "attention_fwd" for op, _ in ran)
    decoder = {"led": 4, "bigbird_pegasus": 0}.get(
        name, 0
    )  # Pegasus's decoder uses the interface, here the eager function
    assert calls == decoder + (2 if tokens == "none" else 4)
    limit = model_distance_limit(dtype)
    assert distance(got, want) < limit and distance(gradients, want_gradients) < limit, (
        distance(got, want) / limit, distance(gradients, want_gradients) / limit,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["big_bird", "bigbird_pegasus"])
@pytest.mark.parametrize(
    ("length", "more"),
    [
        (64, {}),
        (59, {"num_random_blocks": 3}),
        (90, {}),
        (
            1024,
            {"block_size": 64, "num_random_blocks": 3, "max_position_embeddings": 1024},
        ),
    ],
)
def test_random_blocks_in_training_equal_the_layer(
    hugging_face: Any, name: str, length: int, more: Any
) -> None:
    """numpy's generator, seeded by the layer, draws other blocks for each head.

    A second plan draws blocks for 1,024 tokens.
    """
    model = built(hugging_face, name, **more).train()
    ours, inputs = converted(model), inputs_of(name, length, "right")
    want, want_gradients = results(model, inputs)
    got, gradients = results(ours, inputs)
    modules = [m for m in ours.modules() if "BlockSparse" in type(m).__name__]
    many = [long_rules.times_counted(m, -(-length // m.block_size) * m.block_size) for m in modules]
    assert (
        many[0].shape[0] == 4
        and not torch.equal(many[0][0], many[0][1])
        and not torch.equal(many[0], many[1])
    )
    limit = model_distance_limit(torch.float32)
    assert distance(got, want) < limit and distance(gradients, want_gradients) < limit
    assert (
        distance(results(model.eval(), inputs)[0], want) > 1e-3
    )  # in eval mode other blocks are visible


def test_eval_mode_repeats_the_first_block(hugging_face: Any) -> None:
    """Eager code counts it once per draw, which no mask can express.

    Without one copy the results differ by 2e-2 and more.
    """
    model = built(hugging_face, "big_bird", torch.float64)
    inputs = inputs_of("big_bird", 64)
    want, ours = results(model, inputs)[0], converted(model)
    module = next(m for m in ours.modules() if type(m).__name__ == "BigBirdBlockSparseAttention")
    many = long_rules.times_counted(module, 64)
    assert many.shape == (1, 16, 16) and many[0, 5].tolist() == [3, 0, 0, 0, 1, 1, 1, *[0] * 8, 1]
    assert many[0, 1, 0] == 3 and many[0, 0].tolist() == [1] * 16
    assert long_rules.plan(module, 64)[1] == [0, 0]
    for m in ours.modules():
        if hasattr(m, "num_random_blocks"):
            m.num_random_blocks = 1
    long_rules._PLANS.clear()
    assert distance(results(ours, inputs)[0], want) > 1e-3


def test_short_sequences_switch_the_type_and_stay_converted(hugging_face: Any) -> None:
    for name in ("big_bird", "bigbird_pegasus"):
        model = built(hugging_face, name, torch.float64)
        ours, inputs = converted(model), inputs_of(name, 30, "left")
        with trace() as ran:
            got, gradients = results(ours, inputs)
        assert sum(op == "attention_fwd" for op, _ in ran) == 2
        want, want_gradients = results(model, inputs)
        assert distance(got, want) < model_distance_limit(torch.float64)
        assert distance(gradients, want_gradients) < model_distance_limit(torch.float64)
        assert pt.integrations.revert(ours) > 0
        assert torch.equal(results(ours, inputs)[0], want)


@pytest.mark.parametrize("length", [30, 59])
def test_decoders_may_use_the_attention_interface(hugging_face: Any, length: int) -> None:
    """BigBird-Pegasus's encoder then gets our mask object for short sequences."""
    model = built(hugging_face, "bigbird_pegasus", torch.float64)
    ours, inputs = converted(model), inputs_of("bigbird_pegasus", length, "right")
    pt.integrations.transformers.switch(ours)
    with trace() as ran:
        got, gradients = results(ours, inputs)
    assert sum(op == "attention_fwd" for op, _ in ran) == 6
    want, want_gradients = results(model, inputs)
    limit = model_distance_limit(torch.float64)
    assert distance(got, want) < limit and distance(gradients, want_gradients) < limit


def test_weights_come_from_eager_code(hugging_face: Any) -> None:
    for name in MODELS:
        model = built(hugging_face, name)
        inputs = inputs_of(name, 64, "right", "first" if name in ("longformer", "led") else "none")
        with torch.no_grad():
            want, got = (m(**inputs, output_attentions=True) for m in (model, converted(model)))
        found = [key for key in list(want) if key.endswith("attentions") and want[key] is not None]
        assert found
        for key in found:
            for ours, theirs in zip(got[key], want[key]):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_attention_dropout_is_supported(hugging_face: Any) -> None:
    """Our generator draws; the mean over draws equals the result without dropout.

    Hidden queries stay 0.
    """
    for name, tokens in (("longformer", "first"), ("led", "several")):
        model = converted(built(hugging_face, name))
        module = next(m for m in model.modules() if type(m).__name__ in ATTENTION)
        x = torch.randn(3, 64, 32)
        given = inputs_of(name, 64, "right", tokens)
        mask = given["attention_mask"] * (given["global_attention_mask"] + 1)
        state = torch.where(mask == 0, -1.0, mask - 1.0)
        call = lambda module=module, x=x, state=state: module(x, state, state < 0, state > 0, True)[
            0
        ].detach()
        want = call()
        module.dropout = 0.5
        assert torch.equal(call(), want)  # eval mode
        module.train()
        draws = torch.stack([call() for _ in range(200)])
        assert not torch.equal(draws[0], draws[1])
        assert (draws[:, state < 0] == 0).all() and (want[state < 0] == 0).all()
        error = (draws.mean(0) - want).abs()
        assert (error <= 6 * draws.std(0) / 200**0.5 + 1e-5).all()


def test_decoders_with_a_cache_equal_eager(hugging_face: Any) -> None:
    """LED's and BigBird's decoders run cached steps and cross-attention with stored keys."""
    led = hugging_face.LEDForConditionalGeneration(
        hugging_face.LEDConfig(**MODELS["led"][2])
    ).eval()
    bird = hugging_face.BigBirdForCausalLM(
        hugging_face.BigBirdConfig(**dict(ENCODER, is_decoder=True, attention_type="original_full"))
    ).eval()
    for model, name in ((led, "led"), (bird, "big_bird")):
        given = {
            k: v for k, v in inputs_of(name, 24, "left").items() if not k.startswith("decoder")
        }
        output = dict(
            max_new_tokens=5,
            min_new_tokens=5,
            do_sample=False,
            num_beams=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        want, ours = model.generate(**given, **output), converted(model)
        with trace() as ran:
            got = ours.generate(**given, **output)
        calls = (
            2 + 5 * 4 if name == "led" else 5 * 2
        )  # encoder once; each step has self- and cross-attention of two layers
        assert sum(op == "attention_fwd" for op, _ in ran) == calls
        for one, two in zip(got.logits, want.logits):
            assert distance(one, two) < model_distance_limit(torch.float32)
        assert torch.equal(got.sequences, want.sequences)


def test_unreviewed_code_is_not_converted(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    from pytransformer.integrations.convert import code, rules

    rule = rules.find_rule(LongformerSelfAttention)
    monkeypatch.setattr(code, "digest", lambda cls, method: "another")
    assert "is not one we have checked" in rule.why_not(
        built(hugging_face, "longformer").encoder.layer[0].attention.self
    )


def test_converted_models_pickle(hugging_face: Any) -> None:
    model = built(hugging_face, "big_bird")
    ours, inputs = converted(model), inputs_of("big_bird", 64)
    again = pickle.loads(pickle.dumps(ours))
    want = results(ours, inputs)[0]
    assert torch.equal(results(again, inputs)[0], want)
    assert ours.state_dict().keys() == model.state_dict().keys()
