# SPDX-License-Identifier: Apache-2.0
"""ViT, an encoder over the patches of an image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from ..nn.attention import MultiHeadAttention
from ..nn.blocks import Block, Stack
from ..nn.experts import Experts, network
from ..nn.heads import Classifier
from ..nn.layer_norm import LayerNorm
from ..nn.patches import ImageSize, PatchEmbedding
from ..nn.positions import LearnedPositions
from ..ops._core.tensors import whole
from ..ops.options import ActivationName
from . import _hugging_face
from ._base import Model, ModelConfig
from ._output import Output


@dataclass(frozen=True)
class ViTConfig(ModelConfig):
    """Configuration of :class:`ViT`.

    Attributes:
        image_size: (height, width), or one number for both.
        num_labels: 0 means no classifier.
        pooler: a tanh layer on the first token for ``pooler_output``; the classifier does not use
            it.
        experts: mixtures in place of feed-forward networks, the arguments of
            :class:`pytransformer.nn.MixtureOptions`.
    """

    image_size: ImageSize = 224
    patch_size: int = 16
    channels: int = 3
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    hidden: int = 3072
    activation: ActivationName = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    qkv_bias: bool = True
    pooler: bool = False
    num_labels: int = 1000
    label_smoothing: float = 0.0
    eps: float = 1e-12
    experts: dict[str, Any] | None = None


_LARGE = ViTConfig(d_model=1024, num_layers=24, num_heads=16, hidden=4096)


class ViT(Model):
    """Pre-norm encoder over [CLS] and patches with learned positions, classified from [CLS].

    Source: Dosovitskiy et al., "An image is worth 16x16 words" (2021).
    """

    config: ViTConfig
    Config = ViTConfig
    PRESETS: ClassVar = {
        "B/16": ViTConfig(),
        "B/32": ViTConfig(patch_size=32),
        "L/16": _LARGE,
        "L/32": replace(_LARGE, patch_size=32),
        "H/14": ViTConfig(patch_size=14, d_model=1280, num_layers=32, num_heads=16, hidden=5120),
    }
    CONVERSIONS: ClassVar = {"vit": _hugging_face.VIT}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        c = config
        self.patches = PatchEmbedding(c.image_size, c.patch_size, c.channels, c.d_model)
        self.cls_token = nn.Parameter(torch.zeros(c.d_model))
        self.positions = LearnedPositions(self.patches.num_patches + 1, c.d_model)

        def block(layer: int) -> Block:
            attention = MultiHeadAttention(c.d_model, c.num_heads, dropout=c.attention_dropout)
            if not c.qkv_bias:
                attention.qkv.register_parameter("bias", None)
            inner = network(c.experts, layer, c.d_model, c.hidden, activation=c.activation)
            return Block(
                attention, inner, lambda: LayerNorm(c.d_model, c.eps), dropout=c.dropout, pre=True
            )

        self.encoder = Stack(
            [block(i) for i in range(c.num_layers)],
            LayerNorm(c.d_model, c.eps),
            dropout=c.dropout,
            pre=True,
        )
        self.pooler = nn.Linear(c.d_model, c.d_model) if c.pooler else None
        self.head = (
            Classifier(c.d_model, c.num_labels, label_smoothing=c.label_smoothing)
            if c.num_labels
            else None
        )
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, Classifier)):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            module.initialise(lambda matrix: nn.init.trunc_normal_(matrix, std=0.02))

    def resized(self, image_size: ImageSize) -> Self:
        """Return a copy for another image size, with bicubic interpolation of the patch positions.

        Source: Dosovitskiy et al. (2021), section 3.2, which fine-tunes at a higher resolution than
        in training.
        """
        model = type(self)(replace(self.config, image_size=image_size)).to(
            self.cls_token.device, self.cls_token.dtype
        )
        state, place = self.state(), self.positions.weight.detach()
        # [1, d_model, rows, columns].
        grid = place[1:].T.unflatten(1, self.patches.grid)[None].float()
        scaled = nn.functional.interpolate(
            grid, model.patches.grid, mode="bicubic", align_corners=False
        )
        state["positions.weight"] = torch.cat([place[:1], scaled[0].flatten(1).T.to(place.dtype)])
        model.load_state(state, f"a {type(self).__name__} for images of {self.config.image_size}")
        return model.train(self.training)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        """Return the output for images.

        Args:
            pixel_values: (B, channels, height, width), of the parameters' dtype.
            labels: (B,) int64 classes.

        Returns:
            ``last_hidden_state`` (B, 1 + patches, d_model), ``logits`` (B, num_labels).
        """
        x = self.patches(pixel_values)
        x = torch.cat([whole(self.cls_token).expand(x.shape[0], 1, -1), x], 1)
        hidden = self.encoder(x + self.positions(x.shape[1]), {})
        first = hidden[:, 0]
        pooled = None if self.pooler is None else torch.tanh(self.pooler(first))
        if self.head is None:
            if labels is not None:
                raise ValueError(
                    "labels were given to a ViT with num_labels=0, which has no classifier"
                )
            return Output(hidden, pooler_output=pooled)
        head = self.head
        loss = None if labels is None else self._with_balance(head.loss(first, labels))
        return Output(hidden, loss, pooler_output=pooled, compute_logits=lambda: head(first))
