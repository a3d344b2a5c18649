# SPDX-License-Identifier: Apache-2.0
"""The training objective of `pytransformer.models`, and its held-out metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .batching import IGNORED, Batch


def of_model(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """Return the mean of `model(**batch).loss` and its label count; label smoothing included."""
    return model(**batch).loss, int((batch["labels"] != IGNORED).sum())


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the mean loss and the teacher-forced top-1 accuracy of an encoder-decoder."""
    loss_sum, right, count = 0.0, 0, 0
    for batch in batches:
        out = model(**batch)
        asked = batch["labels"] != IGNORED
        number = int(asked.sum())
        loss_sum += out.loss.item() * number
        right += int((out.logits.argmax(-1)[asked] == batch["labels"][asked]).sum())
        count += number
    return {
        "validation_loss": loss_sum / max(count, 1) if count else math.nan,
        "accuracy": right / max(count, 1),
    }
