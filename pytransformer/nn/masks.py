# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's attention_mask as the fused op's arguments, never of size (Lq, Lk)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import TypeIs


def is_lengths(attention_mask: torch.Tensor | None, batch: int) -> TypeIs[torch.Tensor]:
    """Return whether the mask is (B,) integer lengths of sequences padded at the end."""
    mask = attention_mask
    return (
        mask is not None
        and mask.shape == (batch,)
        and not mask.dtype.is_floating_point
        and mask.dtype != torch.bool
    )


def padding(
    attention_mask: torch.Tensor | None, batch: int, length: int, *, queries: bool = False
) -> dict[str, Any]:
    """Return the visibility arguments of :func:`pytransformer.attention` for key padding.

    Args:
        attention_mask: None; (B, L), bool or integers, 0 = padding on any side; or (B,) integers,
            the lengths of sequences padded at the end.
        queries: whether the queries are the same tokens (self-attention); lengths then also skip
            padding queries.

    Returns:
        ``{}``, ``{"attn_mask": (B, 1, 1, L) bool}`` (a view of the mask, which the kernel reads
            once per row) or ``{"key_lengths": ...}``.

    Raises:
        ValueError: a mask of another shape, or a floating one, which may be additive.
    """
    if attention_mask is None:
        return {}
    if is_lengths(attention_mask, batch):
        lengths = {"key_lengths": attention_mask}
        return {**lengths, "query_lengths": attention_mask} if queries else lengths
    if attention_mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask must be ({batch}, {length}), one entry for each token (cached ones"
            f" too), or lengths ({batch},); got {attention_mask.dtype} of shape"
            f" {tuple(attention_mask.shape)}"
        )
    check_not_additive(attention_mask)
    return {"attn_mask": attention_mask.bool()[:, None, None, :]}


def check_not_additive(attention_mask: torch.Tensor) -> None:
    """Raise ValueError for a floating mask; in an additive mask 0 is a token, not padding."""
    if attention_mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask must be bool or integers, 0 = padding, got {attention_mask.dtype}; "
            "give mask.bool() for ones and zeros, or mask == 0 for an additive mask"
        )


def causal(visible: dict[str, Any], cached: int, new: int) -> dict[str, Any]:
    """Return the arguments of causal self-attention, ``new`` queries after ``cached`` keys.

    Queries align with the last keys. With lengths, each sequence's queries end at its last key.
    """
    if "key_lengths" in visible:
        return {
            **visible,
            "causal": "bottom_right",
            "query_lengths": (visible["key_lengths"] - cached).clamp(0, new),
        }
    return {**visible, "causal": "bottom_right" if cached else "top_left"}


def is_tree(attention_mask: torch.Tensor | None) -> TypeIs[torch.Tensor]:
    """Return whether the mask has one row of visible keys per new token, (B, new, cached + new)."""
    return attention_mask is not None and attention_mask.dim() == 3


def tree(
    attention_mask: torch.Tensor, batch: int, new: int, length: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the visibility arguments and the position ids (batch, new) of a tree of drafts.

    The tree follows ``length - new`` cached tokens. A node sees itself, its ancestors and the
    cache; its position is the number of tokens before it.

    Raises:
        ValueError: a mask of another shape or dtype.
    """
    if attention_mask.shape != (batch, new, length) or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask of a tree must be bool ({batch}, {new}, {length}), for each new token"
            f" which keys it sees, cached ones too; got {attention_mask.dtype} of shape"
            f" {tuple(attention_mask.shape)}"
        )
    visible = {"attn_mask": attention_mask[:, None], "causal": "bottom_right"}
    return visible, attention_mask.sum(-1) - 1


def position_ids(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """Return positions (B, new) of the last ``new`` tokens of (B, L), from the first real token.

    Tokens of left-padded batches get their unpadded positions; padding gets 0.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -new:]


def kept(visible: dict[str, Any], length: int, who: str) -> torch.Tensor | None:
    """Return the (B, L) bool mask, False at padding, of :func:`padding`'s result, or None.

    Layers that mix neighbors use it.

    Raises:
        ValueError: masks other than padding, which a convolution cannot apply; the message names
            them and ``who``.
    """
    if unknown := visible.keys() - {"key_lengths", "query_lengths", "attn_mask"}:
        raise ValueError(f"{who} follows padding only, got {', '.join(sorted(unknown))}")
    if "key_lengths" in visible:
        lengths = visible["key_lengths"]
        return torch.arange(length, device=lengths.device) < lengths[:, None]
    mask = visible.get("attn_mask")
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 4 or tuple(mask.shape[1:]) != (1, 1, length):
        raise ValueError(
            f"{who} follows padding only: attn_mask must be (B, 1, 1, {length}) bool, got"
            f" {tuple(mask.shape)}"
        )
    return mask[:, 0, 0]
