# SPDX-License-Identifier: Apache-2.0
"""Self-attention with relative sinusoids, as in Transformer-XL and the Conformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attention import MultiHeadAttention
from .positions import sinusoidal


def relative_sinusoids(length: int, d_model: int, like: torch.Tensor) -> torch.Tensor:
    """Return :func:`sinusoidal` of the distances i - j = L, L - 1, ... 1 - L, (2 L, d_model).

    The dtype and device are those of ``like``. All layers of a model share the result, so compute
    it once per call. The first distance never occurs; it makes the rows of :func:`by_distance`
    start one element apart.
    """
    return sinusoidal(
        2 * length, d_model, start=1 - length, dtype=like.dtype, device=like.device
    ).flip(0)


def by_distance(scores: torch.Tensor) -> torch.Tensor:
    """Return a view (..., L, L) by key of (..., L, 2 L) by distance (:func:`relative_sinusoids`).

    Key j of query i has distance i - j, which is column L - i + j and flat element ``L + i (2 L -
    1) + j``.

    Source: Dai et al., "Transformer-XL" (2019), appendix B.
    """
    length = scores.shape[-2]
    return scores.flatten(-2)[..., length:].unflatten(-1, (length, 2 * length - 1))[..., :length]


class RelativeMultiHeadAttention(MultiHeadAttention):
    """Self-attention with scores ``scale * ((q_i + u) k_j + (q_i + v) W_R R[i - j])``.

    R is the sinusoid of the distance. The per-head vectors u and v are query-independent biases of
    content and distance. The fused op computes the first product. The second is its ``bias``, (B,
    heads, L, L), with a gradient. Distances depend on the query, so memory is quadratic in the
    length, unlike all other attention here.

    Args:
        d_model, num_heads, dropout: as in :class:`MultiHeadAttention`.

    Source: Dai et al. (2019), section 3.3; in a Conformer: Gulati et al. (2020), section 2.1.
    """

    def __init__(self, d_model: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__(d_model, num_heads, dropout=dropout)
        self.position = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        self.content_bias, self.position_bias = (
            nn.Parameter(torch.empty(num_heads, self.head_dim)) for _ in range(2)
        )
        for bias in (self.content_bias, self.position_bias):
            nn.init.xavier_uniform_(bias)

    def _place(
        self, query: torch.Tensor, visible: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Add the biases u and v; ``visible`` has ``sinusoids`` of the length besides padding."""
        if "sinusoids" not in visible:
            raise ValueError(
                "RelativeMultiHeadAttention: give sinusoids=relative_sinusoids(length, d_model,"
                " like=x)"
            )
        others = {name: what for name, what in visible.items() if name != "sinusoids"}
        sinusoids = visible["sinusoids"]
        if "bias" in others or query.dim() != 4 or sinusoids.shape[0] != 2 * query.shape[2]:
            raise ValueError(
                "RelativeMultiHeadAttention: expected (B, L, d_model) without bias, and sinusoids"
                f" of 2 L distances; got queries of shape {tuple(query.shape)}, sinusoids of"
                f" {tuple(sinusoids.shape)} and {', '.join(others) or 'nothing else'}"
            )
        # [heads, 2 L, D].
        keys = self.position(sinusoids).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        scale = self.head_dim**-0.5
        scores = ((query + self.position_bias[:, None]) * scale) @ keys.mT
        return query + self.content_bias[:, None], {**others, "bias": by_distance(scores)}
