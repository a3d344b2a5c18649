# SPDX-License-Identifier: Apache-2.0
"""Patch embedding of images."""

from __future__ import annotations

import torch
from torch import nn

ImageSize = int | tuple[int, int]


def height_and_width(image_size: ImageSize) -> tuple[int, int]:
    """Return (height, width); raise ValueError unless it is a positive number or a pair of them."""
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or any(not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(
            "image_size must be a positive number, or a pair (height, width) of them, got"
            f" {image_size!r}"
        )
    return pair


class PatchEmbedding(nn.Module):
    """Square patches of an image, flattened and projected, (B, C, H, W) to (B, H W / P², d_model).

    A patch is flattened as (channel, row, column); patches are in row-major order. One gemm
    computes the convolution of kernel and stride P.

    Args:
        image_size: height and width, or one number for both. ``grid`` has the rows and columns of
            patches.

    Source: Dosovitskiy et al., "An image is worth 16x16 words" (2021), equation 1.
    """

    def __init__(self, image_size: ImageSize, patch_size: int, channels: int, d_model: int) -> None:
        super().__init__()
        height, width = height_and_width(image_size)
        if height % patch_size or width % patch_size:
            raise ValueError(
                f"PatchEmbedding: image_size {image_size} is not a multiple of patch_size"
                f" {patch_size}"
            )
        self.image_shape = (channels, height, width)
        self.grid = height // patch_size, width // patch_size
        self.patch_size, self.num_patches = patch_size, self.grid[0] * self.grid[1]
        self.projection = nn.Linear(channels * patch_size**2, d_model)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(
                f"pixel_values must be (B, {', '.join(map(str, self.image_shape))}), got"
                f" {tuple(images.shape)}"
            )
        p = self.patch_size
        # [B, rows, columns, C, P, P].
        patches = images.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)
        return self.projection(patches.flatten(3).flatten(1, 2))
