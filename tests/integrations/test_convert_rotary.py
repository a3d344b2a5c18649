# SPDX-License-Identifier: Apache-2.0
"""convert(): rotary attention against transformers' eager code."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import (
    AS_EXACT,
    FAMILIES,
    MANY,
    PAD,
    VOCABULARY,
    Family,
    _decoder,
    distance,
    flat,
    inputs_of,
    model_distance_limit,
    real_tokens,
    run,
)

LIMIT = model_distance_limit(torch.float32)
MOE = dict(num_local_experts=4, num_experts_per_tok=2)
NEOX = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=64,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GPTJ = dict(
    vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
    pad_token_id=PAD, bos_token_id=1,
    eos_token_id=None,
)  # fmt: skip
LONGER = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
MODELS = {
    "llama": FAMILIES["llama"],
    "llama-bias-yarn": Family("LlamaForCausalLM", "LlamaConfig",
        _decoder(attention_bias=True, rope_parameters=LONGER), "decoder"),
    "mistral": FAMILIES["mistral"],
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config",
        _decoder(use_sliding_window=True, sliding_window=5, max_window_layers=1), "decoder"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", _decoder(head_dim=16), "decoder"),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", _decoder(head_dim=8), "decoder"),
    "gemma2": FAMILIES["gemma2"],
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _decoder(
        head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"]), "decoder"),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", _decoder(partial_rotary_factor=0.5), "decoder"),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", NEOX, "decoder"),
    "gpt_neox-serial": Family("GPTNeoXForCausalLM", "GPTNeoXConfig",
        dict(NEOX, use_parallel_residual=False), "decoder"),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", GPTJ, "decoder"),
    "granite": Family("GraniteForCausalLM", "GraniteConfig", _decoder(attention_multiplier=0.5),
        "decoder"),
    "arcee": Family("ArceeForCausalLM", "ArceeConfig", _decoder(), "decoder"),
    "cwm": Family("CwmForCausalLM", "CwmConfig", _decoder(head_dim=8, sliding_window=5), "decoder"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _decoder(
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24), "decoder"),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", _decoder(**MOE), "decoder"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def build(name: str, dtype: torch.dtype = torch.float32, implementation: str | None = None) -> Any:
    """Return a converted model; our attention runs in it, also where GPT-J calls it itself."""
    own = name == "gptj" and not gptj_asks_the_interface()
    model = MODELS[name].build(implementation or ("eager" if own else "pytransformer"), dtype)
    conversion = pt.integrations.convert(model)
    assert sum(what.startswith("rotary") for _, _, what in conversion.converted) == 2, str(
        conversion
    )
    return model


def gptj_asks_the_interface() -> bool:
    """Return whether GPT-J uses transformers' attention interface, as since 5.24."""
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    return "position_embeddings" in inspect.signature(GPTJAttention.forward).parameters


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_equal_eager(hugging_face: Any, name: str, padding: str) -> None:
    family = MODELS[name]
    inputs = inputs_of(family, padding)
    logits, grads = run(family.build("eager"), family, inputs)
    model = build(name)
    with trace() as ran:
        ours, our_grads = run(model, family, inputs)
    count = [op for op, _ in ran]
    assert count.count("rotary_fwd") == count.count("rotary_bwd") == 4
    assert count.count("attention_fwd") == count.count("attention_bwd") == 2
    assert distance(ours, logits) < LIMIT
    assert our_grads.keys() == grads.keys()
    assert distance(flat(our_grads), flat(grads)) < LIMIT
    for of, gradient in grads.items():
        if ".q_norm." in of or ".k_norm." in of:
            assert gradient.norm() > 0
            assert (
                distance(our_grads[of], gradient) < 4 * LIMIT
            )  # a sum over rows of a vector much smaller than its terms


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "gptj"]
)
def test_generation_equals_eager(hugging_face: Any, name: str, way: str) -> None:
    inputs = inputs_of(MODELS[name], "left")
    settings: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, **WAYS[way]}
    tokens = []
    for model in (MODELS[name].build("eager"), build(name)):
        torch.manual_seed(5)
        tokens.append(model.generate(**inputs, **settings))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "gptj"])
def test_user_caches_in_chunks_equal_the_full_sequence(
    hugging_face: Any, name: str, kind: str
) -> None:
    """Chunks of 4, 1, 3 and 3 tokens give eager code's result on the full sequence."""
    family = MODELS[name]
    ids = inputs_of(family, "none")["input_ids"]
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with torch.no_grad():
        want = family.build("eager")(input_ids=ids).logits
        model = build(name)
        cache = (
            transformers.DynamicCache(config=model.config)
            if kind == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=16)
        )
        pieces = [
            model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True).logits
            for start, stop in ((0, 4), (4, 5), (5, 8), (8, 11))
        ]
    assert distance(torch.cat(pieces, 1), want) < LIMIT


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "gptj"])
def test_every_attention_implementation_still_runs(
    hugging_face: Any, name: str, implementation: str
) -> None:
    if name == "gptj" and not gptj_asks_the_interface():
        pytest.skip("GPT-J before transformers 5.24 has attention code of its own")
    family = MODELS[name]
    inputs = inputs_of(family, "left")
    want = run(family.build(implementation), family, inputs)[0]
    model = build(name, implementation=implementation)
    assert distance(run(model, family, inputs)[0], want) < LIMIT


@pytest.mark.parametrize("name", MODELS)
def test_attention_receives_the_arguments_of_the_model(hugging_face: Any, name: str) -> None:
    """Windows, softcaps and scales too, which not every attention function reads from the mask."""
    if name == "gptj" and not gptj_asks_the_interface():
        pytest.skip("GPT-J before transformers 5.24 has attention code of its own")
    handed: list[dict[str, Any]] = []

    def spy(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **kwargs: Any,
    ) -> Any:
        handed.append(
            {
                **kwargs,
                "is_causal": module.is_causal,
                "shapes": (query.shape, key.shape, value.shape),
            }
        )
        return value.new_zeros(value.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    hugging_face.AttentionInterface.register("spy", spy)
    for model in (MODELS[name].build("spy"), build(name, implementation="spy")):
        model(**inputs_of(MODELS[name], "none"), position_ids=torch.arange(11)[None])
    assert len(handed) == 4
    for own, ours in zip(handed[:2], handed[2:]):
        assert repr(sorted(own.items())) == repr(sorted(ours.items()))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_neox", "gptj"])
def test_bfloat16_is_as_accurate_as_eager(hugging_face: Any, name: str) -> None:
    """The norm, both products and their sum are rounded once; eager code rounds each."""
    family = MODELS[name]
    inputs = inputs_of(family, "right", batch=MANY)
    exact, _ = run(family.build("eager"), family, inputs)
    eager, _ = run(family.build("eager", torch.bfloat16), family, inputs)
    model = build(name, torch.bfloat16)
    ours, _ = run(model, family, inputs)
    assert ours.dtype == torch.bfloat16
    assert distance(ours, exact) < AS_EXACT * distance(eager, exact)


def test_user_positions_equal_eager(hugging_face: Any) -> None:
    family = MODELS["qwen3"]
    inputs = inputs_of(family, "none")
    inputs["position_ids"] = (
        torch.randint(0, 60, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(2))
        .sort(1)
        .values
    )
    want = run(family.build("eager"), family, inputs)[0]
    model = build("qwen3")
    assert distance(run(model, family, inputs)[0], want) < LIMIT
    del inputs["position_ids"]
    assert distance(run(model, family, inputs)[0], want) > 100 * LIMIT


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt_neox"])
def test_attention_dropout_applies_where_eager_applies_it(hugging_face: Any, name: str) -> None:
    """Dropout with probability 1 is deterministic: attention then adds nothing."""
    family = MODELS[name]
    inputs = inputs_of(family, "none")
    outs = []
    for model in (family.build("eager"), build(name)):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 1.0
            if hasattr(module, "attn_dropout"):
                module.attn_dropout.p = 1.0
        outs.append(run(model.train(), family, inputs)[0])
    assert distance(outs[1], outs[0]) < LIMIT
    assert distance(outs[1], run(build(name), family, inputs)[0]) > 100 * LIMIT


def test_learned_tables_run_the_model_code(hugging_face: Any) -> None:
    """Our op has no gradient for cos and sin."""
    from transformers.models.llama import modeling_llama

    model = build("llama", implementation="eager")
    layer = model.model.layers[0].self_attn
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    grads = []
    for forward in (
        layer.forward,
        lambda *a, **k: modeling_llama.LlamaAttention.forward(layer, *a, **k),
    ):
        out, _ = forward(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        grads.append(torch.autograd.grad(out.square().sum(), angles)[0])
    assert torch.equal(*grads) and grads[0].norm() > 0


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gptj"))]
)
def test_compiles_without_a_graph_break(hugging_face: Any, name: str) -> None:
    family = MODELS[name]
    inputs = inputs_of(family, "left")
    real = real_tokens(family, inputs)
    with torch.no_grad():
        want = family.build("eager")(**inputs).logits[real]
        torch._dynamo.reset()
        model = build(name)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert distance(compiled(**inputs).logits[real], want) < LIMIT


# ---- modules left unchanged, and the reasons


def reasons(model: nn.Module) -> dict[str, str]:
    return {name: reason for name, _, reason in pt.integrations.convert(model).skipped}


def test_other_rotations_are_not_converted(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    def rotate_half(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)

    monkeypatch.setattr(modeling_llama, "rotate_half", rotate_half)
    skipped = reasons(FAMILIES["llama"].build("eager"))
    assert (
        "its forward, or what that calls, is not one we have checked"
        in skipped["model.layers.0.self_attn"]
    )


def test_norms_with_hooks_or_of_another_class_are_not_converted(hugging_face: Any) -> None:
    model = MODELS["qwen3"].build("eager")
    model.model.layers[0].self_attn.k_norm.register_forward_hook(lambda *a: None)
    model.model.layers[1].self_attn.q_norm = nn.Identity()
    skipped = reasons(model)
    assert "has a Qwen3RMSNorm with hooks" in skipped["model.layers.0.self_attn"]
    assert (
        "has a Identity where a known RMS norm was expected" in skipped["model.layers.1.self_attn"]
    )


def test_hooks_of_projections_are_called(hugging_face: Any) -> None:
    model, called = MODELS["qwen3"].build("eager"), []
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(model.model.layers[0].self_attn, name).register_forward_hook(
            lambda *a, name=name: called.append(name)
        )
    assert "model.layers.0.self_attn" not in reasons(model)
    model(input_ids=torch.tensor([[5, 6]]))
    assert called == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_unknown_attention_is_reported(hugging_face: Any) -> None:
    model = Family("Olmo2ForCausalLM", "Olmo2Config", _decoder(), "decoder").build("eager")
    want = "its file rotates queries and keys by position, but convert does not support its class"
    assert reasons(model)["model.layers.0.self_attn"] == want
