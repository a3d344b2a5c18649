# SPDX-License-Identifier: Apache-2.0
"""T5, a text-to-text encoder-decoder whose relative-position bias is never materialized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..nn.attention import MultiHeadAttention
from ..nn.blocks import Block, Stack
from ..nn.cache import DecoderCache, Step
from ..nn.experts import Experts, network
from ..nn.heads import Classifier
from ..nn.layer_norm import RMSNorm
from ..nn.masks import padding
from ..nn.positions import RelativePositionTable
from ..ops.options import ActivationName
from . import _hugging_face
from ._encoder_decoder import EncoderDecoder, EncoderDecoderConfig


@dataclass(frozen=True)
class T5Config(EncoderDecoderConfig):
    """Configuration of :class:`T5`.

    Version 1.1 is gated with gelu_tanh, not tied and not scaled.

    Attributes:
        num_decoder_layers: None means num_layers.
        tied: the output layer shares the embedding's weight.
        scale_outputs: multiply hidden states by d_model^-1/2 before the output layer.
        experts: mixtures in place of feed-forward networks, the arguments of
            :class:`pytransformer.nn.MixtureOptions`.
    """

    vocab_size: int = 32128
    d_model: int = 768
    head_dim: int = 64
    hidden: int = 3072
    num_layers: int = 12
    num_decoder_layers: int | None = None
    num_heads: int = 12
    buckets: int = 32
    max_distance: int = 128
    activation: ActivationName = "relu"
    gated: bool = False
    dropout: float = 0.1
    eps: float = 1e-6
    tied: bool = True
    scale_outputs: bool = True
    pad_token_id: int = 0
    start_token_id: int = 0
    label_smoothing: float = 0.0
    experts: dict[str, Any] | None = None


def _v1_1(d_model: int, hidden: int, num_layers: int, num_heads: int) -> T5Config:
    return T5Config(
        d_model=d_model, hidden=hidden, num_layers=num_layers, num_heads=num_heads,
        activation="gelu_tanh", gated=True,
        tied=False, scale_outputs=False,
    )  # fmt: skip


class T5(EncoderDecoder):
    """Pre-norm encoder-decoder with RMS norms and one relative-position table per stack.

    It has no biases, and scores are not scaled.

    Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
    transformer" (2020).
    """

    config: T5Config
    Config = T5Config
    PRESETS: ClassVar = {
        "small": T5Config(d_model=512, hidden=2048, num_layers=6, num_heads=8),
        "base": T5Config(),
        "large": T5Config(d_model=1024, hidden=4096, num_layers=24, num_heads=16),
        "v1.1-small": _v1_1(512, 1024, 8, 6),
        "v1.1-base": _v1_1(768, 2048, 12, 12),
        "v1.1-large": _v1_1(1024, 2816, 24, 16),
    }
    CONVERSIONS: ClassVar = {"t5": _hugging_face.T5}

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        c = config
        self.num_decoder_layers = (
            c.num_layers if c.num_decoder_layers is None else c.num_decoder_layers
        )
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = self._stack(c.num_layers, decoder=False)
        self.decoder = self._stack(self.num_decoder_layers, decoder=True)
        self.encoder_bias, self.decoder_bias = (
            RelativePositionTable(
                c.buckets, c.num_heads, bidirectional=both, max_distance=c.max_distance
            )
            for both in (True, False)
        )
        self.head = Classifier(
            c.d_model, c.vocab_size, bias=False, embedding=self.embedding if c.tied else None,
            scale=c.d_model**-0.5 if c.scale_outputs else 1.0, label_smoothing=c.label_smoothing,
        )  # fmt: skip
        self.apply(self._initialise)

    def _stack(self, num_layers: int, decoder: bool) -> Stack:
        c = self.config

        def attention(cross: bool) -> MultiHeadAttention:
            return MultiHeadAttention(
                c.d_model,
                c.num_heads,
                cross=cross,
                head_dim=c.head_dim,
                bias=False,
                scale=1.0,
                dropout=c.dropout,
            )

        def block(layer: int) -> Block:
            kind: dict[str, Any] = {
                "activation": c.activation,
                "gated": c.gated,
                "bias": False,
                "dropout": c.dropout,
            }
            inner = network(c.experts, layer, c.d_model, c.hidden, **kind)
            return Block(
                attention(False), inner, lambda: RMSNorm(c.d_model, c.eps), pre=True,
                dropout=c.dropout,
                cross_attention=attention(True) if decoder else None,
            )  # fmt: skip

        return Stack(
            [block(i) for i in range(num_layers)],
            RMSNorm(c.d_model, c.eps),
            dropout=c.dropout,
            pre=True,
        )

    def _initialise(self, module: nn.Module) -> None:
        """Initialize as the authors do; queries absorb the missing scale 1 / sqrt(head_dim)."""
        c = self.config
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, Experts):
            module.initialise(lambda matrix: nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5))
        elif isinstance(module, MultiHeadAttention):  # visited after its projections
            with torch.no_grad():
                query = (
                    module.query.weight if module.cross else module.qkv.weight[: module.widths[0]]
                )
                query.mul_(c.head_dim**-0.5)
        elif isinstance(module, RelativePositionTable):
            nn.init.normal_(module.table, std=c.d_model**-0.5)
        elif isinstance(module, Classifier) and not c.tied:
            nn.init.normal_(module.weight, std=1.0 if c.scale_outputs else c.d_model**-0.5)

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.config.dropout, self.training)

    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, L, d_model) from (B, L); attention_mask as in :meth:`forward`."""
        visible = padding(*self._keys(attention_mask, *input_ids.shape), queries=True)
        return self._finish(
            self.encoder(
                self.embedding(self._rows(input_ids)), {**visible, "bias": self.encoder_bias()}
            )
        )

    def decode(
        self,
        ids: torch.Tensor,
        step: Step,
        context: tuple[torch.Tensor, dict[str, Any]],
        cache: DecoderCache | None,
        at: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        if at is not None:
            raise ValueError(
                "T5 supports relative positions only: decoder_position_ids must be None"
            )
        visible = {**step.visible, "bias": self.decoder_bias()}
        return self._finish(
            self.decoder(self.embedding(self._rows(ids)), visible, *context, cache, wanted)
        )
