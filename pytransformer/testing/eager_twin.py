# SPDX-License-Identifier: Apache-2.0
"""The Transformer again, in PyTorch's own modules: the eager code that our model is compared with."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..models import Transformer
from ..nn import Block, FeedForward, MultiHeadAttention, sinusoidal


class EagerTransformer(nn.Module):
    """``torch.nn.Transformer`` between embeddings with sinusoids and an output layer, with the weights of one of our models.

    Args:
        ours: with sinusoidal positions, equal numbers of heads, and dropout only on sub-layers and embeddings.
    """

    places: torch.Tensor

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        c = ours.config
        self.config = c
        self.source_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.target_embedding = (
            self.source_embedding if c.target_vocab_size is None else nn.Embedding(c.target_vocab_size, c.d_model)
        )
        self.register_buffer("places", sinusoidal(c.max_length, c.d_model), persistent=False)
        self.core = nn.Transformer(
            c.d_model, c.num_heads, c.num_encoder_layers, c.num_decoder_layers, c.hidden, c.dropout, c.activation,
            batch_first=True, norm_first=c.norm == "pre",
        )  # fmt: skip
        if ours.encoder.norm is None:
            self.core.encoder.norm = self.core.decoder.norm = None
        self.output = nn.Linear(c.d_model, self.target_embedding.num_embeddings, bias=c.logits_bias)
        if c.tied:
            self.output.weight = self.target_embedding.weight
        self.to(ours.head.weight.dtype).load_state_dict(self.translated(ours))

    def translated(self, ours: Transformer) -> dict[str, torch.Tensor]:
        """Our state dict under the names of these modules."""
        state = {
            "source_embedding.weight": ours.source_embedding.weight, "target_embedding.weight": ours.target_embedding.weight,
            "output.weight": ours.head.weight,
        }  # fmt: skip
        if ours.head.bias is not None:
            state["output.bias"] = ours.head.bias
        for side, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
            norms = ("mixing", "feed_forward") if side == "encoder" else ("mixing", "cross", "feed_forward")
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
                        state[f"{to}.norm{n}.{kind}"] = getattr(getattr(block, f"{norm}_residual").norm, kind)
                    if isinstance(cross, MultiHeadAttention):
                        parts = getattr(cross.query, kind), getattr(cross.key_value, kind)
                        state[f"{to}.multihead_attn.in_proj_{kind}"] = torch.cat(parts)
                        state[f"{to}.multihead_attn.out_proj.{kind}"] = getattr(cross.out, kind)
            if stack.norm is not None:
                state |= {f"core.{side}.norm.{kind}": getattr(stack.norm, kind) for kind in ("weight", "bias")}
        return state

    def embed(self, ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        x = embedding(ids) * math.sqrt(self.config.d_model) + self.places[: ids.shape[1]].to(embedding.weight.dtype)
        return nn.functional.dropout(x, self.config.dropout, self.training)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, L, vocabulary). attention_mask: (B, Ls), 0 = padding."""
        length = decoder_input_ids.shape[1]
        hidden = self.core(
            self.embed(input_ids, self.source_embedding), self.embed(decoder_input_ids, self.target_embedding),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=input_ids.device).triu(1), tgt_is_causal=True,
            src_key_padding_mask=~attention_mask.bool(), memory_key_padding_mask=~attention_mask.bool(),
        )  # fmt: skip
        return self.output(hidden)
