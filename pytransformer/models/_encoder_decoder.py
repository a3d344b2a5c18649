# SPDX-License-Identifier: Apache-2.0
"""Base of encoder-decoders: calling convention, teacher forcing, cache steps and the loss."""

from __future__ import annotations

import abc
from typing import Any

import torch

from ..nn.cache import DecoderCache, Step
from ..nn.heads import IGNORE, Classifier, check_labels, learned
from ..nn.masks import padding
from ._base import Model, ModelConfig
from ._decoder import Decoder
from ._output import Output, shifted_right


class EncoderDecoderConfig(ModelConfig):
    """A config with the padding and start tokens.

    It is not a dataclass, so each model's config sets the order of its fields.
    """

    pad_token_id: int
    start_token_id: int


class EncoderDecoder(Decoder, Model, abc.ABC):
    """A model with :meth:`encode`, :meth:`decode` and a head.

    Its config has the padding and start tokens.
    """

    config: EncoderDecoderConfig
    head: Classifier
    takes_context = True

    @abc.abstractmethod
    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, L, d_model) from (B, L); attention_mask as in :meth:`forward`."""

    @abc.abstractmethod
    def decode(
        self,
        ids: torch.Tensor,
        step: Step,
        context: tuple[torch.Tensor, dict[str, Any]],
        cache: DecoderCache | None,
        at: torch.Tensor | None,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return hidden states (B, L, d_model) of the target.

        Args:
            ids: (B, L), after the cached tokens.
            step: their positions, and the masks of self-attention.
            context: the result of :meth:`encode`, and the masks of cross-attention.
            at: position ids; None means the step's.
            wanted: positions that are read; see :meth:`pytransformer.nn.Stack.forward`.
        """

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        encoder_outputs: Any = None,
        past_key_values: DecoderCache | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Output:
        """Return the decoder's output for a source and a target.

        Args:
            input_ids: (B, Ls) int64, the source; not needed with encoder_outputs.
            attention_mask: (B, Ls), 0 = padding on any side; or lengths (B,).
            decoder_input_ids: (B, L); None: labels shifted right. With a cache only the new tokens.
            decoder_attention_mask: (B, cached + L) or lengths (B,), cached tokens included.
            labels: (B, L), -100 is ignored.
            encoder_outputs: the result of :meth:`encode`, or an output with ``last_hidden_state``.
            past_key_values: a cache from :meth:`make_cache`, to which the call appends the new
                tokens and, in its first call, the source's keys.
            decoder_position_ids: (B, L), for a model with positions; None: counted from 0, or from
                each sequence's cached length.
            logits_to_keep: number of last positions with logits, counted from each sequence's end;
                0: all.
        """
        if encoder_outputs is None:
            if input_ids is None:
                raise ValueError("give input_ids, or encoder_outputs")
            encoder_outputs = self.encode(input_ids, attention_mask)
        memory = getattr(encoder_outputs, "last_hidden_state", encoder_outputs)
        if decoder_input_ids is None:
            decoder_input_ids = shifted_right(
                labels, self.config.start_token_id, self.config.pad_token_id
            )
        if labels is not None:
            check_labels(labels, decoder_input_ids.shape)
        step = self._step(past_key_values, decoder_input_ids, decoder_attention_mask)
        if self.context is not None and input_ids is None:
            raise ValueError("in context_parallel give input_ids, which have the source's length")
        source = (
            memory.shape[1] if self.context is None or input_ids is None else input_ids.shape[1]
        )
        context = memory, padding(*self._keys(attention_mask, memory.shape[0], source))
        labels = None if labels is None else self._rows(labels, IGNORE)
        hidden = self.decode(
            decoder_input_ids, step, context, past_key_values, decoder_position_ids, learned(labels)
        )
        loss = None if labels is None else self._mean_loss(self.head, hidden, labels)
        return Output(
            hidden, self._with_balance(loss), encoder_last_hidden_state=memory,
            past_key_values=past_key_values,
            compute_logits=lambda: self.head(step.last(hidden, logits_to_keep)),
        )  # fmt: skip
