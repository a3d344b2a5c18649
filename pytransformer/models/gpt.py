# SPDX-License-Identifier: Apache-2.0
"""GPT, a causal decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..nn.attention import MultiHeadAttention
from ..nn.blocks import Block, Stack
from ..nn.cache import DecoderCache
from ..nn.experts import Experts, MixtureOfExperts, network
from ..nn.feed_forward import FeedForward
from ..nn.heads import IGNORE, Classifier, check_labels, learned
from ..nn.layer_norm import LayerNorm
from ..nn.positions import Alibi, LearnedPositions
from ..nn.rotary import RotaryMultiHeadAttention
from ..ops.options import ActivationName
from ..ops.rotary_positions import RotaryPositions
from . import _hugging_face
from ._base import Model, ModelConfig
from ._decoder import Decoder
from ._output import Output


@dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """Configuration of :class:`GPT`.

    Attributes:
        positions: ``"learned"``, ``"rotary"`` as in Llama, or ``"alibi"`` for sequences longer than
            in training.
        window: number of preceding tokens that attention sees; None: all.
        hidden: None means 4 d_model.
        num_kv_heads: None means num_heads.
        experts: mixtures in place of feed-forward networks, the arguments of
            :class:`pytransformer.nn.MixtureOptions`.
    """

    vocab_size: int = 50257
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    hidden: int | None = None
    activation: ActivationName = "gelu_tanh"
    max_length: int = 1024
    positions: str = "learned"
    window: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.1
    tied: bool = True
    label_smoothing: float = 0.0
    eps: float = 1e-5
    experts: dict[str, Any] | None = None


class GPT(Decoder, Model):
    """Decoder-only language model, pre-norm, as GPT-2.

    It trains on all next tokens in one pass. In the optional prefix-LM mode every token sees the
    prompt's ``prefix_lengths`` tokens.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    """

    config: GPTConfig
    Config = GPTConfig
    takes_context = True
    PRESETS: ClassVar = {
        "base": GPTConfig(),
        "medium": GPTConfig(d_model=1024, num_layers=24, num_heads=16),
        "large": GPTConfig(d_model=1280, num_layers=36, num_heads=20),
        "xl": GPTConfig(d_model=1600, num_layers=48, num_heads=25),
    }
    CONVERSIONS: ClassVar = {"gpt2": _hugging_face.GPT2}

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        c = config
        if c.positions not in ("learned", "rotary", "alibi"):
            raise ValueError(
                f"GPTConfig: positions must be 'learned', 'rotary' or 'alibi', got {c.positions!r}"
            )
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = (
            LearnedPositions(c.max_length, c.d_model) if c.positions == "learned" else None
        )
        self.alibi = Alibi(c.num_heads) if c.positions == "alibi" else None
        self.rotary = RotaryPositions(c.d_model // c.num_heads) if c.positions == "rotary" else None

        def block(layer: int) -> Block:
            kind = (
                MultiHeadAttention
                if self.rotary is None
                else partial(RotaryMultiHeadAttention, rotary=self.rotary)
            )
            attention = kind(
                c.d_model, c.num_heads, num_kv_heads=c.num_kv_heads, dropout=c.attention_dropout
            )
            inner = network(
                c.experts, layer, c.d_model, c.hidden or 4 * c.d_model, activation=c.activation
            )
            return Block(
                attention, inner, lambda: LayerNorm(c.d_model, c.eps), dropout=c.dropout, pre=True
            )

        self.decoder = Stack(
            [block(i) for i in range(c.num_layers)],
            LayerNorm(c.d_model, c.eps),
            dropout=c.dropout,
            pre=True,
        )
        self.head = Classifier(
            c.d_model,
            c.vocab_size,
            bias=False,
            embedding=self.embedding if c.tied else None,
            label_smoothing=c.label_smoothing,
        )
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding, Classifier)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            module.initialise(lambda matrix: nn.init.normal_(matrix, std=0.02))
        if isinstance(module, Block):  # scale residual outputs down with depth
            attention, inner = module.mixing, module.feed_forward
            assert isinstance(attention, MultiHeadAttention) and isinstance(
                inner, (FeedForward, MixtureOfExperts)
            )
            for weight in (
                attention.out.weight,
                inner.w2.weight if isinstance(inner, FeedForward) else inner.experts.w2,
            ):
                with torch.no_grad():
                    weight.mul_((2 * self.config.num_layers) ** -0.5)

    def _why_no_tree(self) -> str | None:
        if self.alibi is None and self.config.window is None:
            return None
        return "ALiBi's distances and the window go by the places of tokens in the cache"

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        past_key_values: DecoderCache | None = None,
        prefix_lengths: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Output:
        """Return the output for tokens.

        Args:
            input_ids: (B, L) int64; with a cache only the new tokens.
            attention_mask: (B, cached + L), 0 = padding on any side; or lengths (B,), cached tokens
                included; or with a cache, for speculative decoding, (B, L, cached + L) bool: the
                tokens are a tree and see the cache, their ancestors and themselves.
            labels: (B, L), usually input_ids; the loss shifts them to the next token. -100 is
                ignored.
            position_ids: (B, L); None: counted from 0, or from each sequence's cached length,
                including padding. See :func:`pytransformer.nn.position_ids`.
            past_key_values: a cache from :meth:`make_cache`, to which the call appends the new
                tokens.
            prefix_lengths: (B,): all tokens see the first prefix_lengths tokens.
            logits_to_keep: number of last positions with logits, counted from each sequence's end;
                0: all.
        """
        if labels is not None:
            check_labels(labels, input_ids.shape)
        step = self._step(past_key_values, input_ids, attention_mask)
        x = self.embedding(self._rows(input_ids))
        if self.positions is not None:
            at, length = (
                step.position_ids if position_ids is None else position_ids,
                input_ids.shape[1],
            )
            x = x + self.positions(length, step.start, self._places(at, length, x.device))
        visible: dict[str, Any] = {**step.visible}
        if self.alibi is not None:
            visible["bias"] = self.alibi()
        # Without a cache, packing may remove padding and its positions.
        if self.rotary is not None and past_key_values is not None:
            visible["tables"] = self.rotary.tables(step.places(input_ids.shape[1], x.device))
        if self.config.window is not None:
            visible["window"] = (self.config.window, None)
        if prefix_lengths is not None:
            visible["prefix_lengths"] = prefix_lengths
        following = (
            None
            if labels is None
            else self._rows(nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE), IGNORE)
        )
        hidden = self.decoder(x, visible, cache=past_key_values, wanted=learned(following))
        loss = (
            None
            if following is None
            else self._with_balance(self._mean_loss(self.head, hidden, following))
        )
        return Output(
            hidden,
            loss,
            past_key_values=past_key_values,
            compute_logits=lambda: self.head(step.last(hidden, logits_to_keep)),
        )
