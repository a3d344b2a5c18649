# SPDX-License-Identifier: Apache-2.0
"""The Conformer's subsampling, convolution module and block."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import MultiHeadAttention
from .blocks import Residual, Stream
from .feed_forward import FeedForward
from .layer_norm import LayerNorm
from .relative import RelativeMultiHeadAttention


class _SecondConvolution(nn.Conv2d):
    """3 x 3 convolution of stride 2; for one output column it runs as a convolution over time.

    A bfloat16 Conv2d returns unwritten memory on CPUs with AMX (torch 2.13.0; stride 2, one column,
    several rows).
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] >= 5:
            return super().forward(x)
        columns = x[..., :3].transpose(2, 3).flatten(1, 2)
        weight = self.weight.transpose(2, 3).flatten(1, 2)
        return nn.functional.conv1d(columns, weight, self.bias, stride=2)[..., None]


class ConvolutionSubsampling(nn.Module):
    """Subsampling to a quarter of the frames.

    Two 3 x 3 convolutions of stride 2 with ReLU over (time, feature), then a linear map to d_model.
    Frame t of the result depends on the input frames 4 t to 4 t + 6 only, so padding affects no
    valid frame.

    Args:
        input_dim: features of a frame, at least 7.

    Source: Gulati et al. (2020), figure 1; Dong et al., "Speech-Transformer" (2018), section 3.2.
    """

    WINDOW, STRIDE = 7, 4

    def __init__(self, input_dim: int, d_model: int) -> None:
        super().__init__()
        if input_dim < self.WINDOW:
            raise ValueError(
                f"ConvolutionSubsampling: expected at least {self.WINDOW} features a frame, got"
                f" {input_dim}"
            )
        self.first = nn.Conv2d(1, d_model, 3, stride=2)
        self.second = _SecondConvolution(d_model, d_model, 3, stride=2)
        self.out = nn.Linear(d_model * self.frames(input_dim), d_model)

    @classmethod
    def frames(cls, length: int) -> int:
        """Return the number of output frames, one for each full window."""
        return max(0, (length - cls.WINDOW) // cls.STRIDE + 1)

    def kept(self, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the mask or lengths of the result, in the form of the input.

        A frame is valid if its window contains no padding.

        Args:
            attention_mask: (B, L) of 0 and 1 or bool, (B,) lengths, or None.
        """
        if attention_mask is None:
            return None
        if attention_mask.dim() == 1:
            return ((attention_mask - self.WINDOW) // self.STRIDE + 1).clamp_min(0)
        return attention_mask.bool().unfold(1, self.WINDOW, self.STRIDE).all(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, frames(L), d_model) from (B, L, input_dim)."""
        if x.shape[1] < self.WINDOW:
            raise ValueError(
                f"ConvolutionSubsampling: expected at least {self.WINDOW} frames, got {x.shape[1]}"
            )
        x = nn.functional.relu(self.first(x[:, None]))
        x = nn.functional.relu(self.second(x))  # [B, d_model, L', F']
        return self.out(x.transpose(1, 2).flatten(2))


class ConvolutionModule(nn.Module):
    """Pointwise convolution, GLU, depthwise convolution, batch norm, SiLU, pointwise convolution.

    Maps (B, L, d) to (B, L, d). The surrounding residual connection has the layer norm and the
    dropout.

    Args:
        kernel_size: size of the depthwise convolution, odd, so that it is centered.

    Source: Gulati et al., "Conformer" (2020), section 2.2; layout as in
    torchaudio.models.Conformer.
    """

    def __init__(self, d_model: int, kernel_size: int, bias: bool = True) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"ConvolutionModule: kernel_size must be odd, got {kernel_size}")
        self.pointwise_in = nn.Linear(d_model, 2 * d_model, bias)
        self.depthwise = nn.Conv1d(
            d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model, bias=bias
        )
        self.batch_norm = nn.BatchNorm1d(d_model)
        self.pointwise_out = nn.Linear(d_model, d_model, bias)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Return (B, L, d); padding, False in ``keep`` (B, L) bool, enters as zero."""
        x = nn.functional.glu(self.pointwise_in(x), -1)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0.0)
        x = self.batch_norm(self.depthwise(x.transpose(1, 2)))
        return self.pointwise_out(nn.functional.silu(x).transpose(1, 2))


class ConformerBlock(nn.Module):
    """A Conformer block: half feed-forward, self-attention, convolution, half feed-forward, norm.

    Each sub-layer has a pre-norm residual connection.

    Args:
        relative: use :class:`pytransformer.nn.RelativeMultiHeadAttention`, whose ``sinusoids`` come
            with the masks.

    Source: Gulati et al. (2020), equation 1.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        hidden: int,
        kernel_size: int,
        dropout: float = 0.0,
        relative: bool = False,
    ) -> None:
        super().__init__()

        def network() -> FeedForward:
            return FeedForward(d_model, hidden, activation="silu", dropout=dropout)

        self.first, self.second = network(), network()
        attention = RelativeMultiHeadAttention if relative else MultiHeadAttention
        self.attention = attention(d_model, num_heads, dropout=dropout)
        self.convolution = ConvolutionModule(d_model, kernel_size)
        self.residuals = nn.ModuleList(
            Residual(LayerNorm(d_model), p, pre=True) for p in (0.0, dropout, dropout, dropout)
        )
        self.norm, self.dropout = LayerNorm(d_model), dropout

    def forward(
        self, x: torch.Tensor, visible: dict[str, Any], keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (B, L, d) from x (B, L, d).

        Args:
            visible: masks of self-attention.
            keep: (B, L) bool, False at padding.
        """
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
