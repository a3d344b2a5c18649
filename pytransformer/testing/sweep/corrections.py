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
CLASSES = {"splinter": "SplinterModel"}

# By field; "default" makes the arguments of the config that the tiny one is shrunk from.
FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"default": with_resnet} for name in ("detr", "conditional_detr", "deformable_detr", "table-transformer")},
    "dab-detr": {"default": with_resnet, "query_dim": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{name: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}} for name in ("lfm2_moe", "deepseek_ocr2_text")},
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
    "gemma3n_text": {"default": lambda: {"num_hidden_layers": 2, "intermediate_size": 96}, "num_kv_shared_layers": 0},
    **{name: {"num_kv_shared_layers": 0} for name in ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text")},
    "gemma2": {"attn_logit_softcapping": 3.0},  # 50 changes nothing of such small scores
    "lilt": {"hidden_size": 96},
    "clvp_encoder": {"hidden_size": 128, "projection_dim": 128},
    "granite_speech5_encoder": {"context_size": 8},
    "esmc": {"num_key_value_heads": 4},
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


# By model type; beside what `forward` takes of text.
INPUTS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "lxmert": lambda model: {"visual_feats": noise(5, model.config.visual_feat_dim), "visual_pos": noise(5, 4)},
    "visual_bert": lambda model: {
        "visual_embeds": noise(5, model.config.visual_embedding_dim), "visual_attention_mask": torch.ones(3, 5),
        "visual_token_type_ids": torch.ones(3, 5, dtype=torch.long),
    },
    "blip_2_qformer": lambda model: {"query_embeds": noise(5, 64), "encoder_hidden_states": noise(7, model.config.encoder_hidden_size)},
    "instructblip": lambda model: {"qformer_input_ids": tokens(6), "pixel_values": noise(3, 32, 32)},
    "sam": lambda model: {"pixel_values": noise(3, 64, 64), "input_points": noise(1, 2, 2)},
    "autoformer": time_series,
    "informer": time_series,
    "time_series_transformer": time_series,
    "decision_transformer": lambda model: {
        "states": noise(5, model.config.state_dim), "actions": noise(5, model.config.act_dim), "rewards": noise(5, 1),
        "returns_to_go": noise(5, 1), "timesteps": torch.arange(5).expand(3, 5),
    },
}  # fmt: skip
