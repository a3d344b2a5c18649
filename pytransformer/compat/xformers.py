# SPDX-License-Identifier: Apache-2.0
"""xFormers' ``memory_efficient_attention`` and its common ``attn_bias`` classes.

``import pytransformer.compat.xformers as xops`` stands for ``xformers.ops``, and as ``fmha`` for
``xformers.ops.fmha`` and its ``attn_bias``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from ..ops.attention import attention
from ..ops.attention_varlen import attention_varlen
from ..ops.options import Alignment
from ._refuse import describe, refuse

NAME = "memory_efficient_attention"


class AttentionBias:
    """Base of the classes that stand for an ``attn_bias``."""

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        """Return keywords of :func:`pytransformer.attention` for the caller's query and key."""
        raise TypeError(
            f"{NAME}: attn_bias must be a mask of this module, got {type(self).__name__}; pass a"
            " tensor"
        )


class LowerTriangularMask(AttentionBias):
    """Query i sees keys j <= i."""

    def __init__(self, *_: Any, **__: Any) -> None:  # xFormers ignores its arguments too
        pass

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        return {"causal": "top_left"}

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """:class:`LowerTriangularMask` and a tensor that is added to the scores."""

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        return {"causal": "top_left", "attn_mask": _dense(self._bias, query)}


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Query i sees keys j <= i + Lk - Lq."""

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        return {"causal": "bottom_right"}

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Query i sees the last ``window_size`` of the keys j <= i + Lk - Lq."""

    def __init__(self, _window_size: int) -> None:
        if _window_size < 1:
            raise ValueError(
                f"{type(self).__name__}: window_size must be at least 1, got {_window_size}; count"
                " the query"
            )
        self._window_size = _window_size

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        return {"causal": "bottom_right", "window": (self._window_size - 1, None)}


class LocalAttentionFromBottomRightMask(AttentionBias):
    """Query i sees keys from ``i + Lk - Lq - window_left`` to ``i + Lk - Lq + window_right``."""

    def __init__(self, window_left: int, window_right: int) -> None:
        for name, side in (("window_left", window_left), ("window_right", window_right)):
            if side < 0:
                raise ValueError(
                    f"{type(self).__name__}: {name} must be at least 0, got {side}; 0 ends at the"
                    " query"
                )
        self.window_left, self.window_right = window_left, window_right

    def keywords(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        # A prefix of all keys undoes the causality of "bottom_right" and leaves its alignment.
        prefix = torch.full((query.shape[0],), key.shape[1], device=query.device)
        return {
            "causal": "bottom_right",
            "window": (self.window_left, self.window_right),
            "prefix_lengths": prefix,
        }


class BlockDiagonalMask(AttentionBias):
    """Sequences one after the other in a batch of 1: a query sees the keys of its sequence."""

    causal: ClassVar[Alignment | None] = None

    def __init__(
        self,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        batch_sizes: Sequence[int] | None = None,
    ) -> None:
        if len(q_seqlen) != len(kv_seqlen):
            got = f"{len(q_seqlen)} and {len(kv_seqlen)}"
            raise ValueError(
                f"{type(self).__name__}: q_seqlen and kv_seqlen must have one length, got {got};"
                " pair them"
            )
        self.q_seqlen, self.kv_seqlen = list(q_seqlen), list(kv_seqlen)
        self._batch_sizes = (
            list(batch_sizes) if batch_sizes is not None else [1] * len(self.q_seqlen)
        )

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> Self:
        return cls(q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[Self, torch.Tensor]:
        """Return the mask of tensors (B_i, L_i, ...) and the tensors joined, (1, total, ...)."""
        lengths = [t.shape[1] for t in tensors for _ in range(t.shape[0])]
        joined = torch.cat([t.reshape(1, -1, *t.shape[2:]) for t in tensors], dim=1)
        return cls(lengths, lengths, [t.shape[0] for t in tensors]), joined

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the (B_i, L_i, ...) tensors of queries joined by :meth:`from_tensor_list`."""
        starts = [0, *accumulate(self._batch_sizes)]
        sizes = [sum(self.q_seqlen[a:b]) for a, b in pairwise(starts)]
        parts = tensor.split(sizes, dim=1)
        return [
            part.reshape(batch, -1, *part.shape[2:])
            for batch, part in zip(self._batch_sizes, parts)
        ]

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqlen, self.kv_seqlen, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqlen, self.kv_seqlen, self._batch_sizes
        )

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Attend in (1, H, total, D)."""
        for name, t, lengths in (("query", query, self.q_seqlen), ("key", key, self.kv_seqlen)):
            if t.shape[0] != 1 or t.shape[2] != sum(lengths):
                got = f"a batch of {t.shape[0]} with {t.shape[2]} rows"
                raise ValueError(
                    f"{NAME}: {name} must be a batch of 1 with {sum(lengths)} rows, got {got}; join"
                    " the sequences"
                )
        offsets = [
            torch.tensor([0, *accumulate(n)], device=query.device)
            for n in (self.q_seqlen, self.kv_seqlen)
        ]
        longest = [max(n, default=0) for n in (self.q_seqlen, self.kv_seqlen)]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        out = attention_varlen(
            q, k, v, offsets[0], offsets[1], longest[0], longest[1], causal=self.causal, **options
        )
        return out.transpose(0, 1)[None]


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """:class:`BlockDiagonalMask`; within a sequence query i sees keys j <= i."""

    causal = "top_left"


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """:class:`BlockDiagonalMask`; within a sequence query i sees keys j <= i + Lk - Lq."""

    causal = "bottom_right"


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
) -> torch.Tensor:
    """Attention of query (B, Lq, H, D) to key (B, Lk, H, D) and value (B, Lk, H, Dv).

    Args:
        query, key, value: also (B, L, D) of one head, or (B, L, G, H, D) of G groups of H heads;
        key
            and value that are expanded over H are read once.
        attn_bias: a mask of this module, or a floating tensor that is added to the scores, (B, H,
        Lq,
            Lk), without H or with G and H as query has them; each dimension full or 1.
        p: dropout probability.
    """
    refuse(NAME, "pytransformer.use_backend chooses kernels", op=(op, None))
    dims = query.dim()
    if dims not in (3, 4, 5) or key.dim() != dims or value.dim() != dims:
        got = f"{dims}, {key.dim()} and {value.dim()}"
        raise ValueError(
            f"{NAME}: query, key and value must all have 3, 4 or 5 dimensions, got {got}; reshape"
            " them"
        )
    q, k, v = (t.unsqueeze(2) if dims == 3 else t for t in (query, key, value))
    if dims == 5:
        if k.stride(3) == v.stride(3) == 0:
            k, v = k[:, :, :, 0], v[:, :, :, 0]
        q, k, v = (t.flatten(2, 3) if t.dim() == 5 else t for t in (q, k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options: dict[str, Any] = {"dropout_p": p, "scale": scale}
    if isinstance(attn_bias, BlockDiagonalMask):
        out = attn_bias.attend(q, k, v, **options)
    elif attn_bias is None:
        out = attention(q, k, v, **options)
    elif isinstance(attn_bias, AttentionBias):
        out = attention(q, k, v, **attn_bias.keywords(query, key), **options)
    elif isinstance(attn_bias, torch.Tensor):
        out = attention(q, k, v, attn_mask=_dense(attn_bias, query), **options)
    else:
        got = f"{type(attn_bias).__module__}.{type(attn_bias).__name__}"
        raise TypeError(
            f"{NAME}: attn_bias must be a tensor or a mask of this module, got {got}; build it from"
            f" {__name__}"
        )
    return out.transpose(1, 2).reshape(*query.shape[:-1], value.shape[-1])


def _dense(bias: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a tensor bias as (B, H, Lq, Lk), each dimension full or 1."""
    dims = query.dim()
    if not bias.is_floating_point() or bias.dim() != dims:
        got = f"{describe(bias)} of {bias.dtype}"
        raise TypeError(
            f"{NAME}: attn_bias must be floating with {dims} dimensions, got {got}; hide pairs by"
            " -inf"
        )
    return bias if dims == 4 else bias.unsqueeze(1) if dims == 3 else bias.flatten(1, 2)
