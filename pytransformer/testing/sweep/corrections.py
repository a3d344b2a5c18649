# SPDX-License-Identifier: Apache-2.0
"""What the general rules of :mod:`.configs` and :mod:`.inputs` get wrong, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def resnet() -> Any:
    """A backbone that needs no other library."""
    from transformers import ResNetConfig

    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"])


def with_resnet() -> dict[str, Any]:
    return {"backbone_config": resnet(), "use_timm_backbone": False, "backbone": None}


# Which class to try where the first one wants what is no mere input.
CLASSES = {
    "splinter": "SplinterModel",
    "videomae": "VideoMAEModel",
    "hiera": "HieraModel",
}

SHIFTED_WINDOWS = {  # windows smaller than the grid of patches, which the next stage halves
    "patch_size": 2,
    "embed_dim": 16,
    "window_size": 2,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "pretrained_window_sizes": [0, 0],
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}

# By field; "default" makes the arguments of the config that the tiny one is shrunk from.
FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"default": with_resnet} for name in ("detr", "conditional_detr", "deformable_detr", "table-transformer")},
    "dab-detr": {"default": with_resnet, "query_dim": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2_moe": {"rope_parameters": DEFAULT_ROPE, "layer_types": ["conv", "full_attention"]},
    "deepseek_ocr2_text": {"rope_parameters": DEFAULT_ROPE, "mlp_layer_types": ["dense", "sparse"]},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "longcat_flash": {"qk_head_dim": 32},
    "paddleocr_vl_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [3, 3, 2]}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE}},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "mistral_large4_text": {"default": lambda: {"num_hidden_layers": 2}},
    "step3p5": {"sliding_window": 4},
    "minimax_m3_vl_text": {  # a sparse layer after a full one, which the default config has not
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "chameleon": {"vocabulary_map": {"<image>": 41}},
    "emu3": {"vocabulary_map": {"<image>": 41, "<|extra_200|>": 42}},
    **{name: {"base_channels": 32} for name in ("chameleon_vqgan", "emu3_vqgan", "janus_vqgan")},
    **{name: {"image_token_index": 41} for name in ("blip-2", "instructblip")},
    "instructblipvideo": {"video_token_index": 41},
    **{name: {"num_codebooks": 1} for name in ("musicgen_decoder", "musicgen_melody_decoder")},
    "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds": False},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "kosmos-2": {"latent_query_num": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "llama4_vision_model": {"intermediate_size": 256, "vision_output_dim": 64},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "esm": {"vocab_size": 64, "mask_token_id": 40, "pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **{name: {"prediction_length": 4, "context_length": 12} for name in ("autoformer", "informer", "time_series_transformer")},
    "zaya": {"num_experts_per_tok": 1},
    "bit": {"num_groups": 8, "embedding_size": 32},
    "audio-spectrogram-transformer": {"max_length": 64},
    "gemma3n_text": {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.95, 0.95], "num_kv_shared_layers": 0},
    **{name: {"num_kv_shared_layers": 0} for name in ("gemma4_text", "gemma4_unified_text")},
    "diffusion_gemma_text": {"num_kv_shared_layers": 0, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma2": {"attn_logit_softcapping": 3.0},  # 50 changes nothing of such small scores
    "lilt": {"hidden_size": 96},
    "clvp_encoder": {"hidden_size": 128, "projection_dim": 128},
    "granite_speech5_encoder": {"context_size": 8},
    "esmc": {"num_key_value_heads": 4},
    **dict.fromkeys(("swin", "swinv2"), SHIFTED_WINDOWS),
    "vitpose_backbone": {"num_experts": 1},
    "mimi": {"upsample_groups": 64, "num_filters": 8, "vector_quantization_hidden_dimension": 64},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "wav2vec2-bert": {"vocab_size": 64, "feature_projection_input_dim": 80},
    "xclip_vision_model": {"num_frames": 3},  # the batch, which is one video then
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "perceiver": {"d_latents": 64, "num_self_attends_per_block": 2},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    **{name: {"swa_num_key_value_heads": 2} for name in ("inkling_text", "inkling2_text")},
    "yolos": {"image_size": [32, 32], "num_detection_tokens": 5},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0},
    **{
        name: {"window_size": 32}
        for name in ("qwen2_5_vl", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "exaone4_5_vision")
    },
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(5))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 40, (3, length), generator=torch.Generator().manual_seed(5))


def time_series(model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    past, features = config.context_length + max(config.lags_sequence), config.num_time_features
    return {
        "past_values": noise(past), "past_observed_mask": torch.ones(3, past), "past_time_features": noise(past, features),
        "future_values": noise(config.prediction_length), "future_time_features": noise(config.prediction_length, features),
    }  # fmt: skip


def grid() -> torch.Tensor:
    """(3, 16, 2): where the patches of a 4 x 4 image stand."""
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, 16, 2)


def numbered_patches(model: Any) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": noise(16, 192), "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 3),
    }  # fmt: skip


# By model type; beside what `forward` takes of text.
INPUTS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "lxmert": lambda model: {"visual_feats": noise(5, model.config.visual_feat_dim), "visual_pos": noise(5, 4)},
    "visual_bert": lambda model: {
        "visual_embeds": noise(5, model.config.visual_embedding_dim), "visual_attention_mask": torch.ones(3, 5),
        "visual_token_type_ids": torch.ones(3, 5, dtype=torch.long),
    },
    "blip_2_qformer": lambda model: {"query_embeds": noise(5, 64), "encoder_hidden_states": noise(7, model.config.encoder_hidden_size)},
    "instructblip": lambda model: {"qformer_input_ids": tokens(6), "pixel_values": noise(3, 32, 32)},
    "instructblipvideo": lambda model: {"qformer_input_ids": tokens(6), "pixel_values": noise(2, 3, 32, 32)},
    "siglip2": numbered_patches,
    "siglip2_vision_model": numbered_patches,
    "gemma4_vision": lambda model: {"pixel_values": noise(16, 192), "pixel_position_ids": grid()},
    "gemma4_audio": lambda model: {"input_features": noise(64, 16)},
    "gemma3n_audio": lambda model: {
        "audio_mel": noise(64, model.config.input_feat_size), "audio_mel_mask": torch.zeros(3, 64, dtype=torch.bool),
    },
    "granite_speech5_encoder": lambda model: {"input_features": noise(16, 32)},
    "granite_speech5_ctc": lambda model: {"input_features": noise(16, 32)},
    "idefics": lambda model: {"pixel_values": noise(1, 3, 32, 32), "image_attention_mask": torch.ones(3, 11, 1)},
    "kosmos-2": lambda model: {
        "pixel_values": noise(3, 32, 32), "image_embeds_position_mask": (torch.arange(11) < 4).expand(3, 11),
    },
    "mllama_vision_model": lambda model: {
        "pixel_values": noise(1, 4, 3, 32, 32), "aspect_ratio_ids": torch.ones(3, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(3, 1, 4, dtype=torch.long),
    },
    "pix2struct_vision_model": lambda model: {"flattened_patches": torch.cat([grid() + 1, noise(16, 64)], -1)},
    "timesfm": lambda model: {
        "past_values": noise(64), "past_values_padding": torch.zeros(3, 64), "freq": torch.zeros(3, 1, dtype=torch.long),
    },
    "wav2vec2-bert": lambda model: {"input_features": noise(32, 80)},
    "sam": lambda model: {"pixel_values": noise(3, 64, 64), "input_points": noise(1, 2, 2)},
    "autoformer": time_series,
    "informer": time_series,
    "time_series_transformer": time_series,
    "decision_transformer": lambda model: {
        "states": noise(5, model.config.state_dim), "actions": noise(5, model.config.act_dim), "rewards": noise(5, 1),
        "returns_to_go": noise(5, 1), "timesteps": torch.arange(5).expand(3, 5),
    },
}  # fmt: skip
