# SPDX-License-Identifier: Apache-2.0
"""Exceptions to the rules of :mod:`.inputs` by model type: non-text inputs of ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(5))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 40, (3, length), generator=torch.Generator().manual_seed(5))


def time_series(model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    past, features = config.context_length + max(config.lags_sequence), config.num_time_features
    return {
        "past_values": noise(past), "past_observed_mask": torch.ones(3, past),
        "past_time_features": noise(past, features),
        "future_values": noise(config.prediction_length),
        "future_time_features": noise(config.prediction_length, features),
    }  # fmt: skip


def grid() -> torch.Tensor:
    """Return (3, 16, 2): the positions of the patches of a 4 x 4 image."""
    return torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, 16, 2)


def numbered_patches(model: Any) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": noise(16, 192), "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * 3),
    }  # fmt: skip


# By model type, in addition to the text inputs of `forward`.
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lxmert": lambda model: {"visual_feats": noise(5, model.config.visual_feat_dim),
        "visual_pos": noise(5, 4)},
    "visual_bert": lambda model: {
        "visual_embeds": noise(5, model.config.visual_embedding_dim),
        "visual_attention_mask": torch.ones(3, 5),
        "visual_token_type_ids": torch.ones(3, 5, dtype=torch.long),
    },
    "blip_2_qformer": lambda model: {"query_embeds": noise(5, 64),
        "encoder_hidden_states": noise(7, model.config.encoder_hidden_size)},
    "instructblip": lambda model: {"qformer_input_ids": tokens(6),
        "pixel_values": noise(3, 32, 32)},
    "instructblipvideo": lambda model: {"qformer_input_ids": tokens(6),
        "pixel_values": noise(2, 3, 32, 32)},
    "siglip2": numbered_patches,
    "siglip2_vision_model": numbered_patches,
    "gemma4_vision": lambda model: {"pixel_values": noise(16, 192), "pixel_position_ids": grid()},
    "gemma4_audio": lambda model: {"input_features": noise(64, 16)},
    "gemma3n_audio": lambda model: {
        "audio_mel": noise(64, model.config.input_feat_size),
        "audio_mel_mask": torch.zeros(3, 64, dtype=torch.bool),
    },
    "granite_speech5_encoder": lambda model: {"input_features": noise(16, 32)},
    "granite_speech5_ctc": lambda model: {"input_features": noise(16, 32)},
    "dia": lambda model: {
        "decoder_input_ids": torch.stack(
            [tokens(7)] * model.config.decoder_config.num_channels, -1),
    },
    "florence_vision": lambda model: {"hidden_states": noise(3, 32, 32)},
    "fun_asr_nano_encoder": lambda model: {"input_features": noise(16, 56),
        "input_features_mask": torch.ones(3, 16)},
    "inkling_audio": lambda model: {"audio_input_ids": tokens(8 * model.config.n_mel_bins).view(3,
        8, -1)},
    "inkling2_vision": lambda model: {
        "pixel_values": noise(4 * 16 * 16 * 3).view(12, 16, 16, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 3),
    },
    "pocket_tts_audio_tokenizer_decoder": lambda model: {"latents": noise(64, 8)},
    "qwen2_5_omni_bigvgan": lambda model: {"mel_spectrogram": noise(64, 16)},
    "kyutai_speech_to_text": lambda model: {
        "input_ids": torch.stack([tokens(11)] * (model.config.num_codebooks + 1), -1),
    },
    **{
        name: lambda model: {"pixel_values": noise(8, 128).view(1, 3, 8, 128),
            "target_sizes": torch.tensor([[4, 4]])}
        for name in ("minicpm_ocr_vision", "minicpmv4_7_vision")
    },
    "molmo2_vision": lambda model: {"pixel_values": noise(16, 192)},
    "molmo2_adapter": lambda model: {
        "image_features": noise(16, 128), "pooled_patches_idx": torch.arange(48).view(12, 4),
    },
    "phi4_multimodal_audio": lambda model: {"hidden_states": noise(32, 80),
        "mask": torch.ones(3, 32, dtype=torch.bool)},
    "pi0": lambda model: {
        "state": noise(model.config.max_state_dim), "noise": noise(8, model.config.max_action_dim),
        "timestep": torch.full((3,), 0.5),
        "pixel_values": noise(1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(3, 1, dtype=torch.bool),
    },
    "pix2struct": lambda model: {"flattened_patches": torch.cat([grid() + 1, noise(16, 64)], -1)},
    "rag": lambda model: {
        "context_input_ids": tokens(6).repeat(2, 1),
        "context_attention_mask": torch.ones(6, 6, dtype=torch.long),
        "doc_scores": noise(2), "n_docs": 2,
    },
    "muse_glimmer_assistant": lambda model: {
        "noise_embeds": noise(8, 64), "context_hidden_states": noise(11, 320),
        "attention_mask": torch.ones(3, 19),
    },
    "xcodec": lambda model: {"input_values": noise(1, 1600)},
    **{name: lambda model: {"input_values": noise(1, 9600)} for name in ("pe_audio",
        "pe_audio_encoder")},
    **{
        name: lambda model: {"input_values": noise(1, 3200), "input_features": noise(10, 80)}
        for name in ("neucodec", "xcodec2")
    },
    **{
        name: lambda model: {"input_values": noise(1, 6400)}
        for name in ("vibevoice_acoustic_tokenizer", "vibevoice_asr")
    },
    "vibevoice_acoustic_tokenizer_encoder": lambda model: {"hidden_states": noise(1, 6400)},
    "qwen3_asr_encoder": lambda model: {
        "input_features": noise(8, 100),
        "input_features_mask": torch.ones(3, 100, dtype=torch.long),
    },
    **{
        name: lambda model: {"input_ids": None, "inputs_embeds": noise(11, 64)}
        for name in ("qwen3_omni_moe_talker_code_predictor", "qwen3_omni_moe_talker_text")
    },
    "vibevoice_acoustic_tokenizer_decoder": lambda model: {"hidden_states": noise(64, 4)},
    **{name: lambda model: {"pixel_values": noise(2, 3, 64, 64)} for name in ("lightglue",
        "efficientloftr")},
    **{
        name: lambda model: {"pixel_values": noise(3, 48, 160)}
        for name in ("pp_ocrv5_server_rec", "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec")
    },
    "pp_ocrv5_mobile_rec": lambda model: {"pixel_values": noise(3, 96, 160)},
    "muse_spark_audio": lambda model: {"input_values": noise(1920)},
    "mimi_decoder": lambda model: {"latents": noise(64, 8)},
    "depth_pro": lambda model: {"pixel_values": noise(3, 128, 128)},
    "voxtral_realtime": lambda model: {"input_features": noise(8, 88)},
    "blt": lambda model: {"use_cache": False},
    "clap_audio_model": lambda model: {"input_features": noise(1, 256, 16)},
    "clap": lambda model: {"input_features": noise(1, 256, 16)},
    "jev": lambda model: {
        "marks": torch.tensor([[4, 8]] * 3), "num_options": torch.tensor([[2, 2]] * 3),
        "question_type_ids": torch.tensor([[0, 0]] * 3),
    },
    "dots3_note_audio_encoder": lambda model: {"input_features": noise(64, 64),
        "chunk_sample_lengths": torch.full((3,), 64 * 160)},
    "sam2": lambda model: {
        "pixel_values": noise(3, 64, 64), "input_points": noise(1, 2, 2),
        "input_labels": torch.ones(3, 1, 2, dtype=torch.long),
    },
    "idefics": lambda model: {"pixel_values": noise(1, 3, 32, 32),
        "image_attention_mask": torch.ones(3, 11, 1)},
    "kosmos-2": lambda model: {
        "pixel_values": noise(3, 32, 32),
        "image_embeds_position_mask": (torch.arange(11) < 4).expand(3, 11),
    },
    "mllama_vision_model": lambda model: {
        "pixel_values": noise(1, 4, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(3, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(3, 1, 4, dtype=torch.long),
    },
    "pix2struct_vision_model": lambda model: {"flattened_patches": torch.cat([grid() + 1,
        noise(16, 64)], -1)},
    "timesfm": lambda model: {
        "past_values": noise(64), "past_values_padding": torch.zeros(3, 64),
        "freq": torch.zeros(3, 1, dtype=torch.long),
    },
    "wav2vec2-bert": lambda model: {"input_features": noise(32, 80)},
    "sam": lambda model: {"pixel_values": noise(3, 64, 64), "input_points": noise(1, 2, 2)},
    "autoformer": time_series,
    "informer": time_series,
    "time_series_transformer": time_series,
    "decision_transformer": lambda model: {
        "states": noise(5, model.config.state_dim), "actions": noise(5, model.config.act_dim),
        "rewards": noise(5, 1),
        "returns_to_go": noise(5, 1), "timesteps": torch.arange(5).expand(3, 5),
    },
}  # fmt: skip
