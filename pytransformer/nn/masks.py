# SPDX-License-Identifier: Apache-2.0
"""From Hugging Face's attention_mask to what the fused op takes; nothing of size (Lq, Lk) is ever built."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import TypeIs


def is_lengths(attention_mask: torch.Tensor | None, batch: int) -> TypeIs[torch.Tensor]:
    """Whether it is (B,) integers, the lengths of sequences padded at the end, rather than one entry for each token."""
    mask = attention_mask
    return mask is not None and mask.shape == (batch,) and not mask.dtype.is_floating_point and mask.dtype != torch.bool


def padding(attention_mask: torch.Tensor | None, batch: int, length: int, *, queries: bool = False) -> dict[str, Any]:
    """The visibility arguments of :func:`pytransformer.attention` for keys of (batch, length) tokens with this mask.

    Args:
        attention_mask: None; (B, L), bool or integers, 0 = padding on any side; or (B,) integers,
            the lengths of sequences padded at the end.
        queries: the queries are the same tokens (self-attention): with lengths, padding is not even computed.

    Returns:
        ``{}``, ``{"attn_mask": (B, 1, 1, L) bool}`` (a view of the mask, read once a row by the kernel) or ``{"key_lengths": ...}``.

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
            f"attention_mask must be ({batch}, {length}), one entry for each token (cached ones too), or lengths ({batch},); "
            f"got {attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        )
    check_not_additive(attention_mask)
    return {"attn_mask": attention_mask.bool()[:, None, None, :]}


def check_not_additive(attention_mask: torch.Tensor) -> None:
    """Raise ValueError for a floating mask: in an additive one 0 is a token, and not padding."""
    if attention_mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask must be bool or integers, 0 = padding, got {attention_mask.dtype}; "
            "give mask.bool() for ones and zeros, or mask == 0 for an additive mask"
        )


def causal(visible: dict[str, Any], cached: int, new: int) -> dict[str, Any]:
    """The same arguments for a decoder's self-attention, of ``new`` queries after ``cached`` keys.

    Queries align with the last keys, and with lengths each sequence's own: its queries end where its keys do.
    """
    if "key_lengths" in visible:
        return {**visible, "causal": "bottom_right", "query_lengths": (visible["key_lengths"] - cached).clamp(0, new)}
    return {**visible, "causal": "bottom_right" if cached else "top_left"}


def is_tree(attention_mask: torch.Tensor | None) -> TypeIs[torch.Tensor]:
    """Whether it says of each new token which keys it sees, (B, new, cached + new)."""
    return attention_mask is not None and attention_mask.dim() == 3


def tree(attention_mask: torch.Tensor, batch: int, new: int, length: int) -> tuple[dict[str, Any], torch.Tensor]:
    """(the visibility arguments, where the tokens stand (batch, new)) of a tree of drafts behind ``length - new`` cached tokens.

    A node sees itself, the nodes on its path, and what is cached: it stands behind as many tokens.

    Raises:
        ValueError: a mask of another shape, or of numbers.
    """
    if attention_mask.shape != (batch, new, length) or attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask of a tree must be bool ({batch}, {new}, {length}), for each new token which keys it sees, cached ones too; "
            f"got {attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        )
    visible = {"attn_mask": attention_mask[:, None], "causal": "bottom_right"}
    return visible, attention_mask.sum(-1) - 1


def position_ids(attention_mask: torch.Tensor, new: int) -> torch.Tensor:
    """(B, new): the positions of the last ``new`` tokens of (B, L), counted from each sequence's first real token.

    For left-padded batches, whose tokens should have the positions that they have unpadded; padding gets 0.
    """
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -new:]


def kept(visible: dict[str, Any], length: int, who: str) -> torch.Tensor | None:
    """(B, L) bool, False at padding, from what :func:`padding` returned; None without padding. For layers that mix neighbours.

    Raises:
        ValueError: other masks, which a convolution cannot follow; the message names them and ``who``.
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
        raise ValueError(f"{who} follows padding only: attn_mask must be (B, 1, 1, {length}) bool, got {tuple(mask.shape)}")
    return mask[:, 0, 0]
