# SPDX-License-Identifier: Apache-2.0
"""FNet, a BERT with Fourier transforms in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..nn.mixing import FourierMixing
from ..ops.options import ActivationName
from . import _hugging_face
from .bert import BERT, BERTConfig


@dataclass(frozen=True)
class FNetConfig(BERTConfig):
    """Configuration of :class:`FNet`; num_heads and attention_dropout are unused."""

    vocab_size: int = 32000
    activation: ActivationName = "gelu_tanh"
    num_segments: int = 4


class FNet(BERT):
    """An encoder without attention.

    ``attention_mask`` has no effect, because a Fourier transform mixes in padding too.

    Source: Lee-Thorp et al., "FNet: Mixing Tokens with Fourier Transforms" (2022).
    """

    config: FNetConfig
    Config = FNetConfig
    PRESETS: ClassVar = {
        "base": FNetConfig(),
        "large": FNetConfig(d_model=1024, num_layers=24, hidden=4096),
    }
    CONVERSIONS: ClassVar = {"fnet": _hugging_face.FNET}

    def __init__(self, config: FNetConfig) -> None:
        super().__init__(config)
        self.projection = nn.Linear(config.d_model, config.d_model)
        self._initialise(self.projection)

    def _mixing(self) -> nn.Module:
        return FourierMixing()

    def _embed(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None) -> torch.Tensor:
        return self.projection(super()._embed(input_ids, token_type_ids))
