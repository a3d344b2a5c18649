# SPDX-License-Identifier: Apache-2.0
"""Exceptions to the rules of :mod:`.configs` by model type: classes, and fields of tiny configs."""

from __future__ import annotations

from typing import Any


def resnet() -> Any:
    """Return a backbone that needs no other library."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )


def with_resnet() -> dict[str, Any]:
    return {"backbone_config": resnet(), "use_timm_backbone": False, "backbone": None}


# The class to test if the first one needs more than inputs.
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

# Unchanged configs: convolutions with dependent sizes (at most 15 million parameters), and models
# without a size.
KEPT = frozenset({
    "pp_lcnet_v4", "pp_ocrv5_mobile_det", "pp_ocrv5_mobile_rec", "pp_ocrv6_small_det",
    "pp_ocrv6_small_rec", "pp_ocrv6_tiny_rec",
    "superpoint", "textnet", "univnet", "uvdoc", "lightglue",
})  # fmt: skip


def swin() -> Any:
    from transformers import SwinConfig

    return SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 4, 4],
        window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def rt_detr_resnet() -> Any:
    from transformers import RTDetrResNetConfig

    return RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=STAGES,
    )


def hgnet() -> Any:
    from transformers import HGNetV2Config

    return HGNetV2Config(**HGNET, out_features=STAGES)


def hgnet_from_the_first_stage() -> Any:
    from transformers import HGNetV2Config

    return HGNetV2Config(**HGNET, out_features=["stage1", *STAGES])


def dinov2() -> Any:
    from transformers import Dinov2Config

    return Dinov2Config(**VISION, out_indices=[1, 2], reshape_hidden_states=False)


def dinov3() -> Any:
    from transformers import DINOv3ViTConfig

    return DINOv3ViTConfig(
        **VISION, intermediate_size=96, out_indices=[1, 2], return_class_token=True
    )


def tipsv2() -> Any:
    from transformers import Tipsv2VisionConfig

    return Tipsv2VisionConfig(**VISION, out_indices=[1, 2], reshape_hidden_states=False)


STAGES = ["stage2", "stage3", "stage4"]
HGNET = {
    "embedding_size": 16, "stem_channels": [3, 16, 16], "stage_in_channels": [16, 16, 32, 64],
    "stage_mid_channels": [16, 16, 16, 16],
    "stage_out_channels": [16, 32, 64, 64], "hidden_sizes": [16, 32, 64, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1], "depths": [1, 1, 1, 1],
}  # fmt: skip
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
DETECTOR = {
    "encoder_in_channels": [32, 64, 64],
    "decoder_in_channels": [64, 64, 64],
    "encoder_hidden_dim": 64,
    "num_queries": 3,
}
DEPTH = {"neck_hidden_sizes": [16, 32], "reassemble_factors": [2, 1], "reassemble_hidden_size": 64}
EFFICIENT = {
    "width_coefficient": 1.0, "depth_coefficient": 1.0, "in_channels": [32, 16],
    "out_channels": [16, 64], "kernel_sizes": [3, 3],
    "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 6],
    "depthwise_padding": [], "hidden_dim": 1280,
}  # fmt: skip
CODEC = {"upsample_groups": 64, "num_filters": 8, "vector_quantization_hidden_dimension": 64}
HIERA = {
    "image_size": [64, 64], "hidden_size": 16, "blocks_per_stage": [1, 2, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 4, 4], "window_size_per_stage": [8, 4, 4, 2],
    "global_attention_blocks": [2, 4],
    "window_positional_embedding_background_size": [4, 4],
}  # fmt: skip

# By field. "default" builds the arguments of the config to shrink. A callable returns the value.
FIELDS: dict[str, dict[str, Any]] = {
    "hgnet_v2": HGNET,
    "maskformer": {"backbone_config": swin},
    **{name: {"backbone_config": rt_detr_resnet, **DETECTOR} for name in ("rt_detr", "rt_detr_v2")},
    **{name: {"backbone_config": hgnet, **DETECTOR} for name in ("d_fine", "deimv2")},
    "pp_doclayout_v4": {
        "backbone_config": hgnet,
        **DETECTOR,
        "num_queries": 2,
    },  # the third and fourth scores differ by a rounding
    "pp_doclayout_v3": {
        "backbone_config": hgnet_from_the_first_stage,
        **DETECTOR,
        "x4_feat_dim": 16,
    },
    **{
        name: {"backbone_config": dinov2, **DEPTH}
        for name in ("depth_anything", "prompt_depth_anything")
    },
    **dict.fromkeys(("align_vision_model", "efficientnet"), EFFICIENT),
    **{name: {"image_size": 64} for name in ("convnext", "convnextv2")},
    "dac": {"encoder_hidden_size": 4, "decoder_hidden_size": 64},
    "dbrx": {"attn_config": lambda: {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "dia_decoder": {
        "cross_num_attention_heads": 4,
        "cross_num_key_value_heads": 2,
        "cross_head_dim": 16,
        "cross_hidden_size": 64,
    },
    "fun_asr_nano": {
        "adaptor_config": lambda: {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "projector_hidden_size": 64,
        },
    },
    "mistral_large4_text": {
        "default": lambda: {"num_hidden_layers": 2},
        "kv_source_layers": [0, 1],
        "no_rope_layers": [1, 0],
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "lw_detr_vit": {
        "num_windows": 4,
        "window_block_indices": [0],
        "num_hidden_layers": 2,
        "pretrain_image_size": 32,
    },
    "phi4_multimodal_audio": {
        "nemo_conv_channels": 64,
        "ext_pw_out_channel": 64,
        "depthwise_separable_out_channel": 64,
    },
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 6400},
    "xcodec": {"codebook_dim": 128},
    "pp_doclayout_v2": {
        "backbone_config": hgnet,
        **DETECTOR,
        "class_thresholds": [0.5] * 64,
        "class_order": list(range(64)),
    },
    "xlstm": {"qk_dim_factor": 1.0},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "1/2",
        "image_grid_pinpoints": [[32, 32]],
    },
    "clap_audio_model": {
        "num_mel_bins": 16,
        "spec_size": 64,
        "patch_size": 2,
        "patch_stride": [2, 2],
        "window_size": 4,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
        "patch_embeds_hidden_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 2,
    },
    "chmv2": {
        "backbone_config": dinov3,
        "post_process_channels": [16, 32],
        "reassemble_factors": [2, 1],
    },
    "tipsv2_dpt": {
        "backbone_config": tipsv2,
        "neck_hidden_sizes": [16, 32],
        "reassemble_factors": [2, 1],
    },
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [16, 16, 32, 64],
        "num_attention_layers": 1,
        "num_attention_heads": 8,
    },
    "depth_pro": {
        "patch_size": 32,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [64, 64],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_text": {"index_n_heads": 2, "index_head_dim": 16},
    "hifigan": {"upsample_initial_channel": 64, "model_in_dim": 8},
    "fastspeech2_conformer_hifigan": {"upsample_initial_channel": 64, "model_in_dim": 8},
    "janus_vqgan": {"base_channels": 32, "num_patches": 2},
    **dict.fromkeys(
        (
            "mimi",
            "mimi_decoder",
            "pocket_tts_audio_tokenizer",
            "pocket_tts_audio_tokenizer_decoder",
        ),
        CODEC,
    ),
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "sam2_hiera_det_model": HIERA,
    "sam3_vision_model": {"backbone_feature_sizes": lambda: [[16, 16], [8, 8], [4, 4]]},
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 5, "no_token_index": 6},
    **{
        name: {"num_filters": 2, "depths": [1] * 7}
        for name in (
            "vibevoice_acoustic_tokenizer",
            "vibevoice_acoustic_tokenizer_encoder",
            "vibevoice_acoustic_tokenizer_decoder",
        )
    },
    **{
        name: {"encoder_hidden_size": 4, "quantization_dim": 128}
        for name in ("xcodec2", "neucodec")
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "upernet": {"backbone_config": resnet, "use_auxiliary_head": False},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    **{name: {"hidden_size_global": 64} for name in ("blt_local_encoder", "blt_local_decoder")},
    **{
        name: {"default": with_resnet}
        for name in ("detr", "conditional_detr", "deformable_detr", "table-transformer")
    },
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
    **{
        name: {"head_dim": 16}
        for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral")
    },
    "nemotron_h": {"num_key_value_heads": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "longcat_flash": {"qk_head_dim": 32},
    "paddleocr_vl_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [3, 3, 2]}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": DEFAULT_ROPE, "sliding_attention": DEFAULT_ROPE}
    },
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "step3p5": {"sliding_window": 4},
    "minimax_m3_vl_text": {  # a sparse layer after a full one, which the default config lacks
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "chameleon": {"vocabulary_map": {"<image>": 41}},
    "emu3": {"vocabulary_map": {"<image>": 41, "<|extra_200|>": 42}},
    **{name: {"base_channels": 32} for name in ("chameleon_vqgan", "emu3_vqgan")},
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
    **{
        name: {"prediction_length": 4, "context_length": 12}
        for name in ("autoformer", "informer", "time_series_transformer")
    },
    "zaya": {"num_experts_per_tok": 1},
    "bit": {"num_groups": 8, "embedding_size": 32},
    "audio-spectrogram-transformer": {"max_length": 64},
    "gemma3n_text": {
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.95, 0.95],
        "num_kv_shared_layers": 0,
    },
    **{name: {"num_kv_shared_layers": 0} for name in ("gemma4_text", "gemma4_unified_text")},
    "diffusion_gemma_text": {
        "num_kv_shared_layers": 0,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma2": {"attn_logit_softcapping": 3.0},  # 50 changes nothing of such small scores
    "lilt": {"hidden_size": 96},
    "clvp_encoder": {"hidden_size": 128, "projection_dim": 128},
    "granite_speech5_encoder": {"context_size": 8},
    "esmc": {"num_key_value_heads": 4},
    **dict.fromkeys(("swin", "swinv2"), SHIFTED_WINDOWS),
    "vitpose_backbone": {"num_experts": 1},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "wav2vec2-bert": {"vocab_size": 64, "feature_projection_input_dim": 80},
    "xclip_vision_model": {"num_frames": 3},  # the batch, which is then one video
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
        for name in (
            "qwen2_5_vl",
            "qwen2_5_vl_vision",
            "qwen2_5_omni_vision_encoder",
            "exaone4_5_vision",
        )
    },
}
