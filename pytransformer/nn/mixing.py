# SPDX-License-Identifier: Apache-2.0
"""Replacements of self-attention: a Fourier transform, a network over tokens, a convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.options import ActivationName
from .feed_forward import FeedForward
from .masks import kept


class FourierMixing(nn.Module):
    """FNet's ``Re(F_tokens(F_features(x)))``: two discrete Fourier transforms, no parameters.

    Every token is mixed in, including padding.

    Source: Lee-Thorp et al., "FNet" (2022), equation 3.
    """

    def forward(self, x: torch.Tensor, **_visible: Any) -> torch.Tensor:
        # The FFT has no bfloat16.
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return torch.fft.fft2(wide, dim=(-2, -1)).real.to(x.dtype)


class TokenMixing(nn.Module):
    """A feed-forward network along the tokens, ``x^T -> w2 act(w1 x^T)``, shared by all features.

    The length is fixed.

    Source: Tolstikhin et al., "MLP-Mixer" (2021), equation 1.
    """

    def __init__(
        self,
        num_tokens: int,
        hidden: int,
        *,
        activation: ActivationName = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.network = FeedForward(num_tokens, hidden, activation=activation, dropout=dropout)

    def forward(self, x: torch.Tensor, **_visible: Any) -> torch.Tensor:
        num_tokens = self.network.w1.in_features
        if x.shape[-2] != num_tokens:
            raise ValueError(f"TokenMixing: made for {num_tokens} tokens, got {x.shape[-2]}")
        return self.network(x.transpose(-1, -2)).transpose(-1, -2)


class SeparableMixing(nn.Module):
    """Depthwise separable convolution along the tokens, ``P gelu(D x)``.

    D convolves each feature along the tokens (depthwise); P mixes the features of each token
    (pointwise). A token sees ``kernel_size`` neighbors at any length.

    Args:
        kernel_size: odd; the size of both sides if there is a grid.
        grid: rows and columns of tokens that are image patches; None: a sequence of tokens, in
            which padding enters as zero.

    Source: Trockman and Kolter, "Patches Are All You Need?" (2022), section 3; Chollet, "Xception"
    (2017).
    """

    def __init__(
        self, d_model: int, kernel_size: int, *, grid: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"SeparableMixing: kernel_size must be odd, got {kernel_size}")
        convolution = nn.Conv1d if grid is None else nn.Conv2d
        self.grid = grid
        self.depthwise = convolution(
            d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model
        )
        self.pointwise = nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor, **visible: Any) -> torch.Tensor:
        """Return (B, L, d_model) from x (B, L, d_model) and padding on any side."""
        keep = kept(visible, x.shape[1], "SeparableMixing")
        if keep is not None:
            if self.grid is not None:
                raise ValueError(
                    "SeparableMixing: the patches of an image have no padding, got a mask"
                )
            x = x.masked_fill(~keep[..., None], 0.0)
        tokens = x.transpose(1, 2)
        if self.grid is not None:
            if x.shape[1] != self.grid[0] * self.grid[1]:
                raise ValueError(
                    f"SeparableMixing: made for {self.grid[0]} x {self.grid[1]} tokens, got"
                    f" {x.shape[1]}"
                )
            tokens = tokens.unflatten(2, self.grid)
        mixed = self.depthwise(tokens).flatten(2).transpose(1, 2)
        return self.pointwise(nn.functional.gelu(mixed))
