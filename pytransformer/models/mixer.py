# SPDX-License-Identifier: Apache-2.0
"""MLP-Mixer, an image classifier of feed-forward networks only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..nn.blocks import Block, Stack
from ..nn.feed_forward import FeedForward
from ..nn.heads import Classifier
from ..nn.layer_norm import LayerNorm
from ..nn.mixing import SeparableMixing, TokenMixing
from ..nn.patches import ImageSize, PatchEmbedding
from ._base import Model, ModelConfig
from ._output import Output


@dataclass(frozen=True)
class MixerConfig(ModelConfig):
    """Configuration of :class:`Mixer`.

    Attributes:
        image_size: (height, width), or one number for both.
        token_hidden, hidden: hidden sizes of the networks along patches and along features.
        kernel_size: size of a separable convolution that mixes patches over their grid in place of
            a network; 0: a network.
    """

    image_size: ImageSize = 224
    patch_size: int = 16
    channels: int = 3
    d_model: int = 768
    num_layers: int = 12
    token_hidden: int = 384
    hidden: int = 3072
    dropout: float = 0.0
    num_labels: int = 1000
    label_smoothing: float = 0.0
    eps: float = 1e-6
    kernel_size: int = 0


class Mixer(Model):
    """Pre-norm blocks of token mixing and feed-forward, then a classifier of the patch mean.

    The mixing is :class:`pytransformer.nn.TokenMixing` or
    :class:`pytransformer.nn.SeparableMixing`.

    Source: Tolstikhin et al., "MLP-Mixer: An all-MLP Architecture for Vision" (2021).
    """

    config: MixerConfig
    Config = MixerConfig
    PRESETS: ClassVar = {
        "B/16": MixerConfig(),
        "L/16": MixerConfig(d_model=1024, num_layers=24, token_hidden=512, hidden=4096),
        "H/14": MixerConfig(
            patch_size=14, d_model=1280, num_layers=32, token_hidden=640, hidden=5120
        ),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        c = config
        self.patches = PatchEmbedding(c.image_size, c.patch_size, c.channels, c.d_model)

        def block() -> Block:
            if c.kernel_size:
                mixing: nn.Module = SeparableMixing(
                    c.d_model, c.kernel_size, grid=self.patches.grid
                )
            else:
                mixing = TokenMixing(self.patches.num_patches, c.token_hidden, dropout=c.dropout)
            network = FeedForward(c.d_model, c.hidden, activation="gelu", dropout=c.dropout)
            return Block(
                mixing, network, lambda: LayerNorm(c.d_model, c.eps), dropout=c.dropout, pre=True
            )

        self.encoder = Stack(
            [block() for _ in range(c.num_layers)],
            LayerNorm(c.d_model, c.eps),
            dropout=c.dropout,
            pre=True,
        )
        self.head = Classifier(c.d_model, c.num_labels, label_smoothing=c.label_smoothing)
        nn.init.zeros_(self.head.weight)  # the authors' initialization

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        """Return the output for images.

        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,) int64 classes.
        """
        hidden = self.encoder(self.patches(pixel_values), {})
        pooled = hidden.mean(1)
        loss = None if labels is None else self.head.loss(pooled, labels)
        return Output(hidden, loss, pooler_output=pooled, compute_logits=lambda: self.head(pooled))
