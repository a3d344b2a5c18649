# SPDX-License-Identifier: Apache-2.0
"""Small models of diffusers: settings and inputs, one for each kind of attention code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .inputs import Inputs, generator

BATCH = 2


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(BATCH, *shape, generator=generator())


def steps() -> torch.Tensor:
    return torch.tensor([3, 7])


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 8, (*shape, 3), generator=generator()).float()


BLOCKS = {
    "layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8,
    "attention_head_dim": 8,
}  # fmt: skip
TRANSFORMER = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
IMAGE: Callable[[], torch.Tensor] = lambda: noise(4, 8, 8)

MODELS: dict[str, tuple[dict[str, Any], Callable[[], Inputs]]] = {
    "UNet2DConditionModel": (
        {
            **BLOCKS, "sample_size": 8, "in_channels": 4, "out_channels": 4,
            "cross_attention_dim": 24,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        lambda: {
            "sample": IMAGE(), "timestep": steps(), "encoder_hidden_states": noise(5, 24),
            "encoder_attention_mask": torch.arange(5) < torch.tensor([[5], [3]]),
        },
    ),
    "UNet2DModel": (
        {
            **BLOCKS, "sample_size": 8, "in_channels": 4, "out_channels": 4,
            "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
        },
        lambda: {"sample": IMAGE(), "timestep": steps()},
    ),
    "AutoencoderKL": (
        {
            "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8,
            "latent_channels": 4,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda: {"sample": noise(3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {**TRANSFORMER, "in_channels": 4, "sample_size": 8, "patch_size": 2, "norm_num_groups": 4,
            "num_embeds_ada_norm": 10},
        lambda: {"hidden_states": IMAGE(), "timestep": steps(),
            "class_labels": torch.tensor([1, 2])},
    ),
    "PixArtTransformer2DModel": (
        {
            **TRANSFORMER, "in_channels": 4, "out_channels": 8, "sample_size": 8, "patch_size": 2,
            "cross_attention_dim": 32,
            "caption_channels": 24, "norm_num_groups": 4, "num_embeds_ada_norm": 10,
            "use_additional_conditions": False,
        },
        lambda: {
            "hidden_states": IMAGE(), "timestep": steps(), "encoder_hidden_states": noise(5, 24),
            "encoder_attention_mask": (torch.arange(5) < torch.tensor([[5], [3]])).long(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            **TRANSFORMER, "sample_size": 8, "patch_size": 2, "in_channels": 4,
            "joint_attention_dim": 24, "caption_projection_dim": 32,
            "pooled_projection_dim": 16, "out_channels": 4, "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        lambda: {
            "hidden_states": IMAGE(), "timestep": steps(), "encoder_hidden_states": noise(5, 24),
            "pooled_projections": noise(16),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 24, "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": noise(16, 4), "timestep": steps() / 10,
            "encoder_hidden_states": noise(5, 24),
            "pooled_projections": noise(16), "img_ids": ids(16), "txt_ids": ids(5),
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24,
            "caption_projection_dim": 32,
            "out_channels": 4, "pos_embed_max_size": 64,
        },
        lambda: {"hidden_states": IMAGE(), "timestep": steps() / 10,
            "encoder_hidden_states": noise(5, 24)},
    ),
    "CogVideoXTransformer3DModel": (
        {
            **TRANSFORMER, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
            "text_embed_dim": 24, "sample_width": 8,
            "sample_height": 8, "sample_frames": 5, "patch_size": 2,
            "temporal_compression_ratio": 4, "max_text_seq_length": 5,
        },
        lambda: {"hidden_states": noise(2, 4, 8, 8), "timestep": steps(),
            "encoder_hidden_states": noise(5, 24)},
    ),
    "LatteTransformer3DModel": (
        {
            **TRANSFORMER, "in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2,
            "video_length": 2,
            "cross_attention_dim": 32, "caption_channels": 24,
        },
        lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": steps(),
            "encoder_hidden_states": noise(5, 24)},
    ),
    "SanaTransformer2DModel": (
        {
            **TRANSFORMER, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32, "caption_channels": 24, "sample_size": 8, "patch_size": 1,
        },
        lambda: {
            "hidden_states": IMAGE(), "timestep": steps(), "encoder_hidden_states": noise(5, 24),
            "encoder_attention_mask": (torch.arange(5) < torch.tensor([[5], [3]])).long(),
        },
    ),
    "PriorTransformer": (
        {**TRANSFORMER, "embedding_dim": 24, "num_embeddings": 5, "additional_embeddings": 4},
        lambda: {
            "hidden_states": noise(24), "timestep": steps(), "proj_embedding": noise(24),
            "encoder_hidden_states": noise(5, 24),
            "attention_mask": torch.arange(5) < torch.tensor([[5], [3]]),
        },
    ),
    "StableAudioDiTModel": (
        {
            **TRANSFORMER, "sample_size": 16, "in_channels": 4, "num_key_value_attention_heads": 1,
            "out_channels": 4,
            "cross_attention_dim": 24, "cross_attention_input_dim": 24,
            "global_states_input_dim": 24, "time_proj_dim": 16,
        },
        lambda: {
            "hidden_states": noise(4, 16), "timestep": steps().float(),
            "encoder_hidden_states": noise(5, 24),
            "global_hidden_states": noise(1, 24),
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16,
            "in_channels": 4, "out_channels": 4,
            "text_dim": 24, "freq_dim": 16, "ffn_dim": 48, "num_layers": 2, "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "rope_max_seq_len": 16,
        },
        lambda: {"hidden_states": noise(4, 2, 8, 8), "timestep": steps(),
            "encoder_hidden_states": noise(5, 24)},
    ),
}  # fmt: skip
