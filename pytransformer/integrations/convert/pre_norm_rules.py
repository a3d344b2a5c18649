# SPDX-License-Identifier: Apache-2.0
"""Rules of layers with a norm before each part, such as those of GPT-2, Llama and ViT.

The second norm takes the addition before it. Without gradient and dropout, C++ computes a whole
layer on the CPU in two calls, between which a decoder's cache is updated. A decoder's token takes
0.80 to 0.92 of the time that it takes with calls of inner modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...ops._core import fast_path
from . import code
from .hugging_face_rules import _rule, rows_in_cpp, runs_on_ours, weights_wanted
from .modules import (
    activation_name,
    add_norm,
    droppable,
    first_reason,
    fusable_norm,
    hooked,
    needs,
    probability,
    unfusable,
    unhooked,
)
from .rotary_rules import Heads, RotaryAttention, norm_eps, tables_fit
from .rules import Converted, Rule, original_class, update_cache


def _pre_norm(
    attention_norm: str,
    attention: str,
    network_norm: str,
    dropout: str | None = None,
    network: str = "mlp",
) -> tuple[type, Callable[[Any], str | None]]:
    """Return mixin and condition of a pre-norm block with a fused add and second norm."""

    by_name = attention == "self_attn"

    class PreNormBlock:
        def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("encoder_hidden_states") is not None:  # GPT-2 with cross-attention
                return NotImplemented
            if by_name:  # required by some attention signatures
                kwargs.setdefault("attention_mask", None)
            normed, attend = getattr(self, attention_norm)(hidden_states), getattr(self, attention)
            # Pass the input as the original does, because a pre-hook receives positional arguments
            # only.
            attended = (
                attend(hidden_states=normed, **kwargs) if by_name else attend(normed, **kwargs)
            )[0]
            p = 0.0 if dropout is None else probability(getattr(self, dropout), self.training)
            normed, stream = add_norm(attended, hidden_states, getattr(self, network_norm), p)
            out = getattr(self, network)(normed)
            return stream + (out if dropout is None else getattr(self, dropout)(out))

    def condition(m: Any) -> str | None:
        reason = fusable_norm(getattr(m, network_norm))
        return droppable(getattr(m, dropout)) if reason is None and dropout is not None else reason

    return PreNormBlock, condition


class Names(NamedTuple):
    """The attributes of a layer's inner modules."""

    first_norm: str
    attention: str
    second_norm: str
    projections: tuple[str, ...]  # of queries, keys and values; or one Conv1D of all three
    out: str  # the last projection of attention
    first: str  # of the network
    second: str
    activation: str
    gate: str | None = None
    network: str = "mlp"
    scaling: str = "scaling"  # of attention
    dropout: str | None = None  # after attention and the network


class PreNormFacts(NamedTuple):
    """Hold what a call of a whole layer reads of its modules."""

    settings: tuple[Any, ...] | None  # of pre_norm_heads; None: the inner modules must be called
    ours: bool = False  # its projections may run our product


def _settings(layer: Any, names: Names) -> tuple[Any, ...]:
    attend, network = getattr(layer, names.attention), getattr(layer, names.network)
    first = getattr(layer, names.first_norm)
    head_norms = getattr(attend, "norms", ())
    separate = len(names.projections) > 1
    key_and_value = () if separate else (None, None)
    in_attention = (*names.projections, *key_and_value, *(head_norms or (None, None)), names.out)
    paths = (
        (names.first_norm,),
        *(name and (names.attention, name) for name in in_attention),
        (names.second_norm,),
        *(name and (names.network, name) for name in (names.first, names.second, names.gate)),
    )
    return (
        paths,
        not separate,  # Conv1D
        not isinstance(first, torch.nn.LayerNorm),
        attend.head_dim,
        float(getattr(attend, names.scaling)),
        activation_name(getattr(network, names.activation)),
        norm_eps(first),
        norm_eps(getattr(layer, names.second_norm)),
        norm_eps(getattr(attend, head_norms[0])) if head_norms else 0.0,
    )


def _whole_layer(names: Names, known: Callable[[Any], bool], digest: str, **models: str) -> None:
    """Register the rule of layers. known(layer): C++ may bypass its inner modules."""
    block, condition = _pre_norm(
        names.first_norm, names.attention, names.second_norm, names.dropout
    )

    def facts(layer: Any) -> PreNormFacts:
        if torch.compiler.is_compiling() or not known(layer):  # it would trace digests
            return PreNormFacts(None)
        attend = getattr(layer, names.attention)
        projections = [getattr(attend, name) for name in (*names.projections, names.out)]
        ours = all(isinstance(projection, Converted) for projection in projections)
        return PreNormFacts(_settings(layer, names), ours)

    class WholeLayer(block):  # type: ignore[misc, valid-type]
        def forward(
            self: Any, hidden_states: torch.Tensor, *, facts: PreNormFacts, **kwargs: Any
        ) -> Any:
            found = _in_two_calls(self, names, hidden_states, facts, kwargs)
            return super().forward(hidden_states, **kwargs) if found is None else found

    rule = Rule("block", "add_norm", WholeLayer, condition, (digest,), facts=facts)
    _rule(rule, **models)


_READ = ("attention_mask", "position_embeddings")
_UNUSED = ("use_cache", "position_ids")


def _in_two_calls(
    layer: Any, names: Names, x: torch.Tensor, facts: PreNormFacts, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the layer's output by C++, or None if it does not take the call."""
    if facts.settings is None or (max_rows := rows_in_cpp(x, facts.ours)) is None:
        return None
    attend, cache = getattr(layer, names.attention), kwargs.get(layer.cache_keyword)
    more = {k: v for k, v in kwargs.items() if k not in (*_READ, layer.cache_keyword)}
    mask = kwargs.get("attention_mask")
    unused = _UNUSED if mask is None else (*_UNUSED, "is_causal")  # attention reads the mask alone
    if any(v is not None for k, v in more.items() if k not in unused):
        return None
    cos, sin = kwargs.get("position_embeddings") or (None, None)
    if isinstance(attend, RotaryAttention) != tables_fit(cos, sin):
        return None
    terms = _terms(mask, x.shape[1])
    if terms is None or hasattr(cache, "self_attention_cache"):  # of an encoder and a decoder
        return None
    if not runs_on_ours(attend.config) or weights_wanted(kwargs):
        return None
    x = x.contiguous()  # SigLIP's first layer has transposed patches
    of_layer = (layer, facts.settings, max_rows)
    heads = fast_path.entries.pre_norm_heads(x, cos, sin, *of_layer)
    if heads is NotImplemented:
        return None
    query, key, value = heads
    if cache is not None:
        key, value = update_cache(layer, attend.layer_idx, cache, key, value, more)
    if terms.keys in (None, key.shape[2]):
        out = fast_path.entries.pre_norm_rest(query, key, value, *terms[:3], x, *of_layer)
        if out is not NotImplemented:
            return out
    return _rest_by_modules(layer, names, x, (query, key, value), mask)


class _Terms(NamedTuple):
    mask: torch.Tensor | None
    causal: str
    left: int  # keys before the query's own that it sees; -1: all
    keys: int | None  # number of keys of the mask, if it must be equal


def _terms(mask: Any, queries: int) -> _Terms | None:
    """Return the mask as pre_norm_rest reads it, or None if it has other parts."""
    from ..hugging_face.mask import Mask

    if not isinstance(mask, Mask):
        return _Terms(mask, "none", -1, None)
    if mask.lengths is not None or mask.segments is not None or mask.shape[2] != queries:
        return None
    if mask.padding is None and mask.causal is None:
        return _Terms(mask.dense, "none", -1, mask.shape[3])
    left = -1 if mask.window is None else mask.window - 1
    return _Terms(mask.padding, mask.causal or "none", left, mask.shape[3])


def _rest_by_modules(
    layer: Any, names: Names, x: torch.Tensor, heads: Heads, mask: Any
) -> torch.Tensor:
    """Return the layer's output by its modules. The cache must not be updated twice."""
    from ..hugging_face import attention_forward

    attend = getattr(layer, names.attention)
    out, _ = attention_forward(attend, *heads, mask, scaling=getattr(attend, names.scaling))
    attended = getattr(attend, names.out)(out.flatten(2))
    normed, stream = add_norm(attended, x, getattr(layer, names.second_norm), 0.0)
    return stream + getattr(layer, names.network)(normed)


def _unknown(module: Any, digest: str) -> str | None:
    """Return why a module's forward is not the one with this digest, or None."""
    if code.digest(original_class(module), "forward") != digest:
        return "its forward is not one we have checked"
    return hooked(module)


def _no_conv1d(*modules: Any) -> str | None:
    for m in modules:
        cls = original_class(m)
        if (cls.__module__, cls.__name__) != ("transformers.pytorch_utils", "Conv1D"):
            return f"has a {type(m).__name__} where a Conv1D was expected"
    return unhooked(*modules)


def _gpt2(layer: Any) -> bool:
    attend, network = layer.attn, layer.mlp
    dropouts = attend.attn_dropout, attend.resid_dropout, network.dropout
    reason = first_reason(
        _unknown(attend, "a45cbe5263d3"),
        _unknown(network, "124e5f4b0b5f"),
        _no_conv1d(attend.c_attn, attend.c_proj, network.c_fc, network.c_proj),
        needs(network.act),
        droppable(*dropouts),
        fusable_norm(layer.ln_1),
    )
    return (
        reason is None
        and isinstance(layer.ln_1, Converted)
        and not any(probability(dropout, layer.training) > 0 for dropout in dropouts)
    )


def _llama(layer: Any) -> bool:
    attend, network = layer.self_attn, layer.mlp
    if not all(isinstance(m, Converted) for m in (layer.input_layernorm, attend, network)):
        return False
    if type(attend).heads is not RotaryAttention.heads or attend.norm_offset:
        return False
    norms = [getattr(attend, name) for name in attend.norms]
    reason = first_reason(
        hooked(attend, network),
        unfusable(attend.q_proj, attend.k_proj, attend.v_proj, attend.o_proj),
        needs(network.act_fn, network.gate_proj, network.up_proj, network.down_proj),
        fusable_norm(layer.input_layernorm, *norms),
    )
    return (
        reason is None
        and len({norm_eps(norm) for norm in norms}) < 2  # pre_norm_heads has one for both
        and not probability(attend.attention_dropout, attend.training)
    )


def _encoder(attention_digest: str, names: Names) -> Callable[[Any], bool]:
    """Return the check of an encoder's layers, whose attention has this forward."""

    def known(layer: Any) -> bool:
        attend, network = getattr(layer, names.attention), layer.mlp
        first = getattr(layer, names.first_norm)
        dropout = 0.0 if names.dropout is None else getattr(layer, names.dropout)
        in_attention = attend.dropout if names.dropout is None else attend.attention_dropout
        reason = first_reason(
            _unknown(attend, attention_digest),
            hooked(network),
            unfusable(*(getattr(attend, name) for name in (*names.projections, names.out))),
            needs(network.activation_fn, network.fc1, network.fc2),
            droppable(dropout),
            fusable_norm(first),
        )
        return (
            reason is None
            and isinstance(first, Converted)
            and isinstance(network, Converted)
            and not attend.is_causal  # SigLIP's passes it on
            and not probability(dropout, layer.training)
            and not probability(in_attention, attend.training)
        )

    return known


_whole_layer(
    Names("ln_1", "attn", "ln_2", ("c_attn",), "c_proj", "c_fc", "c_proj", "act"),
    _gpt2, "432950109dec",
    gpt2="GPT2Block",
)  # fmt: skip
_SEPARATE = ("q_proj", "k_proj", "v_proj")
_whole_layer(
    Names(
        "input_layernorm", "self_attn", "post_attention_layernorm", _SEPARATE, "o_proj", "up_proj",
        "down_proj", "act_fn", "gate_proj",
    ),
    _llama, "a02ed755fe70",
    llama="LlamaDecoderLayer", mistral="MistralDecoderLayer", qwen2="Qwen2DecoderLayer",
    qwen3="Qwen3DecoderLayer",
)  # fmt: skip
_VIT = Names(
    "layernorm_before", "attention", "layernorm_after", _SEPARATE, "o_proj", "fc1", "fc2",
    "activation_fn", dropout="dropout",
)  # fmt: skip
_whole_layer(_VIT, _encoder("1c877c6dfbc4", _VIT), "2a2f6daee326", vit="ViTLayer", deit="DeiTLayer")
_CLIP = Names(
    "layer_norm1", "self_attn", "layer_norm2", _SEPARATE, "out_proj", "fc1", "fc2",
    "activation_fn", scaling="scale",
)  # fmt: skip
_whole_layer(_CLIP, _encoder("8a23ef00f688", _CLIP), "c3ed0f996d89", clip="CLIPEncoderLayer")
_whole_layer(_CLIP, _encoder("505903ea2557", _CLIP), "c3ed0f996d89", siglip="SiglipEncoderLayer")
