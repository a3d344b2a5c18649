# SPDX-License-Identifier: Apache-2.0
"""The Transformer, an encoder-decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..nn.attention import MultiHeadAttention
from ..nn.blocks import Block, Stack
from ..nn.cache import DecoderCache, Step
from ..nn.experts import Experts, network
from ..nn.heads import Classifier
from ..nn.layer_norm import LayerNorm
from ..nn.masks import padding
from ..nn.positions import LearnedPositions, Positions, SinusoidalPositions
from ..ops.options import ActivationName
from . import _hugging_face
from ._encoder_decoder import EncoderDecoder, EncoderDecoderConfig
from ._parameters import PARTS

_SIDES = (("source", "encoder"), ("target", "decoder"))
POSITIONS = ("sinusoidal", "sinusoidal-halves", "learned")


@dataclass(frozen=True)
class TransformerConfig(EncoderDecoderConfig):
    """Configuration of :class:`Transformer`.

    Attributes:
        target_vocab_size: None means one vocabulary and one embedding for both languages.
        norm: ``"post"`` (the paper's) or ``"pre"``.
        final_norm: a norm after each stack (pre-norm always has one).
        head_dim: size of a head; None means d_model / num_heads.
        value_dim: size of a head's values; None means head_dim.
        tied: the output layer shares the target embedding's weight.
        start_token_id: first token of decoder inputs made from labels.
        label_smoothing: applied in training.
        experts: mixtures in place of feed-forward networks, such as ``{"num_experts": 8}``, the
            arguments of :class:`pytransformer.nn.MixtureOptions`.
    """

    vocab_size: int = 37000
    target_vocab_size: int | None = None
    d_model: int = 512
    hidden: int = 2048
    num_heads: int = 8
    head_dim: int | None = None
    value_dim: int | None = None
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    activation: ActivationName = "relu"
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    max_length: int = 1024
    positions: str = "sinusoidal"
    norm: str = "post"
    final_norm: bool = False
    scale_embeddings: bool = True
    tied: bool = True
    logits_bias: bool = False
    pad_token_id: int = 0
    start_token_id: int = 1
    label_smoothing: float = 0.1
    experts: dict[str, Any] | None = None


class Transformer(EncoderDecoder):
    """Encoder-decoder of Vaswani et al., "Attention Is All You Need" (2017).

    ``"notes"`` is the translator of TensorFlow's tutorial "Neural machine translation with a
    Transformer and Keras". Its heads have the size of the model (``key_dim = d_model``). It has
    Portuguese and English vocabularies of 7,765 and 7,010 tokens, an untied output layer with bias,
    dropout of attention weights, and 10,184,162 parameters. The tutorial has no dropout of
    attention's result, and its norms have an eps of 1e-3. ``"notes-small"`` is the same network
    with heads of d_model / num_heads, and dropout and label smoothing as in the paper.
    """

    config: TransformerConfig
    Config = TransformerConfig
    PRESETS: ClassVar = {
        "base": TransformerConfig(),
        "big": TransformerConfig(d_model=1024, hidden=4096, num_heads=16, dropout=0.3),
        "notes-small": TransformerConfig(
            vocab_size=7765, target_vocab_size=7010, d_model=128, hidden=512, num_heads=8,
            num_encoder_layers=4,
            num_decoder_layers=4, max_length=256, tied=False,
        ),
        "notes": TransformerConfig(
            vocab_size=7765, target_vocab_size=7010, d_model=128, hidden=512, num_heads=8,
            head_dim=128, num_encoder_layers=4,
            num_decoder_layers=4, max_length=2048, positions="sinusoidal-halves", tied=False,
            logits_bias=True,
            attention_dropout=0.1, label_smoothing=0.0,
        ),
    }  # fmt: skip
    CONVERSIONS: ClassVar = {"marian": _hugging_face.MARIAN}

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        c = config
        if c.norm not in ("pre", "post"):
            raise ValueError(f"TransformerConfig: norm must be 'pre' or 'post', got {c.norm!r}")
        if c.positions not in POSITIONS:
            raise ValueError(
                f"TransformerConfig: positions must be one of {', '.join(POSITIONS)}, got"
                f" {c.positions!r}"
            )
        self.source_embedding = nn.Embedding(c.vocab_size, c.d_model)
        theirs = c.target_vocab_size
        self.target_embedding = (
            self.source_embedding if theirs is None else nn.Embedding(theirs, c.d_model)
        )
        self.source_positions, self.target_positions = self._positions(), self._positions()
        self.encoder = self._stack(c.num_encoder_layers, decoder=False)
        self.decoder = self._stack(c.num_decoder_layers, decoder=True)
        self.head = Classifier(
            c.d_model, self.target_embedding.num_embeddings, bias=c.logits_bias,
            embedding=self.target_embedding if c.tied else None, label_smoothing=c.label_smoothing,
        )  # fmt: skip
        self.apply(self._initialise)

    def _positions(self) -> Positions:
        c = self.config
        if c.positions == "learned":
            return LearnedPositions(c.max_length, c.d_model)
        return SinusoidalPositions(
            c.max_length, c.d_model, halves=c.positions == "sinusoidal-halves"
        )

    def _stack(self, num_layers: int, decoder: bool) -> Stack:
        c = self.config

        def attention(cross: bool) -> MultiHeadAttention:
            return MultiHeadAttention(
                c.d_model,
                c.num_heads,
                cross=cross,
                head_dim=c.head_dim,
                value_dim=c.value_dim,
                dropout=c.attention_dropout,
            )

        def block(layer: int) -> Block:
            inner = network(
                c.experts,
                layer,
                c.d_model,
                c.hidden,
                activation=c.activation,
                dropout=c.activation_dropout,
            )
            return Block(
                attention(False), inner, lambda: LayerNorm(c.d_model), pre=c.norm == "pre",
                dropout=c.dropout,
                cross_attention=attention(True) if decoder else None,
            )  # fmt: skip

        last = LayerNorm(c.d_model) if c.final_norm or c.norm == "pre" else None
        return Stack(
            [block(i) for i in range(num_layers)], last, dropout=c.dropout, pre=c.norm == "pre"
        )

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) or (
            isinstance(module, Classifier) and not self.config.tied
        ):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            module.initialise(nn.init.xavier_uniform_)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.d_model**-0.5)

    def _parts(self) -> dict[str, str]:
        """Return the parts by name; each side has an embedding unless they share it."""
        sides = {
            f"{side}_{kind}": part for side, part in _SIDES for kind in ("embedding", "positions")
        }
        return (
            PARTS
            | sides
            | ({"source_embedding": "embeddings"} if self.config.target_vocab_size is None else {})
        )

    def _embed(
        self,
        ids: torch.Tensor,
        embedding: nn.Embedding,
        positions: Positions,
        start: int = 0,
        at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = embedding(self._rows(ids))
        at = self._places(at, ids.shape[1], ids.device)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        return x + positions(ids.shape[1], start, at).to(x.dtype)

    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, L, d_model) from (B, L); attention_mask as in :meth:`forward`."""
        x = self._embed(input_ids, self.source_embedding, self.source_positions)
        return self.encoder(x, padding(*self._keys(attention_mask, *input_ids.shape), queries=True))

    def decode(
        self,
        ids: torch.Tensor,
        step: Step,
        context: tuple[torch.Tensor, dict[str, Any]],
        cache: DecoderCache | None,
        at: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        at = step.position_ids if at is None else at
        x = self._embed(ids, self.target_embedding, self.target_positions, step.start, at)
        return self.decoder(x, step.visible, *context, cache, wanted)
