# SPDX-License-Identifier: Apache-2.0
"""Scoring functions of attention, small and for study; models use the fused op.

Each maps query (B, Lq, dq) and key (B, Lk, dk) to scores (B, Lq, Lk); :func:`attend` averages
values by scores.
"""

from __future__ import annotations

import math

import torch
from torch import nn


class DotScore(nn.Module):
    """Dot-product score, ``q · k``, or ``q · k / sqrt(d)`` with ``scaled``.

    Source: Luong et al. (2015); scaled: Vaswani et al. (2017).
    """

    def __init__(self, scaled: bool = True) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ key.transpose(-1, -2) / (math.sqrt(query.shape[-1]) if self.scaled else 1.0)


class GeneralScore(nn.Module):
    """Bilinear score ``qᵀ W k``, for queries and keys of different sizes.

    Source: Luong et al. (2015), equation 8.
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.map = nn.Linear(key_dim, query_dim, bias=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query @ self.map(key).transpose(-1, -2)


class AdditiveScore(nn.Module):
    """Additive score ``vᵀ tanh(W [q; k])``, as ``W_q q + W_k k``; memory is (B, Lq, Lk, hidden).

    Source: Bahdanau et al. (2015), appendix A.1.2.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, hidden, bias=False)
        self.key = nn.Linear(key_dim, hidden, bias=False)
        self.vector = nn.Linear(hidden, 1, bias=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.vector(
            torch.tanh(self.query(query)[..., :, None, :] + self.key(key)[..., None, :, :])
        ).squeeze(-1)


def attend(
    scores: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``softmax(scores) @ value`` and the softmax.

    Args:
        mask: bool, True = attend; a fully masked row gives zeros.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - top.masked_fill(top == -math.inf, 0.0))
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
    return weights @ value, weights
