# SPDX-License-Identifier: Apache-2.0
"""A tiny config of any model type: sizes replaced according to the fields' names."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .corrections import FIELDS, KEPT

WIDTH, HEADS, VOCABULARY, IMAGE, PATCH = 64, 4, 64, 32, 8
PAD, BOS, EOS = 0, 1, 2
TEXT_IDS = (3, 40)  # ordinary tokens; special ones of a modality come after

# The first pattern that matches a field's full name gives the value of an integer field.
SIZES: tuple[tuple[str, int], ...] = (
    (r"pad_token_id", PAD),
    (r"bos_token_id", BOS),
    (r"eos_token_id|decoder_start_token_id|sep_token_id", EOS),
    (r"(image|img|im|boi)_(token_id|token_index|patch_token_id|placeholder.*)|media_token_id", 41),
    (r"video_(token_id|token_index)", 42),
    (r"(audio|speech)_(token_id|token_index)", 43),
    (r"(vision|image|boi|img)_(start|begin)_token_(id|index)", 44),
    (r"(vision|image|eoi|img)_end_token_(id|index)", 45),
    (r".*(token_id|token_index)", 46),
    (r"(.*_)?vocab(ulary)?_size(_.*)?|num_embeddings|codebook_size", VOCABULARY),
    (r"type_vocab_size", 2),
    (r"num_key_value_heads|num_kv_heads|n_head_kv|num_key_value_attention_heads"
     r"|(mamba_)?n?_?groups", 2),
    (r"rotary_dim", 8),
    (r"(.*_)?(num|n)_(attention_|self_attention_|cross_attention_)?heads?|.*attention_heads"
     r"|nhead|(.*_)?num_heads", HEADS),
    (r"(.*_)?(head_dim|kv_channels|attention_head_size|d_kv|attention_head_dim|d_head"
     r"|query_pre_attn_scalar)", WIDTH // HEADS),
    (r"(.*_)?intermediate_size|.*ffn_dim|d_ff|n_inner|(.*_)?mlp_dim|dim_feedforward"
     r"|feed_forward_size|.*ffn_(hidden_)?size", 96),
    (r"q_lora_rank|kv_lora_rank", 16),
    (r"index_topk", 4),
    (r"num_.*_per_tok|moe_topk|moe_top_k|top_k|moe_k|num_selected_experts", 2),
    (r"(num|n)_(routed_|local_)?experts|moe_num_experts", 4),
    (r"n_group|topk_group|(n|num)_shared_experts|first_k_dense_replace|num_dense_layers"
     r"|num_zero_experts", 1),
    (r"(.*_)?(num|n)_.*hidden_layers|num_layers|n_layers?|(.*_)?(encoder|decoder)_layers|depth"
     r"|num_blocks|.*num_layers|num_(encoder|decoder|hidden|block)_?(layers|blocks)|(.*_)?depth"
     r"|num_.*_layers", 2),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|hidden_dim"
     r"|model_dim|projection_dim|dim|hidden_channels|proj_dim|feature_size|out_hidden_size"
     r"|output_dim|projector_hidden_size|hid_dim)", WIDTH),
    (r"max_position_embeddings|n_positions|max_.*_positions|seq_length|context_length|max_seq_len"
     r"|max_sequence_length", 64),
    (r"image_size|img_size|input_image_size", IMAGE),
    (r"patch_size", PATCH),
    (r"sliding_window|.*window_size", 4),
    (r"num_queries|num_query_tokens|num_latents|.*_chunk_size|chunk_size", 8),
    (r"num_mel_bins|num_frames", 8),
)  # fmt: skip
RULES = tuple((re.compile(pattern), value) for pattern, value in SIZES)


def size(name: str, default: Any) -> Any:
    """Return the tiny value of the field called `name`."""
    if isinstance(default, bool) or not isinstance(default, int):
        return default
    return next((value for rule, value in RULES if rule.fullmatch(name)), default)


def layers(default: Any) -> dict[str, Any]:
    """Return each kind of layer once, at least two layers, if the config lists layers by kind."""
    given: dict[str, Any] = {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = read(default, name)
        if isinstance(kinds, (list, tuple)) and kinds:
            given[name] = list(dict.fromkeys(kinds))
    count = max([2, *(len(kinds) for kinds in given.values())])
    for name, kinds in given.items():
        given[name] = (kinds * count)[:count]
    if given:
        given["num_hidden_layers"] = count
    return given


def numbers(name: str, default: list[int]) -> list[int]:
    """Return a list of sizes, such as those of stages, with its original length."""
    if re.search(r"depths|layers|num_blocks", name):
        return [min(n, 2) for n in default]
    if re.search(r"heads", name):
        return [HEADS] * len(default)
    if re.search(r"hidden_sizes|channels|dims|embed_dim|hidden_size|conv_dim|widths", name):
        small = [16 * 2 ** min(i, 2) if len(set(default)) > 1 else 32 for i in range(len(default))]
        # A first stage that starts from color channels.
        return [3, *small[1:]] if default[0] == 3 else small
    return default


def tiny(config_class: Any, default: Any = None, **more: Any) -> Any:
    """Return a tiny `config_class`, nested configs included; `default` has a real model's sizes."""
    model_type = config_class.model_type
    corrected = {
        name: value() if callable(value) else value
        for name, value in FIELDS.get(model_type, {}).items()
    }
    made = corrected.pop("default", {})
    if default is None:
        default = config_class(**made)
    if model_type in KEPT:
        return default
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = field.name
        value = read(default, name)
        if isinstance(value, PretrainedConfig()):
            given[name] = tiny(type(value), value)
        elif isinstance(value, (list, tuple)) and value and all(type(n) is int for n in value):
            given[name] = numbers(name, list(value))
        elif (small := size(name, value)) is not value:
            given[name] = small
    if given.get("num_key_value_heads") and read(default, "num_key_value_heads") == read(
        default, "num_attention_heads"
    ):
        given["num_key_value_heads"] = given["num_attention_heads"]
    if (rope := read(default, "rope_parameters")) is not None:
        given["rope_parameters"] = rotary(
            rope, "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ())
        )
    given |= {
        name: value for name, value in layers(default).items() if name in fields(config_class)
    }
    return config_class(**given | corrected | more)


def read(config: Any, name: str) -> Any:
    """Return a field's stored value; getattr refuses fields that differ by layer."""
    return vars(config).get(name)


def fields(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def PretrainedConfig() -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig


def rotary(parameters: Any, sections: bool = False) -> Any:
    """Return rotary settings for tiny heads.

    Multimodal `sections` sum to half of the rotated size.
    """
    if not isinstance(parameters, dict) or not parameters:
        return parameters
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {name: rotary(value, sections) for name, value in parameters.items()}
    if not sections and "mrope_section" not in parameters:
        return parameters
    half = int(WIDTH // HEADS * (parameters.get("partial_rotary_factor") or 1)) // 2
    return {**parameters, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}
