# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: sub-layers whose residual connection, dropout and norm are one fused op.

A stack passes a :class:`Stream` between blocks. In a pre-norm model the stream is a pending sum,
the last sub-layer's result and its residual, because the next norm adds them
(:func:`pytransformer.add_norm`). In a post-norm model every sub-layer ends with that norm, and no
sum is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .attention import MultiHeadAttention
from .cache import DecoderCache, Layer
from .layer_norm import Norm
from .packing import Packing


class Stream(NamedTuple):
    """The pending sum ``residual + dropout(x)``.

    Without a residual it is ``x``, or ``dropout(x)`` at the start of a pre-norm stack.
    """

    x: torch.Tensor
    residual: torch.Tensor | None = None


class Residual(nn.Module):
    """A sub-layer's residual connection.

    Post-norm computes ``norm(x + dropout(f(x)))``, pre-norm ``x + dropout(f(norm(x)))``.

    Args:
        norm: post-norm, the norm after the sum; pre-norm, the norm before the sub-layer.
        dropout: applied to the sub-layer's result in training.
    """

    def __init__(self, norm: Norm, dropout: float, pre: bool) -> None:
        super().__init__()
        self.norm, self.dropout, self.pre = norm, dropout, pre

    def forward(self, stream: Stream, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> Stream:
        p = self.dropout if self.training else 0.0
        if self.pre:
            normed, residual = self.norm.add(*stream, p)
            return Stream(sublayer(normed), residual)
        return Stream(self.norm.add(sublayer(stream.x), stream.x, p)[0])


class Block(nn.Module):
    """A block of self-attention or other token mixing, optional cross-attention, feed-forward.

    Args:
        mixing: accepts (B, L, d) and the visibility arguments of self-attention.
        feed_forward: accepts (B, L, d).
        norm: creates one norm; called for each sub-layer.
        cross_attention: a decoder's :class:`MultiHeadAttention` with ``cross=True``.
        dropout: applied to the result of each sub-layer in training.
        pre: whether the norms precede the sub-layers (otherwise they follow them).
    """

    def __init__(
        self,
        mixing: nn.Module,
        feed_forward: nn.Module,
        norm: Callable[[], Norm],
        *,
        cross_attention: nn.Module | None = None,
        dropout: float = 0.0,
        pre: bool = False,
    ) -> None:
        super().__init__()
        self.mixing = mixing
        self.mixing_residual = Residual(norm(), dropout, pre)
        self.cross_attention = cross_attention
        self.cross_residual = None if cross_attention is None else Residual(norm(), dropout, pre)
        self.feed_forward = feed_forward
        self.feed_forward_residual = Residual(norm(), dropout, pre)

    def forward(
        self,
        stream: Stream,
        visible: dict[str, Any],
        context: torch.Tensor | None = None,
        context_visible: dict[str, Any] | None = None,
        cache: Layer | None = None,
    ) -> Stream:
        """Run the sub-layers on the stream.

        Args:
            stream: of (B, L, d), or of packed sequences, (total, d).
            visible: masks and bias of self-attention, as arguments of
                :func:`pytransformer.attention`.
            context, context_visible: input of cross-attention, and its masks.
            cache: this layer's cache, in incremental decoding.
        """
        if cache is not None:
            visible = {**visible, "cache": cache}
        stream = self.mixing_residual(stream, lambda x: self.mixing(x, **visible))
        cross = self.cross_attention
        if cross is not None and self.cross_residual is not None:
            stream = self.cross_residual(
                stream, lambda x: cross(x, context, cache=cache, **(context_visible or {}))
            )
        return self.feed_forward_residual(stream, self.feed_forward)


class Stack(nn.Module):
    """A sequence of blocks with a final norm.

    Args:
        blocks: all pre-norm or all post-norm.
        norm: the final norm; required by pre-norm, because it completes the sum.
        dropout: applied to the embeddings and, pre-norm, to the final sum.

    If the batch has enough padding at the end of its sequences, the stack removes it before the
    first block and restores it as zeros after the last (:mod:`.packing`). ``packs = False`` turns
    this off, for hooks that need (B, L, d).
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        norm: Norm | None,
        dropout: float = 0.0,
        pre: bool = False,
    ) -> None:
        super().__init__()
        if pre and norm is None:
            raise ValueError("Stack: pre-norm blocks need a last norm")
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.dropout, self.pre = dropout, pre
        # Packing requires that tokens mix by attention only. A pattern depends on positions.
        self.packs = all(
            isinstance(b, Block)
            and isinstance(b.mixing, MultiHeadAttention)
            and b.mixing.pattern is None
            for b in blocks
        )

    def forward(
        self,
        x: torch.Tensor,
        visible: dict[str, Any],
        context: torch.Tensor | None = None,
        context_visible: dict[str, Any] | None = None,
        cache: DecoderCache | None = None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states, (B, L, d) to (B, L, d).

        Embedding dropout runs here; pre-norm fuses it with the first norm.

        Args:
            wanted: (B, L) bool, the positions that are read; padding is packed away only if none of
                it is read. None means no padding is read.
        """
        packing = (
            Packing.of(visible, x, wanted=wanted, if_worth=True)
            if self.packs and cache is None
            else None
        )
        if packing is not None and context is not None:
            of_context = Packing.of(context_visible or {}, context)
            if of_context is None:
                packing = None
            else:
                context, context_visible = of_context.pack(context), packing.visible({}, of_context)
        if packing is None:
            return self._run(x, visible, context, context_visible, cache)
        return packing.unpack(
            self._run(
                packing.pack(x), packing.visible(visible, packing), context, context_visible, None
            )
        )

    def _run(
        self,
        x: torch.Tensor,
        visible: dict[str, Any],
        context: torch.Tensor | None,
        context_visible: dict[str, Any] | None,
        cache: DecoderCache | None,
    ) -> torch.Tensor:
        if not self.pre:
            x = nn.functional.dropout(x, self.dropout, self.training)
        stream = Stream(x)
        for i, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layers[i]
            stream = block(stream, visible, context, context_visible, layer)
        if self.norm is None:
            return stream.x
        if self.pre:
            return self.norm.add(*stream, self.dropout if self.training else 0.0)[0]
        return self.norm(stream.x)
