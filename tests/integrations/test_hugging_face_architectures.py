# SPDX-License-Identifier: Apache-2.0
"""Architectures with special masks or keywords are right or refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import distance, flat, model_distance_limit

LIMIT = model_distance_limit(torch.float32)
SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=0,
)
DECODER = dict(
    SMALL, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=None
)
SEQ2SEQ = dict(
    vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0,
    decoder_start_token_id=0,
)  # fmt: skip
LATENT = dict(  # multi-head latent attention whose indexer selects 3 keys per query
    DECODER, num_key_value_heads=4, moe_intermediate_size=16, q_lora_rank=16, kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
    topk_group=1, index_topk=3,
    index_head_dim=16, index_n_heads=2, mlp_layer_types=["dense", "sparse"],
)  # fmt: skip
GPTJ = dict(
    vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4,
    bos_token_id=1, eos_token_id=None,
)  # fmt: skip
TWO_TOWERS = dict(
    text_config=dict(SMALL, hidden_size=32, max_position_embeddings=64),
    vision_config=dict(hidden_size=128, num_hidden_layers=2, image_size=32, patch_size=8),
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2,
)  # fmt: skip

# model: its config, that config's settings, and the number of attention calls
RIGHT: dict[str, tuple[str, dict[str, Any], int]] = {
    # modules without is_causal, or with the opposite of their masks
    "AlignTextModel": ("AlignTextConfig", SMALL, 2),
    "ClapTextModel": ("ClapTextConfig", SMALL, 2),
    "SplinterModel": ("SplinterConfig", SMALL, 2),
    "NllbMoeForConditionalGeneration": ("NllbMoeConfig", dict(
        SEQ2SEQ, num_experts=4, expert_capacity=64, encoder_sparse_step=2, decoder_sparse_step=2),
        6),
    "PegasusXForConditionalGeneration": ("PegasusXConfig",
        dict(SEQ2SEQ, num_global_tokens=2, block_size=4), 4),
    "UMT5ForConditionalGeneration": ("UMT5Config", dict(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8,
        pad_token_id=0, decoder_start_token_id=0), 6),
    "InformerModel": ("InformerConfig", dict(
        prediction_length=4, context_length=10, lags_sequence=[1, 2], num_time_features=2,
        d_model=32, encoder_attention_heads=4,
        decoder_attention_heads=4), 2),  # and as many ProbSparse attentions of the model's own
    "BridgeTowerModel": ("BridgeTowerConfig", TWO_TOWERS, 10),
    # keys selected by an indexer, sinks in the softmax, a mask that the model modifies
    "DeepseekV32ForCausalLM": ("DeepseekV32Config", LATENT, 2),
    "GlmMoeDsaForCausalLM": ("GlmMoeDsaConfig", dict(LATENT, indexer_types=["full"] * 2), 2),
    "AXK2ForCausalLM": ("AXK2Config", dict(LATENT, gated_norm_rank=8), 2),
    "MiniMaxM3VLTextModel": ("MiniMaxM3VLTextConfig", dict(
        DECODER, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2,
        dense_intermediate_size=48,
        shared_intermediate_size=16, mlp_layer_types=["dense", "sparse"], index_n_heads=2,
        index_head_dim=16, index_block_size=2,
        index_topk_blocks=2, layer_types=["minimax_m3_sparse", "full_attention"]), 2),
    "GptOssForCausalLM": ("GptOssConfig", dict(
        DECODER, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"]), 2),
    "DogeForCausalLM": ("DogeConfig", dict(DECODER, keep_window_size=4), 2),
    # attention in code of their own before transformers 5.24
    "CodeGenModel": ("CodeGenConfig", GPTJ, 2),
    "GPTJModel": ("GPTJConfig", GPTJ, 2),
    "LayoutLMv3Model": ("LayoutLMv3Config", dict(
        SMALL, max_position_embeddings=64, coordinate_size=4, shape_size=8, input_size=32,
        patch_size=16), 2),
}  # fmt: skip
SINCE_5_24 = ("CodeGenModel", "GPTJModel", "LayoutLMv3Model")

# model: its config. These raise before anything is built, so the defaults suffice.
REFUSED = {
    name: config or f"{name.removesuffix('Model')}Config"
    for name, config in {
        **dict.fromkeys((
            "BlipModel", "BloomModel", "ClvpModel", "CodeGenModel", "ConvBertModel",
            "GPTNeoXJapaneseModel", "GroupViTModel",
            "LEDModel", "LongformerModel", "LukeModel", "MegatronBertModel", "MPNetModel",
            "MvpModel", "NystromformerModel",
            "RemBertModel", "RoFormerModel", "SpeechT5Model", "SqueezeBertModel", "XGLMModel",
            "BrosModel", "CanineModel",
            "FlavaModel", "ImageGPTModel", "LayoutLMv3Model", "LiltModel", "MptModel", "TvpModel",
            "ViltModel", "VisualBertModel",
            "VitsModel", "BigBirdModel", "FalconModel", "GPTJModel", "GPTNeoModel", "GitModel",
            "SamModel", "SamHQModel",
            "Data2VecVisionModel", "BarkModel", "GroundingDinoModel", "MMGroundingDinoModel")),
        "TrOCRForCausalLM": "TrOCRConfig",
    }.items()
}  # fmt: skip


@functools.cache
def built(name: str, implementation: str) -> Any:
    import transformers

    config, settings, _ = RIGHT[name]
    torch.manual_seed(7)
    made = getattr(transformers, config)(**copy.deepcopy(settings))
    model = getattr(transformers, name)._from_config(made, attn_implementation=implementation)
    gain = 1.0 if "d_kv" in settings else 3.0  # T5's are large enough
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(gain) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def in_own_code(hugging_face: Any, name: str) -> bool:
    """Return whether the model computes attention itself in this release."""
    release = tuple(int(part) for part in hugging_face.__version__.split(".")[:2])
    return name in REFUSED and (name not in SINCE_5_24 or release < (5, 24))


def inputs_of(name: str, padding: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if name == "InformerModel":
        past, future = (
            torch.randn(2, 12, generator=generator),
            torch.randn(2, 4, generator=generator),
        )
        times = torch.randn(2, 16, 2, generator=generator)
        return dict(
            past_values=past, past_time_features=times[:, :12],
            past_observed_mask=torch.ones(2, 12), future_values=future,
            future_time_features=times[:, 12:],
        )  # fmt: skip
    ids = torch.randint(5, 61, (2, 11), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[1, :4] = 0
        mask = mask if padding == "left" else mask.flip(1)
    inputs = dict(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)
    if RIGHT[name][1].keys() & {"decoder_start_token_id"}:
        inputs["decoder_input_ids"] = torch.randint(5, 61, (2, 6), generator=generator)
    if "vision_config" in RIGHT[name][1]:
        inputs["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator)
    return inputs


def results(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all floating outputs of real tokens in one vector, and all gradients in another."""
    model.zero_grad()
    torch.manual_seed(5)  # Informer draws keys
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    out = []
    for value in model(**inputs, return_dict=True).values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            out.append(
                (
                    value[real] if real is not None and value.shape[:2] == real.shape else value
                ).flatten()
            )
    vector = torch.cat(out)
    (vector * torch.linspace(-1, 1, vector.numel())).sum().backward()
    return vector.detach(), flat(
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    )


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", RIGHT)
def test_supported_architectures_equal_eager(hugging_face: Any, name: str, padding: str) -> None:
    if not hasattr(hugging_face, name):
        pytest.skip(f"transformers {hugging_face.__version__} has no {name}")
    if in_own_code(hugging_face, name):
        pytest.skip(f"{name} of transformers {hugging_face.__version__} must be refused, see below")
    inputs = inputs_of(name, padding)
    want, want_gradients = results(built(name, "eager"), inputs)
    with trace() as ran:
        got, gradients = results(built(name, "pytransformer"), inputs)
    assert sum(op == "attention_fwd" for op, _ in ran) == RIGHT[name][2]
    assert distance(got, want) < LIMIT
    assert distance(gradients, want_gradients) < LIMIT


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_architectures_are_refused_at_construction(
    hugging_face: Any, name: str
) -> None:
    """They compute attention themselves.

    Some added our masks to scores; others had no class for our name and raised a KeyError.
    """
    model, config = (getattr(hugging_face, n, None) for n in (name, REFUSED[name]))
    if model is None or config is None:
        pytest.skip(f"transformers {hugging_face.__version__} has no {name}")
    if not in_own_code(hugging_face, name):
        pytest.skip(f"{name} of transformers {hugging_face.__version__} is supported, see above")
    message = rf"pytransformer: {name} \(model type '.*; use attn_implementation='eager'"
    # A model that is built has its default size, 24 GB for some.
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        model._from_config(config(), attn_implementation="pytransformer")


def small_bloom(hugging_face: Any, implementation: str | None) -> Any:
    config = hugging_face.BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2)
    return hugging_face.BloomModel._from_config(config, attn_implementation=implementation)


def test_other_implementations_are_unchanged(hugging_face: Any) -> None:
    for implementation in ("eager", None):
        assert small_bloom(hugging_face, implementation).config._attn_implementation == "eager"
    with pytest.raises(
        ValueError,
        match=r"does not support an attention implementation|scaled_dot_product_attention",
    ):
        small_bloom(hugging_face, "sdpa")
    method = hugging_face.PreTrainedModel.get_correct_attn_implementation
    pt.integrations.transformers.register()
    assert hugging_face.PreTrainedModel.get_correct_attn_implementation is method, (
        "registering twice wraps once"
    )


def test_switching_an_unsupported_model_is_refused(hugging_face: Any) -> None:
    model = small_bloom(hugging_face, "eager")
    with pytest.raises(
        ValueError, match=r"BloomModel \(model type 'bloom'\) computes attention in code of its own"
    ):
        pt.integrations.transformers.switch(model)
    assert model.config._attn_implementation == "eager"
    pt.integrations.transformers.switch(model, "eager")


def test_parts_of_a_model_can_stay_eager(hugging_face: Any) -> None:
    """The error's advice works for models with one refused part; each part gets its own masks."""
    text = dict(SMALL, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    config = hugging_face.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    inputs = dict(inputs_of("SplinterModel", "right"), pixel_values=torch.randn(2, 3, 32, 32))

    def logits(implementation: Any) -> tuple[torch.Tensor, int]:
        torch.manual_seed(7)
        model = hugging_face.CLIPModel._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        ).eval()
        with torch.no_grad(), trace() as ran:
            return model(**inputs).logits_per_image, len(ran)

    want, none = logits("eager")
    assert none == 0
    for implementation, calls in (
        ({"text_config": "pytransformer", "vision_config": "eager"}, 2),
        ({"text_config": "eager", "vision_config": "pytransformer"}, 2),
        ("pytransformer", 4),
    ):
        got, ran = logits(implementation)
        assert (ran, distance(got, want) < LIMIT) == (calls, True), implementation


def test_single_compiled_layers_accept_the_mask(hugging_face: Any) -> None:
    """The mask is an input of the compiled graph, with other lengths at every call."""
    want, ours = (
        built("SplinterModel", "eager"),
        copy.deepcopy(built("SplinterModel", "pytransformer")),
    )
    torch._dynamo.reset()
    for layer in ours.encoder.layer:
        layer.compile(backend="aot_eager")
    for length in (11, 7):
        inputs = {k: v[:, :length] for k, v in inputs_of("SplinterModel", "left").items()}
        with torch.no_grad():
            got, exact = (
                m(**inputs).last_hidden_state[inputs["attention_mask"].bool()] for m in (ours, want)
            )
        assert distance(got, exact) < LIMIT


@pytest.mark.parametrize(
    ("name", "function", "fault"),
    [
        ("UMT5ForConditionalGeneration", "attention_mask", lambda *_, **__: None),  # lost causality
        ("DeepseekV32ForCausalLM", "selected", lambda module, mask, *_: mask),  # a dropped keyword
        ("MiniMaxM3VLTextModel", "selected", lambda module, mask, *_: mask),
        ("GptOssForCausalLM", "sinks_of", lambda kwargs: (None, None)),
        (
            "SplinterModel",
            "_mask_terms",
            lambda *_: (None, "top_left", None, None),
        ),  # a misread mask
    ],
)
def test_planted_faults_exceed_the_limit(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, name: str, function: str, fault: Any
) -> None:
    from transformers import AttentionMaskInterface

    from pytransformer.integrations.hugging_face import attention, lowering

    if not hasattr(hugging_face, name):
        pytest.skip(f"transformers {hugging_face.__version__} has no {name}")
    monkeypatch.setattr(attention if hasattr(attention, function) else lowering, function, fault)
    monkeypatch.setitem(
        AttentionMaskInterface._global_mapping, "pytransformer", lowering.attention_mask
    )
    inputs = inputs_of(name, "none")
    want, _ = results(built(name, "eager"), inputs)
    got, _ = results(built(name, "pytransformer"), inputs)
    assert distance(got, want) > 1000 * LIMIT
