# SPDX-License-Identifier: Apache-2.0
"""Connectionist temporal classification: labels of a sequence of frames without an alignment."""

from __future__ import annotations

import torch
from torch import nn

from .heads import IGNORE

BLANK = 0


def ctc_loss(
    logits: torch.Tensor, labels: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``-log p(labels | frames)``, summed over sequences, per label, in float32 nats.

    p sums over all alignments: one class per frame, the labels in order, with repeats of a label
    and blanks (class 0) between them. The loss is infinite if a sequence has too few frames for its
    labels.

    Args:
        logits: (B, L, classes).
        labels: (B, S) int64, at least 1, -100 after the last.
        keep: (B, L) bool, False at padding, on any side. A padding frame is blank with probability
            1, which does not change p.

    Source: Graves et al., "Connectionist temporal classification" (2006); PyTorch's ``ctc_loss``.
    """
    if labels.dim() != 2 or len(labels) != len(logits):
        raise ValueError(
            f"labels must have the shape ({len(logits)}, S), got {tuple(labels.shape)}"
        )
    log_p = logits.float().log_softmax(-1)
    if keep is not None:
        certain = torch.full_like(log_p[0, 0], -torch.inf)
        certain[BLANK] = 0.0
        log_p = torch.where(keep[..., None], log_p, certain)
    asked = labels != IGNORE
    counts = asked.sum(1)
    frames = torch.full_like(counts, log_p.shape[1])
    targets = labels.masked_fill(~asked, 1)  # beyond the counts, never read
    nll = nn.functional.ctc_loss(
        log_p.transpose(0, 1), targets, frames, counts, blank=BLANK, reduction="sum"
    )
    return nll / counts.sum()


def ctc_read(logits: torch.Tensor, keep: torch.Tensor | None = None) -> list[list[int]]:
    """Return labels by best path: the argmax of each frame, without repeats and blanks."""
    best = logits.argmax(-1)
    if keep is not None:
        best = best.masked_fill(~keep, BLANK)
    changed = best != nn.functional.pad(best, (1, 0), value=BLANK)[:, :-1]
    return [row[said].tolist() for row, said in zip(best, changed & (best != BLANK))]
