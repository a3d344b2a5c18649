"""What the general rules of :mod:`.configs` and :mod:`.inputs` get wrong, by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def resnet() -> Any:
    """A backbone that needs no other library."""
    from transformers import ResNetConfig

    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"])


def with_resnet() -> dict[str, Any]:
    return {"backbone_config": resnet(), "use_timm_backbone": False, "backbone": None}


# By field; "default" makes the arguments of the config that the tiny one is shrunk from.
FIELDS: dict[str, dict[str, Any]] = {
    **{name: {"default": with_resnet} for name in ("detr", "conditional_detr", "deformable_detr", "table-transformer")},
    "dab-detr": {"default": with_resnet, "query_dim": 4},
    "bamba": {"mamba_n_heads": 8},
    "granitemoehybrid": {"mamba_n_heads": 8},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    "esm": {"vocab_size": 64, "mask_token_id": 40, "pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "autoformer": {"prediction_length": 4, "context_length": 12},
    "informer": {"prediction_length": 4, "context_length": 12},
    "time_series_transformer": {"prediction_length": 4, "context_length": 12},
    "zaya": {"num_experts_per_tok": 1},
    "bit": {"num_groups": 8, "embedding_size": 32},
}

INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {}
