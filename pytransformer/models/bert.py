# SPDX-License-Identifier: Apache-2.0
"""BERT, an encoder with pretraining and fine-tuning heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import Self

from ..nn.attention import MultiHeadAttention
from ..nn.blocks import Block, Stack
from ..nn.experts import Experts, network
from ..nn.heads import IGNORE, Classifier, check_labels, learned
from ..nn.layer_norm import LayerNorm
from ..nn.masks import padding
from ..nn.patterns import Pattern
from ..nn.positions import LearnedPositions
from ..ops.options import ActivationName
from ..reference._feed_forward import ACTIVATIONS
from . import _hugging_face
from ._base import Model, ModelConfig
from ._output import Output

HEADS = ("mlm", "nsp", "boundary", "classification", "tagging", "answer")
FINE_TUNED = (
    "classification",
    "tagging",
    "answer",
)  # at most one per model; it defines labels and logits
MAX_SPAN = 10  # tokens of a masked span, as in SpanBERT


@dataclass(frozen=True)
class BERTConfig(ModelConfig):
    """Configuration of :class:`BERT`.

    Attributes:
        heads: any of ``"mlm"``, ``"nsp"`` (next sentence), ``"boundary"`` (SpanBERT), and one of
            ``"classification"`` (of [CLS]), ``"tagging"`` (per token) and ``"answer"`` (first and
            last token of an answer in the text).
        pooler: the tanh layer on the first token, which nsp and classification require.
        num_labels: classes of classification or tagging.
        pattern: attention pattern, the arguments of :class:`pytransformer.nn.Pattern`, for example
            ``{"make": "longformer", "window": 512, "global_tokens": 1}``.
        experts: mixtures in place of feed-forward networks, the arguments of
            :class:`pytransformer.nn.MixtureOptions`.
    """

    vocab_size: int = 30522
    d_model: int = 768
    num_layers: int = 12
    num_heads: int = 12
    hidden: int = 3072
    activation: ActivationName = "gelu"
    max_length: int = 512
    num_segments: int = 2
    dropout: float = 0.1
    attention_dropout: float = 0.1
    heads: tuple[str, ...] = ("mlm", "nsp")
    pooler: bool = True
    num_labels: int = 2
    eps: float = 1e-12
    pattern: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None


class BERT(Model):
    """Post-norm encoder with learned positions and segments.

    Source: Devlin et al., "BERT" (2019); the boundary head: Joshi et al., "SpanBERT" (2020),
    section 3.2.
    """

    config: BERTConfig
    Config = BERTConfig
    PRESETS: ClassVar = {
        "base": BERTConfig(),
        "large": BERTConfig(d_model=1024, num_layers=24, num_heads=16, hidden=4096),
    }
    CONVERSIONS: ClassVar = {"bert": _hugging_face.BERT}

    def __init__(self, config: BERTConfig) -> None:
        super().__init__(config)
        c = config
        if unknown := set(c.heads) - set(HEADS):
            raise ValueError(
                f"{type(c).__name__}: heads are {', '.join(HEADS)}; got"
                f" {', '.join(sorted(unknown))}"
            )
        if not c.pooler and {"nsp", "classification"} & set(c.heads):
            raise ValueError(
                f"{type(c).__name__}: the heads nsp and classification need pooler=True"
            )
        if len(tuned := [head for head in FINE_TUNED if head in c.heads]) > 1:
            raise ValueError(
                f"{type(c).__name__}: one of the heads {', '.join(FINE_TUNED)} at a time; got"
                f" {', '.join(tuned)}"
            )
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = LearnedPositions(c.max_length, c.d_model)
        self.segments = nn.Embedding(c.num_segments, c.d_model)
        self.embedding_norm = LayerNorm(c.d_model, c.eps)
        # Shared by all layers, so each mask is built once.
        self._pattern = None if c.pattern is None else Pattern(**c.pattern)
        self.encoder = Stack([self._block(i) for i in range(c.num_layers)], None, dropout=c.dropout)
        self.pooler = nn.Linear(c.d_model, c.d_model) if c.pooler else None
        self.mlm = VocabularyHead(c, self.embedding) if "mlm" in c.heads else None
        self.nsp = Classifier(c.d_model, 2) if "nsp" in c.heads else None
        self.boundary = BoundaryHead(c, self.embedding) if "boundary" in c.heads else None
        self.classifier = (
            Classifier(c.d_model, c.num_labels)
            if {"classification", "tagging"} & set(c.heads)
            else None
        )
        self.answer = Classifier(c.d_model, 2) if "answer" in c.heads else None
        self.apply(self._initialise)

    def _mixing(self) -> nn.Module:
        c = self.config
        return MultiHeadAttention(
            c.d_model, c.num_heads, dropout=c.attention_dropout, pattern=self._pattern
        )

    def _block(self, layer: int) -> Block:
        c = self.config
        inner = network(c.experts, layer, c.d_model, c.hidden, activation=c.activation)
        return Block(self._mixing(), inner, lambda: LayerNorm(c.d_model, c.eps), dropout=c.dropout)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding, Classifier)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, (nn.Linear, Classifier)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Experts):
            module.initialise(lambda matrix: nn.init.normal_(matrix, std=0.02))

    def with_heads(self, *heads: str, num_labels: int | None = None) -> Self:
        """Return a model with a copy of this trunk and the named heads, for fine-tuning.

        Heads that this model lacks are untrained.
        """
        c = self.config
        pooler = c.pooler or heads != ("mlm",)
        config = dataclasses.replace(
            c, heads=heads, num_labels=num_labels or c.num_labels, pooler=pooler
        )
        model = type(self)(config).to(self.embedding.weight.device, self.embedding.weight.dtype)
        mine, theirs = self.state(), model.state()
        with torch.no_grad():
            for name in mine.keys() & theirs.keys():
                if mine[name].shape == theirs[name].shape:
                    theirs[name].copy_(mine[name])
        return model.train(self.training)

    def _embed(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        place = self.segments(token_type_ids) + self.positions(input_ids.shape[1])
        return self.embedding_norm.add(self.embedding(input_ids), place)[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        next_sentence_label: torch.Tensor | None = None,
        span_bounds: torch.Tensor | None = None,
    ) -> Output:
        """Return the output for tokens, with ``loss`` summed over the given labels.

        Args:
            input_ids: (B, L) int64.
            attention_mask: (B, L), 0 = padding on any side; or lengths (B,).
            token_type_ids: (B, L) segments; None: all 0.
            labels: (B, L) original tokens at masked positions and -100 elsewhere; (B,) classes for
                ``"classification"``; (B, L) classes for ``"tagging"``; (B, 2) positions of an
                answer's first and last token for ``"answer"``. -100 is ignored.
            next_sentence_label: (B,), 0 if the second sentence follows the first.
            span_bounds: (B, L, 2), for the boundary loss: positions of the tokens before and after
                the span of each masked token; unused if labels are -100.

        Returns:
            ``logits`` of the vocabulary, or of the classes, or (B, L, 2) of the answer's ends, with
                the dtype's minimum at padding.
        """
        visible = padding(attention_mask, *input_ids.shape, queries=True)
        tuned = self.classifier is not None or self.answer is not None
        if labels is not None:
            check_labels(labels, self._shape_of_labels(*input_ids.shape))
        wanted = None if tuned else learned(labels)
        hidden = self.encoder(self._embed(input_ids, token_type_ids), visible, wanted=wanted)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        losses: list[torch.Tensor] = []
        logits: Callable[[], torch.Tensor] | None = None
        mlm = self.mlm
        if tuned:
            logits, loss = self._fine_tuned(hidden, pooled, attention_mask, labels)
            losses += [] if loss is None else [loss]
        elif mlm is not None:
            logits = lambda: mlm(hidden)
        if labels is not None and not tuned:
            masked = labels != IGNORE  # the vocabulary is large and masked tokens are few
            losses += [] if mlm is None else [mlm.loss(hidden[masked], labels[masked])]
            if self.boundary is not None and span_bounds is not None:
                losses.append(self.boundary.loss(hidden, labels, span_bounds))
        if next_sentence_label is not None:
            if self.nsp is None:
                raise ValueError("next_sentence_label was given to a BERT without the head 'nsp'")
            assert pooled is not None
            losses.append(self.nsp.loss(pooled, next_sentence_label))
        if labels is not None and not losses:
            raise ValueError(
                f"labels were given to a BERT whose heads {self.config.heads} have no loss for them"
            )
        return Output(
            hidden, self._with_balance(sum(losses[1:], losses[0]) if losses else None),
            pooler_output=pooled, compute_logits=logits,
            next_sentence_logits=None if self.nsp is None else self.nsp(pooled),
        )  # fmt: skip

    def _shape_of_labels(self, batch: int, length: int) -> tuple[int, ...]:
        heads = self.config.heads
        if "answer" in heads:
            return (batch, 2)
        return (batch,) if "classification" in heads else (batch, length)

    def _fine_tuned(
        self,
        hidden: torch.Tensor,
        pooled: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        labels: torch.Tensor | None,
    ) -> tuple[Callable[[], torch.Tensor], torch.Tensor | None]:
        """Return the logits and the loss of the model's head of FINE_TUNED."""
        if (answer := self.answer) is not None:
            logits = answer(hidden)
            if attention_mask is not None:  # no answer starts or ends in padding
                by_length = attention_mask.dim() == 1
                place = torch.arange(hidden.shape[1], device=hidden.device)
                real = place < attention_mask[:, None] if by_length else attention_mask.bool()
                logits = logits.masked_fill(~real[..., None], torch.finfo(logits.dtype).min)
            return lambda: logits, None if labels is None else answer_loss(logits, labels)
        classifier = self.classifier
        assert classifier is not None
        x = hidden if "tagging" in self.config.heads else pooled
        assert x is not None  # classification requires the pooler
        x = nn.functional.dropout(x, self.config.dropout, self.training)
        return lambda: classifier(x), None if labels is None else classifier.loss(x, labels)


def answer_loss(logits: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of an answer's first and last token over the text.

    Args:
        logits: (B, L, 2).
        ends: (B, 2) int64; -100 and positions beyond the text (a truncated answer) are ignored.

    Source: Devlin et al., "BERT" (2019), section 4.2.
    """
    length = logits.shape[1]
    ends = torch.where((ends < 0) | (ends >= length), IGNORE, ends)
    losses = [
        nn.functional.cross_entropy(logits[..., n].float(), ends[:, n], ignore_index=IGNORE)
        for n in (0, 1)
    ]
    return (losses[0] + losses[1]) / 2


def best_answers(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely answer of each text, (B, 2) int64.

    It is the first and last token i <= j that maximize start_i + end_j. Independent maxima could
    belong to two answers.

    Args:
        logits: (B, L, 2).

    Source: Devlin et al., "BERT" (2019), section 4.2.
    """
    starts, ends = logits.float().unbind(-1)
    before = starts.cummax(-1)  # best start at or before each position
    last = (before.values + ends).argmax(-1, keepdim=True)
    return torch.cat([before.indices.gather(-1, last), last], -1)


class Transform(nn.Module):
    """Dense layer, activation and norm: ``norm(act(x W + b))``."""

    def __init__(self, config: BERTConfig, d_in: int) -> None:
        super().__init__()
        self.dense = nn.Linear(d_in, config.d_model)
        self.activation = config.activation
        self.norm = LayerNorm(config.d_model, config.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))


class VocabularyHead(nn.Module):
    """A transform, then the vocabulary logits through the embedding."""

    def __init__(self, config: BERTConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.transform = Transform(config, config.d_model)
        self.output = Classifier(config.d_model, config.vocab_size, embedding=embedding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.transform(x))

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.output.loss(self.transform(x), labels)


class BoundaryHead(nn.Module):
    """SpanBERT's objective: predict a masked span's token from the tokens outside its ends.

    ``f([x_l; x_r; P_p])`` predicts the token at position p of the span. f is two transforms; the
    logits use the embedding. P has one vector per position in a span, 1 to MAX_SPAN.
    """

    def __init__(self, config: BERTConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.places = nn.Embedding(MAX_SPAN, config.d_model)
        self.first, self.second = (
            Transform(config, 3 * config.d_model),
            Transform(config, config.d_model),
        )
        self.output = Classifier(config.d_model, config.vocab_size, embedding=embedding)

    def predicted(
        self, hidden: torch.Tensor, masked: torch.Tensor, span_bounds: torch.Tensor
    ) -> torch.Tensor:
        """Return (N, d) for the N masked tokens.

        Args:
            hidden: (B, L, d).
            masked: (B, L) bool.
            span_bounds: (B, L, 2).
        """
        row, token = masked.nonzero(as_tuple=True)
        left, right = span_bounds[row, token].unbind(-1)
        place = token - left - 1
        if bool(((place < 0) | (place >= MAX_SPAN) | (right <= token)).any()):
            raise ValueError(
                f"span_bounds: a masked token must lie between its bounds, at most {MAX_SPAN} after"
                " the first"
            )
        return self.second(
            self.first(torch.cat([hidden[row, left], hidden[row, right], self.places(place)], -1))
        )

    def loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, span_bounds: torch.Tensor
    ) -> torch.Tensor:
        masked = labels != IGNORE
        return self.output.loss(self.predicted(hidden, masked, span_bounds), labels[masked])
