# SPDX-License-Identifier: Apache-2.0
"""The output of every model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..nn.cache import DecoderCache
from ..nn.heads import IGNORE


@dataclass
class Output:
    """Model output with Hugging Face's field names.

    The first access to ``logits`` computes them from the head's current weights. Training reads
    ``loss``, which the fused linear cross entropy computes without logits.

    Attributes:
        last_hidden_state: (B, L, d).
        loss: float32 scalar, if labels were given.
        pooler_output: (B, d), of models with a pooled first token.
        next_sentence_logits: (B, 2), of BERT's head ``"nsp"``.
        encoder_last_hidden_state: (B, Ls, d), of encoder-decoders.
        past_key_values: the given cache, extended by this call.
    """

    last_hidden_state: torch.Tensor
    loss: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    next_sentence_logits: torch.Tensor | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    past_key_values: DecoderCache | None = None
    compute_logits: Callable[[], torch.Tensor] | None = field(default=None, repr=False)
    _logits: torch.Tensor | None = field(default=None, repr=False)

    @property
    def logits(self) -> torch.Tensor:
        """Return (B, L, vocabulary), or (B, labels) of a classifier."""
        if self._logits is None:
            if self.compute_logits is None:
                raise AttributeError("this model has no head that gives logits; see its config")
            self._logits = self.compute_logits()
        return self._logits


def shifted_right(labels: torch.Tensor | None, start: int, pad: int) -> torch.Tensor:
    """Return decoder inputs for teacher forcing: ``start``, then all labels but the last.

    -100 becomes ``pad``.
    """
    if labels is None:
        raise ValueError("give decoder_input_ids, or labels to make them from")
    if labels.dim() != 2:
        raise ValueError(f"labels must have the shape (B, L), got {tuple(labels.shape)}")
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == IGNORE, pad)
