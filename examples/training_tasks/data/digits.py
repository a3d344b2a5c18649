# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits from scikit-learn, as images, gray-level sequences and strips.

1,797 images of 8 x 8 pixels with gray levels 0 to 16, the test half of "Optical Recognition of
Handwritten Digits" (Alpaydin and Kaynak, 1998; UCI repository, CC BY 4.0). The last third is held
out. A random third is easier (0.970 instead of 0.923 for logistic regression), probably because
writers are grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytransformer.extras import require
from pytransformer.nn.patches import ImageSize, height_and_width
from pytransformer.training.batching import IGNORED, Batch, Collate, pad

CLASSES, SIDE, LEVELS, HELD_OUT = 10, 8, 17, 597


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, height, width), float32 in [-1, 1], and labels (n,), int64, 0 to 9.

    An element is an image with its label.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])

    def __len__(self) -> int:
        return self.labels.shape[0]

    def part(self, start: int, end: int) -> Digits:
        return Digits(self.images[start:end], self.labels[start:end])


def load_digits() -> tuple[Digits, Digits]:
    """Return 1,200 training digits and 597 held-out ones.

    Raises:
        ImportError: scikit-learn is not installed (extra ``corpora``).
    """
    found = require("sklearn.datasets", "corpora", "the handwritten digits").load_digits()
    images = torch.from_numpy(found.images).float()[:, None] / 8.0 - 1.0
    labels = torch.from_numpy(found.target).long()
    whole = Digits(images, labels)
    return whole.part(0, len(whole) - HELD_OUT), whole.part(len(whole) - HELD_OUT, len(whole))


def logistic_regression(train: Digits, held_out: Digits) -> float:
    """Return the held-out accuracy of scikit-learn's LogisticRegression on the pixels."""
    linear = require("sklearn.linear_model", "corpora", "logistic regression").LogisticRegression(
        max_iter=2000
    )
    linear.fit(train.images.flatten(1).numpy(), train.labels.numpy())
    return float(linear.score(held_out.images.flatten(1).numpy(), held_out.labels.numpy()))


def drawn_at(digits: Digits, size: ImageSize) -> Digits:
    """Return the same digits resized (bicubic); `size` may be rectangular."""
    size = height_and_width(size)
    if size == tuple(digits.images.shape[2:]):
        return digits
    images = torch.nn.functional.interpolate(
        digits.images, size, mode="bicubic", align_corners=False
    )
    return Digits(images.clamp(-1.0, 1.0), digits.labels)


def image_collate(shift: int = 0) -> Collate:
    """Return a collate of images that shifts each by up to ``shift`` pixels in any direction.

    The batch is {"pixel_values": (B, 1, H, W), "labels": (B,)}.
    """

    def collate(examples: list[tuple[torch.Tensor, int]], generator: torch.Generator) -> Batch:
        images = torch.stack([image for image, _ in examples])
        if shift:
            height, width = images.shape[2:]
            wide = torch.nn.functional.pad(images, [shift] * 4, value=-1.0)
            moves = torch.randint(
                0, 2 * shift + 1, (len(examples), 2), generator=generator
            ).tolist()
            images = torch.stack(
                [image[:, y : y + height, x : x + width] for image, (y, x) in zip(wide, moves)]
            )
        return {"pixel_values": images, "labels": torch.tensor([label for _, label in examples])}

    return collate


def level_collate(shift: int = 0) -> Collate:
    """Return a collate of gray-level sequences, shifted like :func:`image_collate`.

    The batch is {"input_ids": (B, 1 + 64), "labels": (B,)}: a start token, 17, and the gray level
    of each pixel, row by row.
    """
    moved = image_collate(shift)

    def collate(examples: list[tuple[torch.Tensor, int]], generator: torch.Generator) -> Batch:
        batch = moved(examples, generator)
        levels = ((batch["pixel_values"] + 1.0) * 8.0).round().long().flatten(1)
        return {
            "input_ids": torch.nn.functional.pad(levels, (1, 0), value=LEVELS),
            "labels": batch["labels"],
        }

    return collate


class Strip(NamedTuple):
    """A row of digits: features (L, rows), one pixel column per frame, and the digits."""

    features: torch.Tensor
    digits: list[int]


def make_strips(
    digits: Digits,
    count: int,
    generator: torch.Generator,
    *,
    longest: int = 6,
    rows: int = 16,
    noise: float = 0.2,
) -> list[Strip]:
    """Return strips of 2 to ``longest`` digits with normal noise.

    Each digit is 12 to 20 columns wide, and 0 to 6 blank columns separate digits.
    """

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def paper(columns: int) -> torch.Tensor:
        return torch.full((rows, columns), -1.0)

    made = []
    for _ in range(count):
        chosen = [number(0, len(digits) - 1) for _ in range(number(2, longest))]
        parts = [paper(number(3, 8))]
        for index in chosen:
            parts += [
                drawn_at(digits.part(index, index + 1), (rows, number(12, 20))).images[0, 0],
                paper(number(0, 6)),
            ]
        strip = torch.cat([*parts, paper(number(3, 8))], 1).T
        made.append(
            Strip(
                strip + noise * torch.randn(strip.shape, generator=generator),
                digits.labels[chosen].tolist(),
            )
        )
    return made


def strip_collate() -> Collate:
    """Return a collate of strips; digits are classes 1 to 10, and 0 is CTC's blank.

    The batch is {"input_features": (B, L, rows), "attention_mask": (B,) lengths, "labels": (B, S)}.
    """

    def collate(examples: list[Strip], generator: torch.Generator) -> Batch:
        return {
            "input_features": torch.nn.utils.rnn.pad_sequence(
                [strip.features for strip in examples], True
            ),
            "attention_mask": torch.tensor([len(strip.features) for strip in examples]),
            "labels": pad([[digit + 1 for digit in strip.digits] for strip in examples], IGNORED),
        }

    return collate


def edits(said: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the edit distance of two sequences (Levenshtein 1966)."""
    row = list(range(len(wanted) + 1))
    for i, one in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


def reading_errors(model: Any, batches: Sequence[Batch]) -> dict[str, float]:
    """Return ``digit_errors``, edits per digit, and ``exact``, the share of strips without any."""
    wrong = digits = right = strips = 0
    for batch in batches:
        said = model.read(batch["input_features"], batch["attention_mask"])
        for one, labels in zip(said, batch["labels"]):
            wanted = labels[labels != IGNORED].tolist()
            far = edits(one, wanted)
            wrong, digits, right, strips = (
                wrong + far,
                digits + len(wanted),
                right + (far == 0),
                strips + 1,
            )
    return {"digit_errors": wrong / digits, "exact": right / strips}
