# SPDX-License-Identifier: Apache-2.0
"""What is minimised: the loss that a model of `pytransformer.models` computes of a batch, and how well it does on held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from .batching import IGNORED, Batch


def of_model(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """(the model's mean loss, over how many labels): `model(**batch).loss`, label smoothing included if its config says so."""
    return model(**batch).loss, int((batch["labels"] != IGNORED).sum())


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The mean loss and the share of labels that the likeliest token gets right, teacher-forced. For encoder-decoders."""
    loss_sum, right, count = 0.0, 0, 0
    for batch in batches:
        out = model(**batch)
        asked = batch["labels"] != IGNORED
        number = int(asked.sum())
        loss_sum += out.loss.item() * number
        right += int((out.logits.argmax(-1)[asked] == batch["labels"][asked]).sum())
        count += number
    return {"validation_loss": loss_sum / max(count, 1) if count else math.nan, "accuracy": right / max(count, 1)}
