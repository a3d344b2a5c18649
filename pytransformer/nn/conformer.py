# SPDX-License-Identifier: Apache-2.0
"""The Conformer's convolution module and block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import MultiHeadAttention
from .blocks import Residual, Stream
from .feed_forward import FeedForward
from .layer_norm import LayerNorm


class ConvolutionModule(nn.Module):
    """Pointwise convolution, GLU, depthwise convolution, batch norm, SiLU, pointwise convolution; (B, L, d) to (B, L, d).

    The layer norm before it and the dropout after it belong to the residual connection around it.

    Args:
        kernel_size: of the depthwise convolution, odd: it is centred.

    Source: Gulati et al., "Conformer" (2020), section 2.2; layout as in torchaudio.models.Conformer.
    """

    def __init__(self, d_model: int, kernel_size: int, bias: bool = True) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"ConvolutionModule: kernel_size must be odd, got {kernel_size}")
        self.pointwise_in = nn.Linear(d_model, 2 * d_model, bias)
        self.depthwise = nn.Conv1d(d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model, bias=bias)
        self.batch_norm = nn.BatchNorm1d(d_model)
        self.pointwise_out = nn.Linear(d_model, d_model, bias)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """keep: (B, L) bool, False at padding, which then enters the convolution as zero."""
        x = nn.functional.glu(self.pointwise_in(x), -1)
        if keep is not None:
            x = x * keep[..., None]
        x = self.batch_norm(self.depthwise(x.transpose(1, 2)))
        return self.pointwise_out(nn.functional.silu(x).transpose(1, 2))


class ConformerBlock(nn.Module):
    """Half a feed-forward network, self-attention, convolution, the other half, each in a pre-norm residual connection; a norm.

    Source: Gulati et al. (2020), equation 1.
    """

    def __init__(self, d_model: int, num_heads: int, hidden: int, kernel_size: int, dropout: float = 0.0) -> None:
        super().__init__()

        def network() -> FeedForward:
            return FeedForward(d_model, hidden, activation="silu", dropout=dropout)

        self.first, self.second = network(), network()
        self.attention = MultiHeadAttention(d_model, num_heads, dropout=dropout)
        self.convolution = ConvolutionModule(d_model, kernel_size)
        self.residuals = nn.ModuleList(Residual(LayerNorm(d_model), p, pre=True) for p in (0.0, dropout, dropout, dropout))
        self.norm, self.dropout = LayerNorm(d_model), dropout

    def forward(self, x: torch.Tensor, visible: dict[str, Any], keep: torch.Tensor | None = None) -> torch.Tensor:
        """x: (B, L, d). visible: masks of self-attention. keep: (B, L) bool, False at padding."""
        sublayers = (
            lambda h: 0.5 * self.first(h),
            lambda h: self.attention(h, **visible),
            lambda h: self.convolution(h, keep),
            lambda h: 0.5 * self.second(h),
        )
        stream = Stream(x)
        for residual, sublayer in zip(self.residuals, sublayers):
            stream = residual(stream, sublayer)
        return self.norm.add(*stream, self.dropout if self.training else 0.0)[0]
