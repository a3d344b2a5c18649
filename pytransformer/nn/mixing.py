# SPDX-License-Identifier: Apache-2.0
"""What may take the place of self-attention in a block: a Fourier transform, or a network over the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops._core.options import ActivationName
from .feed_forward import FeedForward


class FourierMixing(nn.Module):
    """``Re(F_tokens(F_features(x)))``: two discrete Fourier transforms, no parameters. Every token, padding too, is mixed in.

    Source: Lee-Thorp et al., "FNet" (2022), equation 3.
    """

    def forward(self, x: torch.Tensor, **_visible: Any) -> torch.Tensor:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()  # there is no bfloat16 transform
        return torch.fft.fft2(wide, dim=(-2, -1)).real.to(x.dtype)


class TokenMixing(nn.Module):
    """``x^T -> w2 act(w1 x^T)``: a feed-forward network along the tokens, the same for each feature. Length is fixed.

    Source: Tolstikhin et al., "MLP-Mixer" (2021), equation 1.
    """

    def __init__(self, num_tokens: int, hidden: int, *, activation: ActivationName = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.network = FeedForward(num_tokens, hidden, activation=activation, dropout=dropout)

    def forward(self, x: torch.Tensor, **_visible: Any) -> torch.Tensor:
        num_tokens = self.network.w1.in_features
        if x.shape[-2] != num_tokens:
            raise ValueError(f"TokenMixing: made for {num_tokens} tokens, got {x.shape[-2]}")
        return self.network(x.transpose(-1, -2)).transpose(-1, -2)
