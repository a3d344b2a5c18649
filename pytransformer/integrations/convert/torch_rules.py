# SPDX-License-Identifier: Apache-2.0
"""Rules for torch.nn: linear layers (and GPT-2's), norms, attention, nn.Transformer layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from ...nn.linear import fast_linear, linear
from ...ops.attention import attention
from ...ops.layer_norm import layer_norm, rms_norm
from .modules import (
    add_norm,
    droppable,
    feed_forward,
    first_reason,
    fusable_norm,
    needs,
    probability,
    special_weights,
    unfusable,
    unhooked,
)
from .rules import RULES, Converted, Rule, original_class


class LayerNorm:
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Linear:
    """Our product where it is faster than PyTorch's."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class Conv1D:
    """GPT-2's ``x W + b``, W (k, n), by our product where it is faster; else the original."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = fast_linear(x, self.weight, self.bias, along_k=True)
        return NotImplemented if found is None else found


def multi_head(
    module: nn.MultiheadAttention,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attn_mask: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """Return nn.MultiheadAttention of batched inputs without weights: gemms and the fused op.

    Masks are torch.nn's: True (or -inf) hides. They are passed unchanged, (B, Lk) and (Lq, Lk) or
    (B H, Lq, Lk), and never expanded. With ``is_causal`` the caller guarantees that attn_mask is
    causal.
    """
    heads = module.num_heads
    # [B, H, L, D] views in either layout
    order = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    q, k, v = (
        t.unflatten(-1, (heads, module.head_dim)).permute(order)
        for t in _projections(module, *inputs)
    )
    mask, bias = _masks(None if is_causal else attn_mask, key_padding_mask, q)
    out = attention(
        q,
        k,
        v,
        attn_mask=mask,
        bias=bias,
        causal="top_left" if is_causal else None,
        dropout_p=probability(module.dropout, module.training),
    )
    out = out.permute(0, 2, 1, 3) if module.batch_first else out.permute(2, 0, 1, 3)
    return linear(out.flatten(-2), module.out_proj.weight, module.out_proj.bias)


def _projections(
    m: nn.MultiheadAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the three projections, from one gemm if the inputs are the same tensor."""
    weights: tuple[torch.Tensor, ...]
    if not m._qkv_same_embed_dim:
        weights = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
    elif query is key and key is value:
        return linear(query, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)
    else:
        weights = m.in_proj_weight.chunk(3)
    biases = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))


def _masks(
    attn_mask: torch.Tensor | None, padding: torch.Tensor | None, query: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return torch.nn's two masks as attention's ``attn_mask`` and ``bias``, as broadcast views."""
    if attn_mask is not None:
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.unflatten(0, query.shape[:2])
        attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    if padding is None:
        return attn_mask, None
    padding = padding[:, None, None, :]
    if attn_mask is None and padding.dtype == torch.bool:
        return ~padding, None
    if padding.dtype == torch.bool:
        padding = torch.zeros_like(padding, dtype=query.dtype).masked_fill_(padding, float("-inf"))
    return attn_mask, padding


def plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether these are batched dense tensors, as the fused ops require here."""
    return all(t is None or (t.dim() == 3 and not t.is_nested) for t in tensors)


class MultiheadAttention:
    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if need_weights or not plain(query, key, value) or (is_causal and attn_mask is None):
            return NotImplemented
        return multi_head(self, (query, key, value), attn_mask, key_padding_mask, is_causal), None


def _attention_condition(m: nn.MultiheadAttention) -> str | None:
    if m.bias_k is not None:
        return "add_bias_kv=True appends learned keys, which our op has no argument for"
    if m.add_zero_attn:
        return "add_zero_attn=True appends a key of zeros, which our op has no argument for"
    return None


class _Layer:
    """Base of the encoder and decoder layers.

    Post-norm fuses each sum with the norm after it. Pre-norm fuses it with the norm of the next
    sub-layer, so only the last sum of the layer is not fused.
    """

    def _network(self: Any, x: torch.Tensor) -> torch.Tensor:
        return feed_forward(
            x,
            self.linear1,
            self.linear2,
            self.activation,
            dropout=probability(self.dropout, self.training),
        )

    def _attend(
        self: Any,
        module: nn.MultiheadAttention,
        x: torch.Tensor,
        memory: torch.Tensor,
        mask: Any,
        padding: Any,
        causal: bool,
    ) -> torch.Tensor:
        bypassed = (
            original_class(module) is nn.MultiheadAttention
            and isinstance(module, Converted)
            and unhooked(module) is None
        )
        if bypassed and not (causal and mask is None):  # torch.nn raises for it
            return multi_head(module, (x, memory, memory), mask, padding, causal)
        return module(
            x,
            memory,
            memory,
            attn_mask=mask,
            key_padding_mask=padding,
            need_weights=False,
            is_causal=causal,
        )[0]

    def _sublayers(
        self: Any, x: torch.Tensor, steps: list[tuple[Any, nn.LayerNorm, nn.Dropout]]
    ) -> torch.Tensor:
        if not self.norm_first:
            for run, norm, dropout in steps:
                x, _ = add_norm(run(x), x, norm, probability(dropout, self.training))
            return x
        normed = steps[0][1](x)
        for (run, _, dropout), (_, norm, _) in itertools.pairwise(steps):
            normed, x = add_norm(run(normed), x, norm, probability(dropout, self.training))
        run, _, dropout = steps[-1]
        return x + dropout(run(normed))


class EncoderLayer(_Layer):
    def forward(
        self: Any,
        src: torch.Tensor,
        src_mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        if not plain(src):
            return NotImplemented
        return self._sublayers(src, [
            (lambda x: self._attend(self.self_attn, x, x, src_mask, src_key_padding_mask,
                is_causal), self.norm1, self.dropout1),
            (self._network, self.norm2, self.dropout2),
        ])  # fmt: skip


class DecoderLayer(_Layer):
    def forward(
        self: Any,
        tgt: torch.Tensor,
        memory: torch.Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        if not plain(tgt, memory):
            return NotImplemented
        return self._sublayers(tgt, [
            (lambda x: self._attend(self.self_attn, x, x, tgt_mask, tgt_key_padding_mask,
                tgt_is_causal), self.norm1, self.dropout1),
            (lambda x: self._attend(self.multihead_attn, x, memory, memory_mask,
                memory_key_padding_mask, memory_is_causal),
             self.norm2, self.dropout2),
            (self._network, self.norm3, self.dropout3),
        ])  # fmt: skip


class Encoder:
    # The inference fast path packs padded batches into nested tensors before any layer runs.
    enable_nested_tensor = property(lambda self: False, lambda self, value: None)


def _layer_condition(m: Any) -> str | None:
    norms, dropouts = [m.norm1, m.norm2], [m.dropout, m.dropout1, m.dropout2]
    if isinstance(m, nn.TransformerDecoderLayer):
        norms, dropouts = [*norms, m.norm3], [*dropouts, m.dropout3]
    return first_reason(
        needs(m.activation, m.linear1, m.linear2), droppable(*dropouts), fusable_norm(*norms)
    )


def _encoder_condition(m: nn.TransformerEncoder) -> str | None:
    first = m.layers[0]
    known = isinstance(first, Converted) or type(first) is nn.TransformerEncoderLayer
    return (
        None
        if known
        else f"its layers are {type(first).__name__}, not torch.nn.TransformerEncoderLayer"
    )


RULES |= {
    nn.Linear: Rule("linear", "linear", Linear, special_weights),
    "transformers.pytorch_utils.Conv1D": Rule(
        "linear", "linear", Conv1D, special_weights, ("28cae277c3f2",)
    ),
    nn.LayerNorm: Rule("norm", "layer_norm", LayerNorm, special_weights),
    nn.RMSNorm: Rule("norm", "rms_norm", RMSNorm, special_weights),
    nn.MultiheadAttention: Rule(
        "attention",
        "attention",
        MultiheadAttention,
        lambda m: first_reason(
            _attention_condition(m), _projection_condition(m), droppable(m.dropout)
        ),
    ),
    nn.TransformerEncoderLayer: Rule(
        "block", "feed_forward and add_norm", EncoderLayer, _layer_condition
    ),
    nn.TransformerDecoderLayer: Rule(
        "block", "feed_forward and add_norm", DecoderLayer, _layer_condition
    ),
    nn.TransformerEncoder: Rule("block", "padded batches stay padded", Encoder, _encoder_condition),
}


def _projection_condition(m: nn.MultiheadAttention) -> str | None:
    # nn.MultiheadAttention's projection class is a Linear whose forward it never calls.
    return (
        None
        if isinstance(m.out_proj, nn.Linear) and not m.out_proj._forward_hooks
        else unfusable(m.out_proj)
    )
