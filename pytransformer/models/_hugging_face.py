# SPDX-License-Identifier: Apache-2.0
"""Conversion tables of Hugging Face weights and settings for :mod:`._convert`, without imports."""

from __future__ import annotations

from typing import Any

import torch

from ._convert import TRANSPOSED, Conversion, activation, demand, rules

State = dict[str, torch.Tensor]


def _gpt2(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    if config.get("embd_pdrop") != config.get("resid_pdrop"):
        raise ValueError(
            "GPT has one dropout; the Hugging Face model's embd_pdrop and resid_pdrop differ"
        )
    return dict(
        vocab_size=config["vocab_size"], d_model=config["n_embd"], num_layers=config["n_layer"],
        num_heads=config["n_head"],
        hidden=config.get("n_inner"), activation=activation(config["activation_function"]),
        max_length=config["n_positions"],
        dropout=config["resid_pdrop"], attention_dropout=config["attn_pdrop"],
        eps=config["layer_norm_epsilon"],
        tied=config.get("tie_word_embeddings", True),
    )  # fmt: skip


GPT2 = Conversion(
    _gpt2,
    rules([
        ("embedding.weight", "wte.weight"),
        ("positions.weight", "wpe.weight"),
        ("decoder.blocks.*.mixing.qkv.*", r"h.\1.attn.c_attn.\2", TRANSPOSED),
        ("decoder.blocks.*.mixing.out.*", r"h.\1.attn.c_proj.\2", TRANSPOSED),
        ("decoder.blocks.*.mixing_residual.norm.*", r"h.\1.ln_1.\2"),
        ("decoder.blocks.*.feed_forward.w1.*", r"h.\1.mlp.c_fc.\2", TRANSPOSED),
        ("decoder.blocks.*.feed_forward.w2.*", r"h.\1.mlp.c_proj.\2", TRANSPOSED),
        ("decoder.blocks.*.feed_forward_residual.norm.*", r"h.\1.ln_2.\2"),
        ("decoder.norm.*", r"ln_f.\1"),
        ("head.weight", "lm_head.weight"),
    ]),
    prefix="transformer.",
    ignored=r"lm_head\.weight|h\.\d+\.attn\.(masked_)?bias",
)  # fmt: skip


def _marian(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(config, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    if config["encoder_attention_heads"] != config["decoder_attention_heads"]:
        raise ValueError(
            "Transformer has one num_heads; the Hugging Face model's encoder and decoder differ"
        )
    if config["encoder_ffn_dim"] != config["decoder_ffn_dim"]:
        raise ValueError(
            "Transformer has one hidden; the Hugging Face model's encoder and decoder differ"
        )
    shared = config.get("share_encoder_decoder_embeddings", True)
    return dict(
        vocab_size=config["vocab_size"],
        target_vocab_size=None if shared else config["decoder_vocab_size"],
        d_model=config["d_model"], hidden=config["encoder_ffn_dim"],
        num_heads=config["encoder_attention_heads"],
        num_encoder_layers=config["encoder_layers"], num_decoder_layers=config["decoder_layers"],
        activation=activation(config["activation_function"]), dropout=config["dropout"],
        attention_dropout=config["attention_dropout"],
        activation_dropout=config["activation_dropout"],
        max_length=config["max_position_embeddings"], positions="sinusoidal-halves",
        final_norm=False,
        scale_embeddings=config["scale_embedding"], tied=config.get("tie_word_embeddings", True),
        logits_bias=True,
        start_token_id=config["decoder_start_token_id"], pad_token_id=config["pad_token_id"],
        label_smoothing=0.0,
    )  # fmt: skip


def _marian_rules(side: str, ours: str) -> list[tuple[str, ...]]:
    layer = rf"{side}.layers.\1"
    table = [
        (f"{ours}.blocks.*.mixing.qkv.*", *(rf"{layer}.self_attn.{p}_proj.\2" for p in "qkv")),
        (f"{ours}.blocks.*.mixing.out.*", rf"{layer}.self_attn.out_proj.\2"),
        (f"{ours}.blocks.*.mixing_residual.norm.*", rf"{layer}.self_attn_layer_norm.\2"),
        (f"{ours}.blocks.*.feed_forward.w1.*", rf"{layer}.fc1.\2"),
        (f"{ours}.blocks.*.feed_forward.w2.*", rf"{layer}.fc2.\2"),
        (f"{ours}.blocks.*.feed_forward_residual.norm.*", rf"{layer}.final_layer_norm.\2"),
        (f"{ours}.blocks.*.cross_attention.query.*", rf"{layer}.encoder_attn.q_proj.\2"),
        (
            f"{ours}.blocks.*.cross_attention.key_value.*",
            *(rf"{layer}.encoder_attn.{p}_proj.\2" for p in "kv"),
        ),
        (f"{ours}.blocks.*.cross_attention.out.*", rf"{layer}.encoder_attn.out_proj.\2"),
        (f"{ours}.blocks.*.cross_residual.norm.*", rf"{layer}.encoder_attn_layer_norm.\2"),
    ]
    return table if side == "decoder" else table[:6]


MARIAN = Conversion(
    _marian,
    rules([
        ("source_embedding.weight", "encoder.embed_tokens.weight"),
        ("target_embedding.weight", "decoder.embed_tokens.weight"),
        *_marian_rules("encoder", "encoder"),
        *_marian_rules("decoder", "decoder"),
        ("head.weight", "lm_head.weight"),
        ("head.bias", "final_logits_bias"),
    ]),
    prefix="model.",
    ignored=r"shared\.weight|lm_head\.weight|(en|de)coder\.embed_(tokens|positions)\.weight",
    shared={"encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight"},
)  # fmt: skip


def _t5(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    kind = config.get("feed_forward_proj", "relu")
    name = kind.removeprefix("gated-")
    head = state.get("lm_head.weight")
    return dict(
        vocab_size=config["vocab_size"], d_model=config["d_model"], head_dim=config["d_kv"],
        hidden=config["d_ff"],
        num_layers=config["num_layers"], num_decoder_layers=config["num_decoder_layers"],
        num_heads=config["num_heads"],
        buckets=config["relative_attention_num_buckets"],
        max_distance=config.get("relative_attention_max_distance", 128),
        activation="gelu_tanh" if kind == "gated-gelu" else activation(name),
        gated=kind.startswith("gated-"),
        dropout=config["dropout_rate"], eps=config["layer_norm_epsilon"],
        pad_token_id=config["pad_token_id"],
        start_token_id=config.get("decoder_start_token_id") or config["pad_token_id"],
        tied=head is None or torch.equal(head, state["shared.weight"]),
        scale_outputs=config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)),
    )  # fmt: skip


def _t5_rules(side: str) -> list[tuple[str, ...]]:
    layer, last = rf"{side}.block.\1.layer", 2 if side == "decoder" else 1
    table = [
        (
            f"{side}.blocks.*.mixing.qkv.weight",
            *(f"{layer}.0.SelfAttention.{p}.weight" for p in "qkv"),
        ),
        (f"{side}.blocks.*.mixing.out.weight", f"{layer}.0.SelfAttention.o.weight"),
        (f"{side}.blocks.*.mixing_residual.norm.weight", f"{layer}.0.layer_norm.weight"),
        (f"{side}.blocks.*.feed_forward.gate.weight", f"{layer}.{last}.DenseReluDense.wi_0.weight"),
        # Gated.
        (f"{side}.blocks.*.feed_forward.w1.weight", f"{layer}.{last}.DenseReluDense.wi_1.weight"),
        (f"{side}.blocks.*.feed_forward.w1.weight", f"{layer}.{last}.DenseReluDense.wi.weight"),
        (f"{side}.blocks.*.feed_forward.w2.weight", f"{layer}.{last}.DenseReluDense.wo.weight"),
        (f"{side}.blocks.*.feed_forward_residual.norm.weight", f"{layer}.{last}.layer_norm.weight"),
        (
            f"{side}_bias.table",
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
        (f"{side}.norm.weight", f"{side}.final_layer_norm.weight"),
    ]
    if side == "decoder":
        table += [
            (
                f"{side}.blocks.*.cross_attention.query.weight",
                f"{layer}.1.EncDecAttention.q.weight",
            ),
            (
                f"{side}.blocks.*.cross_attention.key_value.weight",
                *(f"{layer}.1.EncDecAttention.{p}.weight" for p in "kv"),
            ),
            (f"{side}.blocks.*.cross_attention.out.weight", f"{layer}.1.EncDecAttention.o.weight"),
            (f"{side}.blocks.*.cross_residual.norm.weight", f"{layer}.1.layer_norm.weight"),
        ]
    return table


T5 = Conversion(
    _t5,
    rules([
        ("embedding.weight", "shared.weight"),
        *_t5_rules("encoder"),
        *_t5_rules("decoder"),
        ("head.weight", "lm_head.weight"),
    ]),
    ignored=r"lm_head\.weight|(en|de)coder\.embed_tokens\.weight|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_.*",
)  # fmt: skip


_BERT_HEADS = {
    "ForPreTraining": ("mlm", "nsp"),
    "ForMaskedLM": ("mlm",),
    "ForNextSentencePrediction": ("nsp",),
    "ForSequenceClassification": ("classification",),
    "ForTokenClassification": ("tagging",),
    "ForQuestionAnswering": ("answer",),
    "Model": (),
}


def _encoder(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(
        config,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        problem_type=None,
    )
    suffix = next((s for s in _BERT_HEADS if architecture.endswith(s)), None)
    if suffix is None:
        raise ValueError(
            f"no heads here for the Hugging Face class {architecture!r}; there are"
            f" {', '.join(_BERT_HEADS)}"
        )
    labels = state["classifier.weight"].shape[0] if "classifier.weight" in state else 2
    return dict(
        vocab_size=config["vocab_size"], d_model=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        hidden=config["intermediate_size"], activation=activation(config["hidden_act"]),
        num_labels=labels,
        max_length=config["max_position_embeddings"], num_segments=config["type_vocab_size"],
        dropout=config["hidden_dropout_prob"], eps=config["layer_norm_eps"],
        heads=_BERT_HEADS[suffix],
        pooler=any("pooler.dense" in name for name in state),
    )  # fmt: skip


def _bert(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    settings = _encoder(config, state, architecture)
    return settings | dict(
        num_heads=config["num_attention_heads"],
        attention_dropout=config["attention_probs_dropout_prob"],
    )


_LAYER = r"encoder.layer.\1"
_EMBEDDING_RULES = [
    ("embedding.weight", "embeddings.word_embeddings.weight"),
    ("positions.weight", "embeddings.position_embeddings.weight"),
    ("segments.weight", "embeddings.token_type_embeddings.weight"),
    ("embedding_norm.*", r"embeddings.LayerNorm.\1"),
    ("projection.*", r"embeddings.projection.\1"),
    ("encoder.blocks.*.feed_forward.w1.*", rf"{_LAYER}.intermediate.dense.\2"),
    ("encoder.blocks.*.feed_forward.w2.*", rf"{_LAYER}.output.dense.\2"),
    ("encoder.blocks.*.feed_forward_residual.norm.*", rf"{_LAYER}.output.LayerNorm.\2"),
    ("pooler.*", r"pooler.dense.\1"),
    ("mlm.transform.dense.*", r"cls.predictions.transform.dense.\1"),
    ("mlm.transform.norm.*", r"cls.predictions.transform.LayerNorm.\1"),
    ("mlm.output.bias", "cls.predictions.bias"),
    ("nsp.*", r"cls.seq_relationship.\1"),
    ("classifier.*", r"classifier.\1"),
    ("answer.*", r"qa_outputs.\1"),
]
_IGNORED = r"cls\.predictions\.decoder\.(weight|bias)|embeddings\.(position|token_type)_ids"
_RENAMES = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))

BERT = Conversion(
    _bert,
    rules([
        *_EMBEDDING_RULES,
        ("encoder.blocks.*.mixing.qkv.*",
            *(rf"{_LAYER}.attention.self.{p}.\2" for p in ("query", "key", "value"))),
        ("encoder.blocks.*.mixing.out.*", rf"{_LAYER}.attention.output.dense.\2"),
        ("encoder.blocks.*.mixing_residual.norm.*", rf"{_LAYER}.attention.output.LayerNorm.\2"),
    ]),
    prefix="bert.", ignored=_IGNORED, renames=_RENAMES,
)  # fmt: skip
FNET = Conversion(
    _encoder,
    rules([*_EMBEDDING_RULES,
        ("encoder.blocks.*.mixing_residual.norm.*", rf"{_LAYER}.fourier.output.LayerNorm.\2")]),
    prefix="fnet.", ignored=_IGNORED, renames=_RENAMES,
)  # fmt: skip


def _vit(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(config, pooler_act="tanh", pooler_output_size=config["hidden_size"], problem_type=None)
    return dict(
        image_size=size if isinstance(size := config["image_size"], int) else tuple(size),
        patch_size=config["patch_size"], channels=config["num_channels"],
        d_model=config["hidden_size"], num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        hidden=config["intermediate_size"], activation=activation(config["hidden_act"]),
        dropout=config["hidden_dropout_prob"],
        attention_dropout=config["attention_probs_dropout_prob"], qkv_bias=config["qkv_bias"],
        eps=config["layer_norm_eps"],
        pooler=any("pooler.dense" in name for name in state),
        num_labels=state["classifier.weight"].shape[0] if "classifier.weight" in state else 0,
    )  # fmt: skip


VIT = Conversion(
    _vit,
    rules([
        ("cls_token", "embeddings.cls_token"),
        ("positions.weight", "embeddings.position_embeddings"),
        ("patches.projection.*", r"embeddings.patch_embeddings.projection.\1"),
        ("encoder.blocks.*.mixing.qkv.*", *(rf"layers.\1.attention.{p}_proj.\2" for p in "qkv")),
        ("encoder.blocks.*.mixing.out.*", r"layers.\1.attention.o_proj.\2"),
        ("encoder.blocks.*.mixing_residual.norm.*", r"layers.\1.layernorm_before.\2"),
        ("encoder.blocks.*.feed_forward.w1.*", r"layers.\1.mlp.fc1.\2"),
        ("encoder.blocks.*.feed_forward.w2.*", r"layers.\1.mlp.fc2.\2"),
        ("encoder.blocks.*.feed_forward_residual.norm.*", r"layers.\1.layernorm_after.\2"),
        ("encoder.norm.*", r"layernorm.\1"),
        ("pooler.*", r"pooler.dense.\1"),
        ("head.*", r"classifier.\1"),
    ]),
    prefix="vit.",
    renames=(
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.attention\.(query|key|value)\.", lambda m: f".attention.{m[1][0]}_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"^(layers\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    ),
)  # fmt: skip
