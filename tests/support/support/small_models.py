# SPDX-License-Identifier: Apache-2.0
"""Small models of every kind, and their inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from pytransformer import models

VOCABULARY = 31
_SIZES: dict[str, Any] = dict(vocab_size=VOCABULARY, d_model=16, num_heads=4, hidden=24)

CONFIGS: dict[str, Any] = {
    "Transformer": models.TransformerConfig(**_SIZES, num_encoder_layers=2, num_decoder_layers=2,
        max_length=12),
    "Transformer-pre": models.TransformerConfig(
        **_SIZES, target_vocab_size=29, num_encoder_layers=2, num_decoder_layers=2, max_length=12,
        norm="pre", tied=False,
        positions="learned", logits_bias=True, experts={"num_experts": 3},
    ),
    "Transformer-wide": models.TransformerConfig(  # heads of a free size, values of another
        **_SIZES, head_dim=8, value_dim=6, num_encoder_layers=1, num_decoder_layers=1,
        max_length=12, tied=False,
        logits_bias=True,
    ),
    "BERT": models.BERTConfig(**_SIZES, num_layers=2, max_length=12,
        heads=("mlm", "nsp", "boundary")),
    "BERT-classifier": models.BERTConfig(**_SIZES, num_layers=2, max_length=12,
        heads=("classification",), num_labels=3),
    "GPT": models.GPTConfig(**_SIZES, num_layers=2, max_length=12),
    "GPT-alibi": models.GPTConfig(
        **_SIZES, num_layers=2, max_length=12, num_kv_heads=2, positions="alibi", window=4,
        tied=False
    ),
    "T5": models.T5Config(**_SIZES, head_dim=6, num_layers=2, buckets=8, max_distance=9),
    "T5-v1.1": models.T5Config(
        **_SIZES, head_dim=4, num_layers=1, num_decoder_layers=2, buckets=8, max_distance=9,
        activation="gelu_tanh", gated=True,
        tied=False, scale_outputs=False,
    ),
    "ViT": models.ViTConfig(image_size=8, patch_size=4, d_model=16, num_layers=2, num_heads=4,
        hidden=24, num_labels=3),
    "FNet": models.FNetConfig(**_SIZES, num_layers=2, max_length=12),
    "Mixer": models.MixerConfig(image_size=8, patch_size=4, d_model=16, num_layers=2,
        token_hidden=6, hidden=24, num_labels=3),
    "Mixer-separable": models.MixerConfig(
        image_size=8, patch_size=2, d_model=16, num_layers=2, hidden=24, num_labels=3, kernel_size=3
    ),
    "Conformer": models.ConformerConfig(
        input_dim=5, d_model=16, num_layers=2, num_heads=4, hidden=24, kernel_size=3,
        vocab_size=VOCABULARY, subsampling=False
    ),
    "Conformer-ctc": models.ConformerConfig(
        input_dim=9, d_model=16, num_layers=2, num_heads=4, hidden=24, kernel_size=3,
        vocab_size=VOCABULARY, ctc=True
    ),
}  # fmt: skip


def build(name: str, **changes: Any) -> Any:
    """Return the model of this name, seeded, with its config's dropout."""
    torch.manual_seed(1)
    config = dataclasses.replace(CONFIGS[name], **changes)
    model = getattr(models, name.split("-")[0])(config)
    # Its head starts at zero, which would hide everything before it.
    if isinstance(model, models.Mixer):
        torch.nn.init.normal_(model.head.weight, std=0.1)
    return model


def inputs(name: str, length: int = 9) -> dict[str, torch.Tensor]:
    """Return inputs with labels for every loss of the model."""
    torch.manual_seed(2)
    kind = name.split("-")[0]
    if kind in ("ViT", "Mixer"):
        return {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 2, 1])}
    ids, lengths = torch.randint(3, 29, (3, length)), torch.tensor([length, length - 2, length - 5])
    mask = (torch.arange(length) < lengths[:, None]).long()
    if name == "Conformer-ctc":  # 33 frames, 17 and 29 of them real: 7, 3 and 6 remain
        features, lengths = torch.randn(3, 33, 9), torch.tensor([33, 17, 29])
        return {
            "input_features": features,
            "attention_mask": (torch.arange(33) < lengths[:, None]).long(),
            "labels": torch.tensor([[3, 3, 4], [5, -100, -100], [6, 7, -100]]),
        }  # fmt: skip
    if kind == "Conformer":
        return {"input_features": torch.randn(3, length, 5), "attention_mask": mask, "labels": ids}
    given = {"input_ids": ids, "attention_mask": mask}
    if kind in ("Transformer", "T5"):
        return given | {"labels": torch.randint(3, 29, (3, 7))}
    if kind == "GPT":
        return given | {"labels": ids}
    if name == "BERT-classifier":
        return given | {"labels": torch.tensor([0, 2, 1])}
    masked = torch.zeros_like(mask, dtype=torch.bool)
    masked[:, 1:3] = True
    given |= {
        "token_type_ids": torch.randint(0, 2, ids.shape), "labels": ids.masked_fill(~masked, -100),
        "next_sentence_label": torch.tensor([0, 1, 0]),
    }  # fmt: skip
    return given | (
        {"span_bounds": torch.tensor([0, 3]).expand(3, length, 2)} if kind == "BERT" else {}
    )
