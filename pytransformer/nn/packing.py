# SPDX-License-Identifier: Apache-2.0
"""Packing of padded batches: blocks compute the real tokens only, concatenated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..ops._core.autograd import transforming

WORTH = 0.1  # share of padding from which packing pays for two copies of the batch

# Arguments with the same meaning in packed attention if queries and keys are the same tokens.
_SHARED = {"causal", "bias", "window"}
_PADDING = {"attn_mask", "key_lengths", "query_lengths"}


def worth_selecting(keep: torch.Tensor) -> bool:
    """Return whether to select rows by the bool values of ``keep``.

    It requires the CPU, eager mode and enough rows to skip. On a GPU reading the mask would
    synchronize, and a traced graph has one shape.
    """
    if type(keep) is not torch.Tensor or keep.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or transforming():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # public, but not in torch.jit's list
        return False
    return int(keep.count_nonzero()) <= (1 - WORTH) * keep.numel()


class _Select(torch.autograd.Function):
    """Unique rows of x. index_select's backward accumulates repeated rows, which is slower."""

    @staticmethod
    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor
    ) -> None:
        x, ctx.rows = inputs
        ctx.num_rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return spread(grad, ctx.rows, ctx.num_rows), None


def select(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ``x[rows]`` for unique rows of x, (N, ...)."""
    return _Select.apply(x, rows)


def spread(x: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return (num_rows, ...) with x at ``rows`` and zeros in all other rows."""
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy(0, rows, x)


@dataclass(frozen=True)
class Packing:
    """Positions of the real tokens of a (B, L) batch padded at the end.

    Attributes:
        rows: (total,) indices of the tokens in the flattened batch.
        offsets: (B + 1,) start of each sequence in ``rows``.
        longest: tokens of the longest sequence.
        shape: (B, L).
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    longest: int
    shape: tuple[int, int]

    @classmethod
    def of(
        cls,
        visible: Mapping[str, Any],
        x: torch.Tensor,
        *,
        wanted: torch.Tensor | None = None,
        if_worth: bool = False,
    ) -> Packing | None:
        """Return the packing of x, (B, L, d), from the visibility arguments of attention.

        Args:
            visible: arguments of :func:`pytransformer.attention`.
            wanted: (B, L) bool, positions that are read.
            if_worth: pack only if there is enough padding, and only on the CPU in eager mode.

        Returns:
            None if there are other masks, padding that is not at the end, or padding that is read.
        """
        if not visible.keys() <= _SHARED | _PADDING or (if_worth and not visible.keys() & _PADDING):
            return None
        batch, length = x.shape[:2]
        places = torch.arange(length, device=x.device)
        if "key_lengths" in visible:
            keep = places < visible["key_lengths"][:, None]
        elif "attn_mask" in visible:
            keep = visible["attn_mask"][:, 0, 0]
        else:
            keep = places.expand(batch, -1) >= 0
        if if_worth and not worth_selecting(keep):
            return None
        lengths = keep.sum(1)
        if not torch.equal(keep, places < lengths[:, None]) or (
            wanted is not None and bool((wanted & ~keep).any())
        ):
            return None
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        longest = int(lengths.max()) if batch else 0
        return cls(keep.flatten().nonzero().squeeze(1), offsets, longest, (batch, length))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return (total, d) from (B, L, d)."""
        return select(x.flatten(0, 1), self.rows)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, L, d) from (total, d), with zeros at the padding."""
        return spread(x, self.rows, self.shape[0] * self.shape[1]).unflatten(0, self.shape)

    def visible(self, arguments: Mapping[str, Any], keys: Packing) -> dict[str, Any]:
        """Return the arguments of packed attention with the same visibility."""
        return {k: v for k, v in arguments.items() if k in _SHARED} | {
            "cu_seqlens_q": self.offsets, "cu_seqlens_k": keys.offsets,
            "max_seqlen_q": self.longest, "max_seqlen_k": keys.longest,
        }  # fmt: skip
