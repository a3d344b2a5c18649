# SPDX-License-Identifier: Apache-2.0
"""Conformer, an encoder of feature sequences (speech) with attention and convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..nn.conformer import ConformerBlock, ConvolutionSubsampling
from ..nn.ctc import ctc_loss, ctc_read
from ..nn.heads import Classifier
from ..nn.masks import kept, padding
from ..nn.relative import relative_sinusoids
from ._base import Model, ModelConfig
from ._output import Output


@dataclass(frozen=True)
class ConformerConfig(ModelConfig):
    """Configuration of :class:`Conformer`.

    Attributes:
        input_dim: features of a frame.
        subsampling: reduce to a quarter of the frames.
        relative: positions as in Transformer-XL; otherwise only the convolutions encode positions.
        vocab_size: classes of a per-frame classifier; 0: none.
        ctc: labels are ordered classes with blank 0 (:func:`pytransformer.nn.ctc_loss`); otherwise
            there is one label per frame.
    """

    input_dim: int = 80
    d_model: int = 256
    num_layers: int = 16
    num_heads: int = 4
    hidden: int = 1024
    kernel_size: int = 31
    dropout: float = 0.1
    subsampling: bool = True
    relative: bool = True
    vocab_size: int = 0
    ctc: bool = False


class Conformer(Model):
    """Feature subsampling and Conformer blocks.

    Source: the encoder of Gulati et al., "Conformer" (2020), sizes S, M, L.
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
        self.subsampling = ConvolutionSubsampling(c.input_dim, c.d_model) if c.subsampling else None
        self.projection = None if c.subsampling else nn.Linear(c.input_dim, c.d_model)
        self.blocks = nn.ModuleList(
            ConformerBlock(c.d_model, c.num_heads, c.hidden, c.kernel_size, c.dropout, c.relative)
            for _ in range(c.num_layers)
        )
        self.head = Classifier(c.d_model, c.vocab_size) if c.vocab_size else None

    def forward(
        self,
        input_features: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Output:
        """Return the encoder's output for features.

        Args:
            input_features: (B, L, input_dim).
            attention_mask: (B, L), 0 = padding on any side; or lengths (B,).
            labels: (B, frames) int64 classes of the output frames, a quarter with subsampling; with
                ``ctc`` (B, S), ordered labels of each sequence, at least 1. -100 is ignored.
                Requires vocab_size.

        Returns:
            ``last_hidden_state`` (B, frames, d_model), ``logits`` (B, frames, vocab_size).
        """
        batch, length, _ = input_features.shape
        padding(attention_mask, batch, length)  # validate before any computation
        if self.subsampling is not None:
            hidden, attention_mask = (
                self.subsampling(input_features),
                self.subsampling.kept(attention_mask),
            )
        elif self.projection is not None:
            hidden = self.projection(input_features)
        visible = padding(attention_mask, batch, hidden.shape[1], queries=True)
        keep = kept(visible, hidden.shape[1], "Conformer")
        if self.config.relative:
            visible["sinusoids"] = relative_sinusoids(
                hidden.shape[1], self.config.d_model, like=hidden
            )
        hidden = nn.functional.dropout(hidden, self.config.dropout, self.training)
        for block in self.blocks:
            hidden = block(hidden, visible, keep)
        if self.head is None:
            if labels is not None:
                raise ValueError(
                    "labels were given to a Conformer with vocab_size=0, which has no classifier"
                )
            return Output(hidden)
        head, loss = self.head, None
        if labels is not None:
            loss = (
                ctc_loss(head(hidden), labels, keep)
                if self.config.ctc
                else head.loss(hidden, labels)
            )
        return Output(hidden, loss, compute_logits=lambda: head(hidden))

    @torch.no_grad()
    def read(
        self, input_features: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> list[list[int]]:
        """Return the labels of each sequence by best path; requires ``ctc``."""
        logits = self(input_features, attention_mask).logits
        if self.subsampling is not None:
            attention_mask = self.subsampling.kept(attention_mask)
        return ctc_read(
            logits, kept(padding(attention_mask, *logits.shape[:2]), logits.shape[1], "Conformer")
        )
