# SPDX-License-Identifier: Apache-2.0
"""An image as a sequence."""

from __future__ import annotations

import torch
from torch import nn


class PatchEmbedding(nn.Module):
    """Square patches of an image, flattened (channel, row, column) and projected: (B, C, S, S) to (B, (S / P)², d_model).

    The same map as a convolution of kernel and stride P, as one matrix product.

    Source: Dosovitskiy et al., "An image is worth 16x16 words" (2021), equation 1.
    """

    def __init__(self, image_size: int, patch_size: int, channels: int, d_model: int) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"PatchEmbedding: image_size {image_size} is not a multiple of patch_size {patch_size}")
        self.image_shape = (channels, image_size, image_size)
        self.patch_size, self.num_patches = patch_size, (image_size // patch_size) ** 2
        self.projection = nn.Linear(channels * patch_size**2, d_model)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dim() != 4 or tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(f"pixel_values must be (B, {', '.join(map(str, self.image_shape))}), got {tuple(images.shape)}")
        p = self.patch_size
        patches = images.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)  # B, rows, columns, C, P, P
        return self.projection(patches.flatten(3).flatten(1, 2))
