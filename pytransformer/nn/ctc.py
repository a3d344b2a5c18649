# SPDX-License-Identifier: Apache-2.0
"""Connectionist temporal classification: from frames to a sequence of labels that says nothing of where each label stands."""

from __future__ import annotations

import torch
from torch import nn

from .heads import IGNORE

BLANK = 0


def ctc_loss(logits: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """``-log p(labels | frames)``, summed over the sequences and divided by the number of labels: nats a label, a float32 number.

    p adds up every way to write the labels, in order, with repeats of a label and blanks (class 0) between, one class a frame. Infinite
    where a sequence has fewer frames than its labels take.

    Args:
        logits: (B, L, classes).
        labels: (B, S) int64 from 1 on, -100 after the last.
        keep: (B, L) bool, False at padding, on any side. A frame of padding says blank with certainty, which changes no p.

    Source: Graves et al., "Connectionist temporal classification" (2006); PyTorch's ``ctc_loss``.
    """
    if labels.dim() != 2 or len(labels) != len(logits):
        raise ValueError(f"labels must have the shape ({len(logits)}, S), got {tuple(labels.shape)}")
    log_p = logits.float().log_softmax(-1)
    if keep is not None:
        certain = torch.full_like(log_p[0, 0], -torch.inf)
        certain[BLANK] = 0.0
        log_p = torch.where(keep[..., None], log_p, certain)
    asked = labels != IGNORE
    counts = asked.sum(1)
    frames = torch.full_like(counts, log_p.shape[1])
    targets = labels.masked_fill(~asked, 1)  # beyond the counts, which nobody reads
    nll = nn.functional.ctc_loss(log_p.transpose(0, 1), targets, frames, counts, blank=BLANK, reduction="sum")
    return nll / counts.sum()


def ctc_read(logits: torch.Tensor, keep: torch.Tensor | None = None) -> list[list[int]]:
    """The labels of each sequence by its best path: the likeliest class of each frame, repeats once, blanks out."""
    best = logits.argmax(-1)
    if keep is not None:
        best = best.masked_fill(~keep, BLANK)
    changed = best != nn.functional.pad(best, (1, 0), value=BLANK)[:, :-1]
    return [row[said].tolist() for row, said in zip(best, changed & (best != BLANK))]
