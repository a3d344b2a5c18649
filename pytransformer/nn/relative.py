# SPDX-License-Identifier: Apache-2.0
"""Self-attention that tells how far apart two tokens are by a learned map of sinusoids: Transformer-XL's, and the Conformer's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import MultiHeadAttention
from .positions import sinusoidal


def relative_sinusoids(length: int, d_model: int, like: torch.Tensor) -> torch.Tensor:
    """(2 L, d_model): :func:`sinusoidal` of the distances i - j = L, L - 1, ... 1 - L, in the dtype and on the device of ``like``.

    The same for every layer of a model: compute it once a call. The first distance never occurs; it makes the rows of
    :func:`by_distance` start one element apart.
    """
    return sinusoidal(2 * length, d_model, start=1 - length, dtype=like.dtype, device=like.device).flip(0)


def by_distance(scores: torch.Tensor) -> torch.Tensor:
    """From (..., L, 2 L), whose columns are the distances of :func:`relative_sinusoids`, (..., L, L), whose columns are keys. A view.

    Key j of query i has the distance i - j, which is column L - i + j: element ``L + i (2 L - 1) + j`` of the flat matrix.

    Source: Dai et al., "Transformer-XL" (2019), appendix B.
    """
    length = scores.shape[-2]
    return scores.flatten(-2)[..., length:].unflatten(-1, (length, 2 * length - 1))[..., :length]


class RelativeMultiHeadAttention(MultiHeadAttention):
    """Self-attention with the scores ``scale * ((q_i + u) k_j + (q_i + v) W_R R[i - j])``, R being sinusoids of the distance.

    u and v, one vector for each head, are what a query looks for whatever it is: contents, and distances. The first product is the
    fused op's; the second is its ``bias``, (B, heads, L, L), with its gradient: unlike all other attention here it takes memory that is
    quadratic in the length, for the distances depend on the query.

    Args:
        d_model, num_heads, dropout: as of :class:`MultiHeadAttention`.

    Source: Dai et al. (2019), section 3.3; in a Conformer: Gulati et al. (2020), section 2.1.
    """

    def __init__(self, d_model: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(d_model, num_heads, dropout=dropout)
        self.position = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(torch.empty(num_heads, self.head_dim)) for _ in range(2))
        for bias in (self.content_bias, self.position_bias):
            nn.init.xavier_uniform_(bias)

    def _place(self, query: torch.Tensor, visible: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """visible: has ``sinusoids``, the :func:`relative_sinusoids` of the length, besides padding."""
        if "sinusoids" not in visible:
            raise ValueError("RelativeMultiHeadAttention: give sinusoids=relative_sinusoids(length, d_model, like=x)")
        others = {name: what for name, what in visible.items() if name != "sinusoids"}
        sinusoids = visible["sinusoids"]
        if "bias" in others or query.dim() != 4 or sinusoids.shape[0] != 2 * query.shape[2]:
            raise ValueError(
                f"RelativeMultiHeadAttention: wanted (B, L, d_model) without bias, and sinusoids of 2 L distances; got queries of "
                f"shape {tuple(query.shape)}, sinusoids of {tuple(sinusoids.shape)} and {', '.join(others) or 'nothing else'}"
            )
        keys = self.position(sinusoids).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # (heads, 2 L, D)
        scale = self.head_dim**-0.5
        scores = ((query + self.position_bias[:, None]) * scale) @ keys.mT
        return query + self.content_bias[:, None], {**others, "bias": by_distance(scores)}
