# SPDX-License-Identifier: Apache-2.0
"""Padded batches without their padding: blocks compute the real tokens only, one sequence after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..ops._core.autograd import transforming

WORTH = 0.1  # share of padding from which leaving it out pays for two copies of the batch

# What :func:`pytransformer.attention` and its packed form mean alike where queries and keys are the same tokens.
_SHARED = {"causal", "bias", "window"}
_PADDING = {"attn_mask", "key_lengths", "query_lengths"}


def worth_selecting(keep: torch.Tensor) -> bool:
    """Whether rows may and should be chosen by the values of ``keep``, bool: on the CPU, in eager mode, with enough to leave out.

    On a GPU reading the mask would wait for it, and a traced graph has one shape.
    """
    if type(keep) is not torch.Tensor or keep.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or transforming():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined]  # public, but not in torch.jit's list
        return False
    return int(keep.count_nonzero()) <= (1 - WORTH) * keep.numel()


class _Select(torch.autograd.Function):
    """Rows of x, each at most once: index_select, whose own backward must add where a row is selected twice, which costs."""

    @staticmethod
    def forward(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        x, ctx.rows = inputs
        ctx.num_rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return spread(grad, ctx.rows, ctx.num_rows), None


def select(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``x[rows]`` for different rows of x, (N, ...)."""
    return _Select.apply(x, rows)


def spread(x: torch.Tensor, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(num_rows, ...) with x at ``rows`` and zeros elsewhere."""
    return x.new_zeros(num_rows, *x.shape[1:]).index_copy(0, rows, x)


@dataclass(frozen=True)
class Packing:
    """Where the real tokens of a (B, L) batch padded at the end lie.

    Attributes:
        rows: (total,) their places in the flattened batch.
        offsets: (B + 1,) where each sequence starts among them.
        longest: tokens of the longest sequence.
        shape: (B, L).
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    longest: int
    shape: tuple[int, int]

    @classmethod
    def of(
        cls, visible: Mapping[str, Any], x: torch.Tensor, *, wanted: torch.Tensor | None = None, if_worth: bool = False
    ) -> Packing | None:
        """The packing of x, (B, L, d), whose padding the visibility arguments of :func:`pytransformer.attention` tell.

        None if they tell of something else besides, if padding is not at the end of each sequence, if some of it is ``wanted``,
        (B, L) bool, or, ``if_worth``, if there is little of it or this is no time to look.
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
        if not torch.equal(keep, places < lengths[:, None]) or (wanted is not None and bool((wanted & ~keep).any())):
            return None
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        longest = int(lengths.max()) if batch else 0
        return cls(keep.flatten().nonzero().squeeze(1), offsets, longest, (batch, length))

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, d) to (total, d)."""
        return select(x.flatten(0, 1), self.rows)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """(total, d) to (B, L, d), with zeros at the padding."""
        return spread(x, self.rows, self.shape[0] * self.shape[1]).unflatten(0, self.shape)

    def visible(self, arguments: Mapping[str, Any], keys: Packing) -> dict[str, Any]:
        """The same visibility as arguments of :func:`pytransformer.attention_varlen`, for queries packed so and ``keys``."""
        return {k: v for k, v in arguments.items() if k in _SHARED} | {
            "cu_seqlens_q": self.offsets, "cu_seqlens_k": keys.offsets,
            "max_seqlen_q": self.longest, "max_seqlen_k": keys.longest,
        }  # fmt: skip
