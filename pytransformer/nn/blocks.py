# SPDX-License-Identifier: Apache-2.0
"""Blocks of a Transformer: sub-layers, each in a residual connection with dropout and a norm, that one fused op computes.

A stack passes a :class:`Stream` from block to block. In a pre-norm model it is an unfinished sum: the last sub-layer's result
and what it will be added to, because the norm that follows adds them (:func:`pytransformer.add_norm`). In a post-norm model
every sub-layer ends with that norm and there is nothing unfinished.
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
    """``residual + dropout(x)``, not yet added up; without residual just ``x`` (dropout too, if a pre-norm stack begins)."""

    x: torch.Tensor
    residual: torch.Tensor | None = None


class Residual(nn.Module):
    """One sub-layer's residual connection: ``norm(x + dropout(f(x)))`` post-norm, ``x + dropout(f(norm(x)))`` pre-norm.

    Args:
        norm: post-norm its norm after the sum, pre-norm the one before the sub-layer.
        dropout: on what is added, in training.
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
    """Self-attention or another mixing of tokens, cross-attention in a decoder, and the feed-forward network.

    Args:
        mixing: takes (B, L, d) and the visibility arguments of self-attention.
        feed_forward: takes (B, L, d).
        norm: makes one norm; called for each sub-layer.
        cross_attention: a :class:`MultiHeadAttention` made with ``cross=True``, for a decoder.
        dropout: on the result of each sub-layer, in training.
        pre: norms before the sub-layers (else after them).
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
        """
        Args:
            stream: of (B, L, d), or of packed sequences, (total, d).
            visible: masks and bias of self-attention, as :func:`pytransformer.attention` takes them.
            context, context_visible: what cross-attention attends to, and its masks.
            cache: this layer's, in a decoder that continues.
        """
        if cache is not None:
            visible = {**visible, "cache": cache}
        stream = self.mixing_residual(stream, lambda x: self.mixing(x, **visible))
        cross = self.cross_attention
        if cross is not None and self.cross_residual is not None:
            stream = self.cross_residual(stream, lambda x: cross(x, context, cache=cache, **(context_visible or {})))
        return self.feed_forward_residual(stream, self.feed_forward)


class Stack(nn.Module):
    """Blocks one after another, and the norm at the end.

    Args:
        blocks: all pre-norm or all post-norm.
        norm: the last norm. A pre-norm stack needs one: it finishes the sum.
        dropout: of that last sum, pre-norm; also on what goes in, pre-norm (the embeddings).

    Padding at the end of sequences, where there is enough of it, is left out before the first block and comes back as zeros
    after the last: see :mod:`.packing`. ``packs = False`` keeps it, for hooks that want (B, L, d).
    """

    def __init__(self, blocks: Sequence[nn.Module], norm: Norm | None, dropout: float = 0.0, pre: bool = False) -> None:
        super().__init__()
        if pre and norm is None:
            raise ValueError("Stack: pre-norm blocks need a last norm")
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.dropout, self.pre = dropout, pre
        # Blocks that mix tokens by attention alone care for nothing but which of them may see which. A pattern counts positions.
        self.packs = all(
            isinstance(b, Block) and isinstance(b.mixing, MultiHeadAttention) and b.mixing.pattern is None for b in blocks
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
        """(B, L, d) to (B, L, d). Embedding dropout happens here: pre-norm fused with the first norm, else by itself.

        wanted: (B, L) bool, where the result is read; if padding is, it is not left out. None: nobody reads padding.
        """
        packing = Packing.of(visible, x, wanted=wanted, if_worth=True) if self.packs and cache is None else None
        if packing is not None and context is not None:
            of_context = Packing.of(context_visible or {}, context)
            if of_context is None:
                packing = None
            else:
                context, context_visible = of_context.pack(context), packing.visible({}, of_context)
        if packing is None:
            return self._run(x, visible, context, context_visible, cache)
        return packing.unpack(self._run(packing.pack(x), packing.visible(visible, packing), context, context_visible, None))

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
