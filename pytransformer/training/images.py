# SPDX-License-Identifier: Apache-2.0
"""Labeled images from folders, one folder per class."""

from __future__ import annotations

from pathlib import Path

import torch

from ..extras import require
from ..nn.patches import ImageSize, height_and_width

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_image(path: str | Path, size: ImageSize, channels: int = 3) -> torch.Tensor:
    """Return a resized image as (channels, height, width), float32 in [-1, 1].

    Raises:
        ValueError: not an image, or a wrong number of channels.
        ImportError: Pillow is not installed.
    """
    if channels not in (1, 3):
        raise ValueError(f"an image has 3 channels (colour) or 1 (grey), got {channels}")
    height, width = height_and_width(size)
    try:
        with require("PIL.Image", "viz", "reading images").open(path) as image:
            resized = image.convert("RGB" if channels == 3 else "L").resize((width, height))
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, channels).permute(2, 0, 1).float().div(127.5).sub(1.0)


def image_shape(path: str | Path) -> tuple[int, int]:
    """Return (height, width) of an image file.

    Raises:
        ValueError: not an image.
        ImportError: Pillow is not installed.
    """
    try:
        with require("PIL.Image", "viz", "reading images").open(path) as image:
            return image.height, image.width
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


class ImageFolder:
    """Images of `root/<class>/<name>.png`, read by :func:`read_image`.

    Args:
        root: a folder with one folder per class; class numbers follow alphabetical order.
        size: height and width in pixels, or one number for both.
        channels: 3 for color, 1 for gray.

    Raises:
        ValueError: no class folder, no image in it, or a wrong number of channels.
        ImportError: Pillow is not installed.
    """

    def __init__(self, root: str | Path, size: ImageSize, channels: int = 3) -> None:
        if channels not in (1, 3):
            raise ValueError(f"ImageFolder: channels must be 1 or 3, got {channels}")
        require("PIL.Image", "viz", "reading images")
        self.root, self.size, self.channels = Path(root), size, channels
        self.classes = sorted(path.name for path in self.root.iterdir() if path.is_dir())
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.root / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.files:
            raise ValueError(
                f"ImageFolder: no image in {root}: expected {root}/<class>/<name> with one of"
                f" {', '.join(SUFFIXES)}"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        return read_image(path, self.size, self.channels), label


def collate_images(examples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Return {"pixel_values": (B, C, H, W), "labels": (B,)}."""
    return {
        "pixel_values": torch.stack([pixels for pixels, _ in examples]),
        "labels": torch.tensor([label for _, label in examples]),
    }
