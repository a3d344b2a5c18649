# SPDX-License-Identifier: Apache-2.0
"""The Transformer in PyTorch's modules: the eager baseline for our model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from pytransformer.models import Transformer, TransformerConfig
from pytransformer.nn import Block, FeedForward, MultiHeadAttention, sinusoidal


class WideAttention(nn.Module):
    """Replacement for ``nn.MultiheadAttention`` with free head and value sizes.

    It has the same names and call signature, so the layers of ``nn.Transformer`` accept it.
    Attention is ``F.scaled_dot_product_attention``.
    """

    batch_first, _qkv_same_embed_dim = (
        True,
        False,
    )  # attributes that these layers read; the second disables their fused path

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = config
        head = c.head_dim or c.d_model // c.num_heads
        self.heads, self.dropout = c.num_heads, c.attention_dropout
        self.widths = [c.num_heads * size for size in (head, head, c.value_dim or head)]
        self.in_proj_weight = nn.Parameter(torch.empty(sum(self.widths), c.d_model))
        self.in_proj_bias = nn.Parameter(torch.zeros(sum(self.widths)))
        self.out_proj = nn.Linear(self.widths[2], c.d_model)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention.

        attn_mask (L, L) and key_padding_mask (B, L) are added to the scores; boolean masks are True
        at hidden pairs.
        """
        weights, biases = (
            self.in_proj_weight.split(self.widths),
            self.in_proj_bias.split(self.widths),
        )
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases)
        )
        is_causal = is_causal and key_padding_mask is None
        masks = [] if is_causal or attn_mask is None else [_added(attn_mask, q.dtype)]
        if key_padding_mask is not None:
            masks.append(_added(key_padding_mask, q.dtype)[:, None, None, :])
        p = self.dropout if self.training else 0.0
        result = F.scaled_dot_product_attention(
            q, k, v, sum(masks, q.new_zeros(())) if masks else None, p, is_causal
        )
        return self.out_proj(result.transpose(1, 2).flatten(-2)), None


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
    )


def widen(core: nn.Transformer, config: TransformerConfig) -> nn.Transformer:
    """Use :class:`WideAttention` in all layers if the head size is not d_model / num_heads."""
    if config.head_dim is not None or config.value_dim is not None:
        for layer in [*core.encoder.layers, *core.decoder.layers]:
            for name in ("self_attn", "multihead_attn"):
                if hasattr(layer, name):
                    setattr(layer, name, WideAttention(config))
    return core


class EagerTransformer(nn.Module):
    """``torch.nn.Transformer`` with sinusoidal embeddings, an output layer and our weights.

    Args:
        ours: a model with sinusoidal positions, any head size, and dropout only on sub-layers and
            embeddings.
    """

    places: torch.Tensor

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        c = ours.config
        self.config = c
        self.source_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.target_embedding = (
            self.source_embedding
            if c.target_vocab_size is None
            else nn.Embedding(c.target_vocab_size, c.d_model)
        )
        self.register_buffer(
            "places",
            sinusoidal(c.max_length, c.d_model, halves=c.positions == "sinusoidal-halves"),
            persistent=False,
        )
        core = nn.Transformer(
            c.d_model, c.num_heads, c.num_encoder_layers, c.num_decoder_layers, c.hidden, c.dropout,
            c.activation,
            batch_first=True, norm_first=c.norm == "pre",
        )  # fmt: skip
        self.core = widen(core, c)
        if ours.encoder.norm is None:
            self.core.encoder.norm = self.core.decoder.norm = None
        self.output = nn.Linear(c.d_model, self.target_embedding.num_embeddings, bias=c.logits_bias)
        if c.tied:
            self.output.weight = self.target_embedding.weight
        self.to(ours.head.weight.dtype).load_state_dict(self.translated(ours))

    def translated(self, ours: Transformer) -> dict[str, torch.Tensor]:
        """Return our state dict under the names of these modules."""
        state = {
            "source_embedding.weight": ours.source_embedding.weight,
            "target_embedding.weight": ours.target_embedding.weight,
            "output.weight": ours.head.weight,
        }  # fmt: skip
        if ours.head.bias is not None:
            state["output.bias"] = ours.head.bias
        for side, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
            norms = (
                ("mixing", "feed_forward")
                if side == "encoder"
                else ("mixing", "cross", "feed_forward")
            )
            for i, block in enumerate(stack.blocks):
                assert isinstance(block, Block)
                mixing, network, cross = block.mixing, block.feed_forward, block.cross_attention
                assert isinstance(mixing, MultiHeadAttention) and isinstance(network, FeedForward)
                to = f"core.{side}.layers.{i}"
                for kind in ("weight", "bias"):
                    state[f"{to}.self_attn.in_proj_{kind}"] = getattr(mixing.qkv, kind)
                    state[f"{to}.self_attn.out_proj.{kind}"] = getattr(mixing.out, kind)
                    state[f"{to}.linear1.{kind}"] = getattr(network.w1, kind)
                    state[f"{to}.linear2.{kind}"] = getattr(network.w2, kind)
                    for n, norm in enumerate(norms, 1):
                        state[f"{to}.norm{n}.{kind}"] = getattr(
                            getattr(block, f"{norm}_residual").norm, kind
                        )
                    if isinstance(cross, MultiHeadAttention):
                        parts = getattr(cross.query, kind), getattr(cross.key_value, kind)
                        state[f"{to}.multihead_attn.in_proj_{kind}"] = torch.cat(parts)
                        state[f"{to}.multihead_attn.out_proj.{kind}"] = getattr(cross.out, kind)
            if stack.norm is not None:
                state |= {
                    f"core.{side}.norm.{kind}": getattr(stack.norm, kind)
                    for kind in ("weight", "bias")
                }
        return state

    def embed(self, ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        x = embedding(ids) * math.sqrt(self.config.d_model) + self.places[: ids.shape[1]].to(
            embedding.weight.dtype
        )
        return nn.functional.dropout(x, self.config.dropout, self.training)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Return logits (B, L, vocabulary); attention_mask is (B, Ls), 0 = padding."""
        length = decoder_input_ids.shape[1]
        hidden = self.core(
            self.embed(input_ids, self.source_embedding),
            self.embed(decoder_input_ids, self.target_embedding),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1),
            tgt_is_causal=True,
            src_key_padding_mask=~attention_mask.bool(),
            memory_key_padding_mask=~attention_mask.bool(),
        )  # fmt: skip
        return self.output(hidden)
