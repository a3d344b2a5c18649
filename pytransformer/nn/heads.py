# SPDX-License-Identifier: Apache-2.0
"""Classifier heads, with a loss that does not store the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import nn

from ..ops.cross_entropy import linear_cross_entropy
from .linear import linear
from .packing import select, worth_selecting

IGNORE = -100


@overload
def learned(labels: torch.Tensor) -> torch.Tensor: ...
@overload
def learned(labels: torch.Tensor | None) -> torch.Tensor | None: ...
def learned(labels: torch.Tensor | None) -> torch.Tensor | None:
    """Return a bool mask of the labels to learn; None without labels."""
    return None if labels is None else labels != IGNORE


def check_labels(labels: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless labels have exactly this shape; others could match once flattened."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"labels must have the shape {tuple(shape)}, got {tuple(labels.shape)}")


class Classifier(nn.Module):
    """``x W^T + b`` over classes or a vocabulary, with cross entropy.

    Source of the loss: :func:`pytransformer.linear_cross_entropy`.

    Args:
        embedding: provides the weight (tied).
        scale: multiplies x (T5's tied head).
        label_smoothing: applied in training only, so a validation loss is the plain cross entropy.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        d_model: int,
        classes: int,
        *,
        bias: bool = True,
        embedding: nn.Embedding | None = None,
        scale: float = 1.0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if embedding is None:
            linear = nn.Linear(d_model, classes, bias)
            self.weight, self.bias = linear.weight, linear.bias
        else:
            self.weight = embedding.weight
            self.bias = nn.Parameter(torch.zeros(classes)) if bias else None
        self.scale, self.label_smoothing = scale, label_smoothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x * self.scale if self.scale != 1.0 else x, self.weight, self.bias)

    def loss(
        self, x: torch.Tensor, labels: torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        """Return the mean or sum over the labels other than -100, in float32.

        Args:
            x: (..., d_model).
            labels: (...), int64.
        """
        check_labels(labels, x.shape[:-1])
        known = learned(labels)
        if worth_selecting(known):  # skip the logits of ignored labels
            rows = known.flatten().nonzero().squeeze(1)
            x, labels = select(x.flatten(0, -2), rows), labels.flatten()[rows]
        return linear_cross_entropy(
            x * self.scale if self.scale != 1.0 else x, self.weight, labels, bias=self.bias,
            ignore_index=IGNORE,
            label_smoothing=self.label_smoothing if self.training else 0.0, reduction=reduction,
        )  # fmt: skip
