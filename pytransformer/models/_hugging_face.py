"""Where the weights and settings of Hugging Face's models go: tables for :mod:`._convert`. Nothing of theirs is imported."""

from __future__ import annotations

from typing import Any

import torch

from ._convert import TRANSPOSED, Conversion, activation, demand, rules

State = dict[str, torch.Tensor]

# ---- GPT-2


def _gpt2(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    if config.get("embd_pdrop") != config.get("resid_pdrop"):
        raise ValueError("GPT has one dropout; the Hugging Face model's embd_pdrop and resid_pdrop differ")
    return dict(
        vocab_size=config["vocab_size"], d_model=config["n_embd"], num_layers=config["n_layer"], num_heads=config["n_head"],
        hidden=config.get("n_inner"), activation=activation(config["activation_function"]), max_length=config["n_positions"],
        dropout=config["resid_pdrop"], attention_dropout=config["attn_pdrop"], eps=config["layer_norm_epsilon"],
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

# ---- Marian


def _marian(config: dict[str, Any], state: State, architecture: str) -> dict[str, Any]:
    demand(config, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
    if config["encoder_attention_heads"] != config["decoder_attention_heads"]:
        raise ValueError("Transformer has one num_heads; the Hugging Face model's encoder and decoder differ")
    if config["encoder_ffn_dim"] != config["decoder_ffn_dim"]:
        raise ValueError("Transformer has one hidden; the Hugging Face model's encoder and decoder differ")
    shared = config.get("share_encoder_decoder_embeddings", True)
    return dict(
        vocab_size=config["vocab_size"], target_vocab_size=None if shared else config["decoder_vocab_size"],
        d_model=config["d_model"], hidden=config["encoder_ffn_dim"], num_heads=config["encoder_attention_heads"],
        num_encoder_layers=config["encoder_layers"], num_decoder_layers=config["decoder_layers"],
        activation=activation(config["activation_function"]), dropout=config["dropout"],
        attention_dropout=config["attention_dropout"], activation_dropout=config["activation_dropout"],
        max_length=config["max_position_embeddings"], positions="sinusoidal-halves", final_norm=False,
        scale_embeddings=config["scale_embedding"], tied=config.get("tie_word_embeddings", True), logits_bias=True,
        start_token_id=config["decoder_start_token_id"], pad_token_id=config["pad_token_id"], label_smoothing=0.0,
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
        (f"{ours}.blocks.*.cross_attention.key_value.*", *(rf"{layer}.encoder_attn.{p}_proj.\2" for p in "kv")),
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
    shared={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
)  # fmt: skip
