# SPDX-License-Identifier: Apache-2.0
"""What may take the place of self-attention in a block: a Fourier transform, a network over the tokens, a convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops._core.options import ActivationName
from .feed_forward import FeedForward
from .masks import kept


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


class SeparableMixing(nn.Module):
    """``P gelu(D x)``: each feature convolved along the tokens (depthwise, D), then the features of each token mixed (pointwise, P).

    A token sees ``kernel_size`` neighbours, whatever the length; the mixing of a depthwise separable convolution, in attention's place.

    Args:
        kernel_size: odd; of each side where there is a grid.
        grid: rows and columns, of tokens that are the patches of an image; None: tokens in a line, where padding enters as zero.

    Source: Trockman and Kolter, "Patches Are All You Need?" (2022), section 3; Chollet, "Xception" (2017).
    """

    def __init__(self, d_model: int, kernel_size: int, *, grid: tuple[int, int] | None = None) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"SeparableMixing: kernel_size must be odd, got {kernel_size}")
        convolution = nn.Conv1d if grid is None else nn.Conv2d
        self.grid = grid
        self.depthwise = convolution(d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model)
        self.pointwise = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, **visible: Any) -> torch.Tensor:
        """(B, L, d_model); visible: padding, on any side."""
        keep = kept(visible, x.shape[1], "SeparableMixing")
        if keep is not None:
            if self.grid is not None:
                raise ValueError("SeparableMixing: the patches of an image have no padding, got a mask")
            x = x.masked_fill(~keep[..., None], 0.0)
        tokens = x.transpose(1, 2)
        if self.grid is not None:
            if x.shape[1] != self.grid[0] * self.grid[1]:
                raise ValueError(f"SeparableMixing: made for {self.grid[0]} x {self.grid[1]} tokens, got {x.shape[1]}")
            tokens = tokens.unflatten(2, self.grid)
        mixed = self.depthwise(tokens).flatten(2).transpose(1, 2)
        return self.pointwise(nn.functional.gelu(mixed))
