# SPDX-License-Identifier: Apache-2.0
"""Self-attention with rotary positions, as in Llama, Qwen and Gemma."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ops.rotary import rotary
from ..ops.rotary_positions import RotaryPositions
from .attention import MultiHeadAttention
from .cache import Layer


class RotaryMultiHeadAttention(MultiHeadAttention):
    """Self-attention over ``rotary(q_i, i)`` and ``rotary(k_j, j)``, :func:`pytransformer.rotary`.

    The scores depend on i - j only. Positions count from 0, or from the cached length of each
    sequence, and include padding, because only distances matter. A model with a cache passes
    ``tables``, cos and sin of these positions, to all its layers. If each layer computes them, they
    take 88 of the 307 us of processor time of a layer's one-token step, d_model 64 (Zen 5, one
    thread).

    Args:
        rotary: the angles; None rotates the full head with base 10,000.
        qk_norm: whether to normalize queries and keys before the rotation, in the same pass, each
            with a weight (head_dim,).
        eps: epsilon of that norm.
        **others: as in :class:`MultiHeadAttention`, except ``cross`` and ``pattern``.

    Source: Su et al., "RoFormer" (2021); the norm: Dehghani et al. (2023), section 2.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        rotary: RotaryPositions | None = None,
        qk_norm: bool = False,
        eps: float = 1e-6,
        **others: Any,
    ) -> None:
        if others.get("cross") or others.get("pattern") is not None:
            raise ValueError(
                "RotaryMultiHeadAttention: is self-attention over all positions: leave cross and"
                " pattern out"
            )
        super().__init__(d_model, num_heads, **others)
        self.rotary = RotaryPositions(self.head_dim) if rotary is None else rotary
        if self.rotary.dims > self.head_dim:
            raise ValueError(
                f"RotaryMultiHeadAttention: rotary turns {self.rotary.dims} dimensions, and"
                f" head_dim is {self.head_dim}"
            )
        self.eps = eps
        self.query_norm, self.key_norm = (
            nn.Parameter(torch.ones(self.head_dim)) if qk_norm else None for _ in range(2)
        )

    def _positioned(
        self, query: torch.Tensor, key: torch.Tensor, cache: Layer | None, visible: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        packed = query.dim() == 3
        if packed:  # one row of all sequences: each has a constant offset, which no distance shows
            query, key = (t.transpose(0, 1)[None] for t in (query, key))
        tables = visible.pop("tables", None)
        if tables is None:
            length, device = query.shape[2], query.device
            tables = self.rotary.tables(
                torch.arange(length, device=device)
                if cache is None
                else cache.positions(length, device)
            )
        cos, sin = tables
        shared: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": self.rotary.interleaved}
        shared |= {"dims": self.rotary.dims} | (
            {} if self.query_norm is None else {"eps": self.eps}
        )
        query, key = (
            rotary(query, weight=self.query_norm, **shared),
            rotary(key, weight=self.key_norm, **shared),
        )
        return (query[0].transpose(0, 1), key[0].transpose(0, 1)) if packed else (query, key)
