# SPDX-License-Identifier: Apache-2.0
"""Conformer: an encoder of sequences of features (speech), with convolutions between attention and feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..nn.conformer import ConformerBlock
from ..nn.heads import Classifier
from ..nn.masks import padding
from ._base import Model, ModelConfig
from ._output import Output


@dataclass(frozen=True)
class ConformerConfig(ModelConfig):
    """input_dim: features a frame. vocab_size: of a classifier of each frame; 0: none."""

    input_dim: int = 80
    d_model: int = 256
    num_layers: int = 16
    num_heads: int = 4
    hidden: int = 1024
    kernel_size: int = 31
    dropout: float = 0.1
    vocab_size: int = 0


class Conformer(Model):
    """A linear map of the features, then Conformer blocks; positions come from the convolutions alone.

    The encoder of Gulati et al., "Conformer" (2020), sizes S, M, L, without its subsampling and relative positions.
    """

    config: ConformerConfig
    Config = ConformerConfig
    PRESETS: ClassVar = {
        "small": ConformerConfig(d_model=144, hidden=576),
        "base": ConformerConfig(),
        "large": ConformerConfig(d_model=512, num_layers=17, num_heads=8, hidden=2048),
    }

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        c = config
        self.projection = nn.Linear(c.input_dim, c.d_model)
        self.blocks = nn.ModuleList(
            ConformerBlock(c.d_model, c.num_heads, c.hidden, c.kernel_size, c.dropout) for _ in range(c.num_layers)
        )
        self.head = Classifier(c.d_model, c.vocab_size) if c.vocab_size else None

    def forward(
        self,
        input_features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Output:
        """
        Args:
            input_features: (B, L, input_dim).
            attention_mask: (B, L), 0 = padding on any side; or lengths (B,).
            labels: (B, L) int64 classes of frames, -100 is ignored; needs vocab_size.
        """
        batch, length, _ = input_features.shape
        visible = padding(attention_mask, batch, length, queries=True)
        keep = None
        if "key_lengths" in visible:
            keep = torch.arange(length, device=input_features.device) < visible["key_lengths"][:, None]
        elif visible:
            keep = visible["attn_mask"][:, 0, 0]
        hidden = nn.functional.dropout(self.projection(input_features), self.config.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden, visible, keep)
        if self.head is None:
            if labels is not None:
                raise ValueError("labels were given to a Conformer with vocab_size=0, which has no classifier")
            return Output(hidden)
        head = self.head
        loss = None if labels is None else head.loss(hidden, labels)
        return Output(hidden, loss, compute_logits=lambda: head(hidden))
