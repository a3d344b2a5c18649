# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention on the fused op: self and cross, cached, GQA, any head dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..ops.attention import attention
from ..ops.attention_varlen import attention_varlen
from .cache import Layer
from .linear import Linear
from .patterns import Pattern
from .taps import AttentionTap

if TYPE_CHECKING:
    from .context import Context


class MultiHeadAttention(nn.Module):
    """Multi-head attention, ``concat(head_1, ..., head_h) W_O``.

    ``head_i = softmax(scale * q_i k_iᵀ + bias + mask) v_i``. Self-attention projects queries, keys
    and values with one matrix, ``qkv``. Cross-attention has ``query`` and ``key_value``, so a fixed
    context is projected once. The rows of both matrices are ordered query, key, value and, within
    each, by head.

    Args:
        d_model: size of x and of the result.
        num_heads: query heads.
        cross: whether keys and values come from ``context``.
        num_kv_heads: key and value heads, a divisor of num_heads; None means num_heads.
        head_dim: size of a head; None means d_model / num_heads, which makes the parameter count
            independent of the number of heads.
        value_dim: size of a head's values; None means head_dim. ``out`` is (d_model, num_heads *
            value_dim).
        bias: whether the projections have biases.
        scale: factor of the scores; None means 1 / sqrt(head_dim).
        dropout: probability of dropping an attention weight in training.
        context_dim: size of ``context``; None means d_model.
        sinks: whether each head learns a sink, an extra term of its softmax's denominator,
            initially zero.
        pattern: the pairs that self-attention computes, such as Longformer's or BigBird's. It
            requires full sequences without a cache.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; grouped queries:
    Ainslie et al., "GQA" (2023).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        cross: bool = False,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
        context_dim: int | None = None,
        sinks: bool = False,
        pattern: Pattern | None = None,
    ) -> None:
        super().__init__()
        if cross and pattern is not None:
            raise ValueError(
                "MultiHeadAttention: a pattern is of self-attention; cross=True takes an attn_mask"
                " in the call"
            )
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(
                f"MultiHeadAttention: num_heads {num_heads} must be a multiple of num_kv_heads"
                f" {kv_heads}"
            )
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                f"MultiHeadAttention: d_model {d_model} is not a multiple of num_heads {num_heads};"
                " give head_dim"
            )
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if min(self.head_dim, self.value_dim) < 1:
            raise ValueError(
                "MultiHeadAttention: head_dim and value_dim must be at least 1, got"
                f" {self.head_dim} and {self.value_dim}"
            )
        self.scale, self.dropout = scale, dropout
        self.widths = (
            num_heads * self.head_dim,
            kv_heads * self.head_dim,
            kv_heads * self.value_dim,
        )
        if cross:
            self.query = Linear(d_model, self.widths[0], bias)
            self.key_value = Linear(context_dim or d_model, sum(self.widths[1:]), bias)
        else:
            self.qkv = Linear(d_model, sum(self.widths), bias)
        self.out = Linear(num_heads * self.value_dim, d_model, bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.cross, self.pattern = cross, pattern
        self.observer: Callable[[AttentionTap], None] | None = None  # set by nn.taps
        self.context: Context | None = None  # set by nn.context: the ranks that share the sequence

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        cache: Layer | None = None,
        **visible: Any,
    ) -> torch.Tensor:
        """Return the attention output, in the shape of x.

        Args:
            x: (B, Lq, d_model), or packed sequences, (total, d_model).
            context: (B, Lk, context_dim), packed if x is; for cross-attention only. It may be
                omitted once the cache holds its keys.
            cache: keys and values of earlier positions, to which x's are appended. Causal attention
                is then ``"bottom_right"``.
            **visible: masks and bias, passed unchanged to :func:`pytransformer.attention`, or to
                :func:`pytransformer.attention_varlen` for packed sequences.
        """
        if self.cross:
            query, (key, value) = (
                _heads(self.query(x), self.head_dim),
                self._context(context, cache),
            )
        else:
            if context is not None:
                raise ValueError(
                    "MultiHeadAttention: context is given, but it was made with cross=False"
                )
            q, k, v = _parts(self.qkv(x), self.widths)
            query, key, value = (
                _heads(q, self.head_dim),
                _heads(k, self.head_dim),
                _heads(v, self.value_dim),
            )
            query, key = self._positioned(query, key, cache, visible)
            if cache is not None:
                key, value = cache.append(key, value)
                visible = {**visible, **cache.scales}
        if self.pattern is not None:
            visible = self._by_pattern(self.pattern, x, cache, visible)
        query, visible = self._place(query, visible)
        arguments = {**visible, "scale": self.scale, "sinks": self.sinks}
        packed = x.dim() == 2
        run = attention_varlen if packed else attention
        if self.context is not None:
            if packed or cache is not None:
                raise ValueError(
                    "MultiHeadAttention: in context_parallel neither a cache nor packed sequences"
                    " are split over ranks"
                )
            run = self.context.attention
        p = self.dropout if self.training else 0.0
        if self.observer is None:
            result = run(query, key, value, dropout_p=p, **arguments)
        else:
            result, lse = run(query, key, value, dropout_p=p, return_lse=True, **arguments)
            self.observer(AttentionTap.of(query, key, value, lse, arguments))
        return self.out((result if packed else result.transpose(1, 2)).flatten(-2))

    def _positioned(
        self, query: torch.Tensor, key: torch.Tensor, cache: Layer | None, visible: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and new keys with positions applied, before the cache stores the keys.

        Subclasses override it. It removes from ``visible`` the arguments that attention does not
        accept.
        """
        return query, key

    def _place(
        self, query: torch.Tensor, visible: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the queries and the call's masks and bias; relative encodings override it."""
        return query, visible

    def _by_pattern(
        self, pattern: Pattern, x: torch.Tensor, cache: Layer | None, visible: dict[str, Any]
    ) -> dict[str, Any]:
        if cache is not None or x.dim() == 2:
            what = "a cache" if cache is not None else "packed sequences"
            raise ValueError(
                f"MultiHeadAttention: {what} and the {pattern!r}: a pattern is of whole sequences,"
                " (B, L, d_model)"
            )
        return pattern.visible(x, visible)

    def _context(
        self, context: torch.Tensor | None, cache: Layer | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if cache is not None and cache.cross is not None:
            return cache.cross
        if context is None:
            raise ValueError(
                "MultiHeadAttention: cross-attention needs context, or a cache that has seen it"
            )
        k, v = _parts(self.key_value(context), self.widths[1:])
        key, value = _heads(k, self.head_dim), _heads(v, self.value_dim)
        if cache is not None:
            cache.cross = (key, value)
        return key, value

    def extra_repr(self) -> str:
        heads, kv_heads = (w // self.head_dim for w in self.widths[:2])
        return (
            f"heads={heads}, kv_heads={kv_heads}, head_dim={self.head_dim}, cross={self.cross}"
            + "".join(
                f", {name}={value!r}"
                for name, value, usual in (
                    ("value_dim", self.value_dim, self.head_dim),
                    ("pattern", self.pattern, None),
                )
                if value != usual
            )
        )


def _parts(projected: Any, widths: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """Split one projection; with heads split over ranks it already is a tuple (nn.parallel)."""
    return projected if isinstance(projected, tuple) else projected.split_with_sizes(widths, -1)


def _heads(t: torch.Tensor, size: int) -> torch.Tensor:
    """Return views: (B, L, H D) as (B, H, L, D), and (total, H D) as (total, H, D)."""
    t = t.view(*t.shape[:-1], t.shape[-1] // size, size)  # unflatten is Python code: 12 us a call
    return t if t.dim() == 3 else t.transpose(1, 2)
