# SPDX-License-Identifier: Apache-2.0
"""Linformer self-attention, linear in the length by a learned projection of the sequence."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..ops.attention import attention

Sharing = Literal["none", "heads", "key_value"]
SHARINGS = ("none", "heads", "key_value")


class SequenceProjection(nn.Module):
    """``weight[..., :L] x`` along the sequence, (B, H, L, D) to (B, H, k, D).

    Args:
        max_length: maximum sequence length; shorter sequences use the first columns.
        projected: k.
        num_heads: heads with a matrix each; 1 shares one matrix among all heads.
    """

    def __init__(self, max_length: int, projected: int, num_heads: int = 1) -> None:
        super().__init__()
        # N(0, 1 / k) as in the paper.
        self.weight = nn.Parameter(torch.randn(num_heads, projected, max_length) / projected**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, longest = x.shape[-2], self.weight.shape[-1]
        if length > longest:
            raise ValueError(f"SequenceProjection: made for at most {longest} tokens, got {length}")
        return self.weight[..., :length].to(x.dtype) @ x


class LinformerSelfAttention(nn.Module):
    """Linformer attention, ``head_i = softmax(scale * q_i (E_i k_i)ᵀ) F_i v_i``.

    It attends to k mixtures of the keys and values instead of all L. Padding does not enter the
    mixtures: its keys and values are zero before E and F. A sequence without a visible key gets 0
    from attention. Causality, windows and biases are undefined on mixtures of all positions, so
    they raise.

    Args:
        d_model, num_heads, head_dim, bias, dropout, scale: as in :class:`MultiHeadAttention`.
        max_length: maximum sequence length.
        projected: k, the number of mixtures.
        sharing: ``"none"``: E and F per head; ``"heads"``: one E and one F; ``"key_value"``: one
            matrix for both. To share them between layers, assign one module: ``other.keys =
            other.values = layer.keys``.

    Source: Wang et al., "Linformer: self-attention with linear complexity" (2020), section 4.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        max_length: int,
        projected: int = 256,
        sharing: Sharing = "heads",
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        if sharing not in SHARINGS:
            raise ValueError(
                f"LinformerSelfAttention: sharing must be one of {', '.join(SHARINGS)}, got"
                f" {sharing!r}"
            )
        if num_heads < 1 or (head_dim is None and d_model % num_heads):
            raise ValueError(
                f"LinformerSelfAttention: d_model {d_model} is not a multiple of num_heads"
                f" {num_heads}; give head_dim"
            )
        self.num_heads, self.head_dim = num_heads, head_dim or d_model // num_heads
        self.dropout, self.scale = dropout, scale
        self.qkv = nn.Linear(d_model, 3 * num_heads * self.head_dim, bias)
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias)
        matrices = num_heads if sharing == "none" else 1
        self.keys = SequenceProjection(max_length, projected, matrices)
        self.values = (
            self.keys
            if sharing == "key_value"
            else SequenceProjection(max_length, projected, matrices)
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
        query_lengths: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Return the attention output, (B, L, d_model).

        Args:
            attn_mask: key padding, (B or 1, 1, 1, L) bool.
            key_lengths: (B,), key padding as lengths.

        Raises:
            ValueError: another mask, a bias or a cache, or a sequence longer than max_length.
        """
        if refused := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"LinformerSelfAttention: {', '.join(refused)} cannot be said of mixtures of all"
                " positions; use nn.MultiHeadAttention, with a pattern for long sequences"
            )
        if x.dim() != 3:
            raise ValueError(
                f"LinformerSelfAttention: x must be (B, L, d_model), got {tuple(x.shape)}"
            )
        heads = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        query, key, value = heads
        keep = self._keep(x, attn_mask, key_lengths)
        if keep is not None:  # select instead of multiplying, because padding may be NaN
            key, value = (t.where(keep, 0) for t in (key, value))
        p = self.dropout if self.training else 0.0
        out = attention(
            query,
            self.keys(key),
            self.values(value),
            scale=self.scale,
            dropout_p=p,
            query_lengths=query_lengths,
        )
        return self.out(out.transpose(1, 2).flatten(-2))

    def _keep(
        self, x: torch.Tensor, mask: torch.Tensor | None, lengths: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return (B or 1, 1, L, 1) bool, False at padding."""
        batch, length = x.shape[0], x.shape[1]
        if mask is not None and (
            mask.dtype != torch.bool
            or mask.dim() != 4
            or mask.shape[0] not in (1, batch)
            or mask.shape[1:] != (1, 1, length)
        ):
            raise ValueError(
                f"LinformerSelfAttention: attn_mask must be key padding, bool ({batch}, 1, 1,"
                f" {length}), got {mask.dtype} of {tuple(mask.shape)}"
            )
        keep = None if mask is None else mask.transpose(-1, -2)
        if lengths is not None:
            inside = (torch.arange(length, device=x.device) < lengths[:, None])[:, None, :, None]
            keep = inside if keep is None else keep & inside
        return keep

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, head_dim={self.head_dim}"
