# SPDX-License-Identifier: Apache-2.0
"""Padded batches to packed rows and back, with the signatures of ``flash_attn.bert_padding``."""

from __future__ import annotations

import torch

from ...nn.packing import select, spread


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return ``x[indices]`` for distinct rows of x, (N, ...)."""
    return select(x, indices)


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the rows of a (B, L, ...) batch that a (B, L) mask keeps.

    Args:
        attention_mask: bool or integer, 1 for a token. Padding may lie anywhere.
        unused_mask: 1 for a row that is packed but not counted as used.

    Returns:
        The packed rows (total, ...), their places in the flattened batch (total,), ``cu_seqlens``
        (B + 1,) int32, the longest sequence, and the used rows per sequence (B,) int32.
    """
    keep = (
        attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    )
    lengths = keep.sum(-1, dtype=torch.int32)
    indices = keep.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    return select(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Return (batch, seqlen, ...) with the packed rows at their places and zeros elsewhere."""
    return spread(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
