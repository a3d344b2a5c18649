# SPDX-License-Identifier: Apache-2.0
"""Hugging Face attention with rotary embedding, as in Llama.

The norm of queries and keys, if any, and the rotation become one op each,
:func:`pytransformer.rotary`, with the model's tables of cos and sin. Projections, the user's cache
and the call of transformers' attention interface are unchanged and in the same order, so every
``attn_implementation`` works and hooks run. GPT-J uses the interface since transformers 5.24; its
earlier attention is converted too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...ops.attention import attention
from ...ops.rotary import rotary
from .hugging_face_rules import _rule
from .modules import droppable, is_norm, probability, unhooked
from .rules import Rule, update_cache

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tables_fit(cos: Any, sin: Any) -> bool:
    """Return whether the op supports these tables: (B or 1, L, dims), without gradient."""
    if not isinstance(cos, torch.Tensor) or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    return not (cos.requires_grad or sin.requires_grad)


def norm_eps(norm: Any) -> float:
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


class Turned:
    """Base of converted attention, as in Llama; subclasses override the differences."""

    projection_out = "o_proj"
    norms: tuple[str, ...] = ()  # norms of queries and keys, per head
    norm_offset = 0.0
    interleaved = False

    def heads(self: Any, x: torch.Tensor) -> Heads:
        """Return queries, keys and values, (B, H, L, D) each, before norm and rotation."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(x).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return query, key, value

    def for_interface(self: Any) -> dict[str, Any]:
        """Return the model's extra attention arguments, besides dropout and scaling."""
        return {}

    def turned_and_attended(
        self: Any,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        mask: Any,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.heads(x)
        by = [getattr(self, name) for name in self.norms] or [None, None]
        query, key = (
            _turned(t, norm, tables, self.norm_offset, self.interleaved)
            for t, norm in zip((query, key), by)
        )
        if cache is not None:
            key, value = update_cache(self, self.layer_idx, cache, key, value, kwargs)
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = sys.modules[type(self).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self,
            query,
            key,
            value,
            mask,
            dropout=dropout,
            scaling=self.scaling,
            **self.for_interface(),
            **kwargs,
        )
        return getattr(self, self.projection_out)(out.reshape(*x.shape[:-1], -1)), weights


class RotaryAttention(Turned):  # Llama
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if position_embeddings is None or not tables_fit(*position_embeddings):
            return NotImplemented
        return self.turned_and_attended(
            hidden_states, position_embeddings, attention_mask, past_key_values, kwargs
        )


def _turned(
    x: torch.Tensor,
    norm: Any,
    tables: tuple[torch.Tensor, torch.Tensor],
    offset: float,
    interleaved: bool = False,
) -> torch.Tensor:
    settings: dict[str, Any] = (
        {}
        if norm is None
        else {"weight": norm.weight, "eps": norm_eps(norm), "weight_offset": offset}
    )
    cos, sin = tables
    return rotary(x, cos=cos, sin=sin, dims=cos.shape[-1], interleaved=interleaved, **settings)


class WindowOfConfig(RotaryAttention):  # Mistral
    def for_interface(self: Any) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class WindowOfLayer(RotaryAttention):  # Qwen 2
    def for_interface(self: Any) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class WindowAndSoftcap(RotaryAttention):  # Gemma 2
    def for_interface(self: Any) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window, "softcap": self.attn_logit_softcapping}


class NormOfHeads(WindowOfLayer):  # Qwen 3
    norms = ("q_norm", "k_norm")


class ShiftedNormOfHeads(NormOfHeads):  # Gemma 3
    norm_offset = 1.0


class OneProjection(WindowOfConfig):  # Phi-3
    def heads(self: Any, x: torch.Tensor) -> Heads:
        kv = self.num_key_value_heads
        t = self.qkv_proj(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
        query, key, value = t.split((t.shape[1] - 2 * kv, kv, kv), 1)
        return query, key, value


# GPT-NeoX: matrix rows are query, key and value of each head in turn.
class ProjectionByHead(Turned):
    projection_out = "dense"

    def heads(self: Any, x: torch.Tensor) -> Heads:
        t = self.query_key_value(x).view(*x.shape[:-1], -1, 3 * self.head_size).transpose(1, 2)
        query, key, value = t.chunk(3, -1)
        return query, key, value

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any, layer_past: Any = None,
        position_embeddings: Any = None, **kwargs: Any
    ) -> Any:  # fmt: skip
        if position_embeddings is None or not tables_fit(*position_embeddings):
            return NotImplemented
        return self.turned_and_attended(
            hidden_states, position_embeddings, attention_mask, layer_past, kwargs
        )


class AdjacentPairs(Turned):  # GPT-J of transformers 5.24
    projection_out = "out_proj"
    interleaved = True

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        sin, cos = position_embeddings
        if not tables_fit(cos, sin):
            return NotImplemented
        tables = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        out, weights = self.turned_and_attended(
            hidden_states, tables, attention_mask, past_key_values, kwargs
        )
        return self.resid_dropout(out), weights


class OwnAttention:  # GPT-J before transformers 5.24
    """Interleaved rotation and GPT-J's attention, with float32 scores and a dense additive mask.

    The mask is the eager one. The kernel computes scores and weights without materializing them.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        layer_past: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if output_attentions:
            return NotImplemented
        shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        rows = self.embed_positions.to(position_ids.device)[position_ids].to(key.dtype)
        sin, cos = (t.repeat_interleave(2, -1) for t in rows.chunk(2, -1))
        query, key = (_turned(t, None, (cos, sin), 0.0, interleaved=True) for t in (query, key))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        out = attention(
            query, key, value, attn_mask=attention_mask,
            dropout_p=probability(self.attn_dropout, self.training),
            scale=1.0 / self.scale_attn,
        )  # fmt: skip
        return self.resid_dropout(self.out_proj(out.transpose(1, 2).flatten(2))), None


def _rotary_rule(mixin: type[Turned], digest_of_forward: str, **models: str) -> None:
    expected = "rms_norm with 1 + weight" if mixin.norm_offset else "rms_norm"

    def condition(module: Any) -> str | None:
        norms = [getattr(module, name) for name in mixin.norms]
        for norm in norms:
            if not is_norm(norm, expected):
                return f"has a {type(norm).__name__} where a known RMS norm was expected"
        return unhooked(*norms)

    what = "rotary with the norms of queries and keys" if mixin.norms else "rotary"
    _rule(Rule("attention", what, mixin, condition, (digest_of_forward,)), **models)


_rotary_rule(
    RotaryAttention, "e0dc6709f77e",
    llama="LlamaAttention", arcee="ArceeAttention", gemma="GemmaAttention",
    granite="GraniteAttention", granitemoe="GraniteMoeAttention",
    granitemoeshared="GraniteMoeSharedAttention", qwen2_moe="Qwen2MoeAttention",
    phimoe="PhimoeAttention",
)  # fmt: skip
_rotary_rule(
    WindowOfConfig,
    "209ea151b52b",
    mistral="MistralAttention",
    mixtral="MixtralAttention",
    minimax="MiniMaxAttention",
)
_rotary_rule(
    WindowOfLayer,
    "b276710247d4",
    qwen2="Qwen2Attention",
    cwm="CwmAttention",
    ministral="MinistralAttention",
)
_rotary_rule(
    WindowAndSoftcap, "07623442ea6a", gemma2="Gemma2Attention", vaultgemma="VaultGemmaAttention"
)
_rotary_rule(
    NormOfHeads,
    "78643a229057",
    qwen3="Qwen3Attention",
    qwen3_moe="Qwen3MoeAttention",
    dots1="Dots1Attention",
)
_rotary_rule(ShiftedNormOfHeads, "76d941e97a38", gemma3="Gemma3Attention")
_rotary_rule(OneProjection, "0cc61163a452", phi3="Phi3Attention")
_rotary_rule(ProjectionByHead, "c054fe870f72", gpt_neox="GPTNeoXAttention")
_rule(
    Rule(
        "attention", "rotary and attention", OwnAttention,
        lambda m: droppable(m.attn_dropout), ("09136a0f4901",),
        newer=Rule("attention", "rotary", AdjacentPairs, digests=("f7fc15a732e8",)),
    ),
    gptj="GPTJAttention",
)  # fmt: skip
