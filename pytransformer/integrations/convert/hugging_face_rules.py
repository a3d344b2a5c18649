# SPDX-License-Identifier: Apache-2.0
"""Rules for Hugging Face modules, by the full name of their class, without importing transformers.

Each rule has the digest of the code it was written for (see :func:`.code.digest`). Many models
share a digest because transformers copies modules between models. If a version changes the code,
its modules are not converted until the rule is updated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...nn import packed
from ...nn.linear import linear
from ...ops._backends.cpu import linear as cpu
from ...ops._core import fast_path
from ...ops.layer_norm import rms_norm
from . import code
from .modules import (
    activation_name,
    add_norm,
    bypass,
    droppable,
    feed_forward,
    first_reason,
    fusable_norm,
    hooked,
    needs,
    probability,
    special_weights,
    unfusable,
    unhooked,
)
from .rules import RULES, Converted, Rule, original_class


def _rule(rule: Rule, **models: str) -> None:
    """Register the rule for classes given as ``model="Class Class"``.

    The classes are in transformers.models.<model>.modeling_<model>.
    """
    for model, classes in models.items():
        for name in classes.split():
            RULES[f"transformers.models.{model}.modeling_{model}.{name}"] = rule


class ScaledNorm:
    """RMS norm, ``x / sqrt(mean(x^2) + eps) * weight``."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != self.weight.dtype:  # torch returns the promoted dtype
            return NotImplemented
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


_rule(
    Rule("norm", "rms_norm", ScaledNorm, special_weights, ("a44bf2f44ac6", "f5ab9e3de87c")),
    llama="LlamaRMSNorm", mistral="MistralRMSNorm", qwen2="Qwen2RMSNorm", qwen3="Qwen3RMSNorm",
    phi3="Phi3RMSNorm",
    mixtral="MixtralRMSNorm", qwen3_moe="Qwen3MoeRMSNorm", dots1="Dots1RMSNorm", t5="T5LayerNorm",
    mt5="MT5LayerNorm", umt5="UMT5LayerNorm",
)  # fmt: skip


class ShiftedScaleNorm:
    """Gemma's RMS norm, scaled by 1 + weight, in float32 for all dtypes."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight.shape, 1.0 + self.weight.float(), self.eps)


_rule(
    Rule("norm", "rms_norm with 1 + weight", ShiftedScaleNorm, special_weights, ("436ec8d4e346",)),
    gemma="GemmaRMSNorm",
    gemma2="Gemma2RMSNorm",
    gemma3="Gemma3RMSNorm",
)


def _network(
    linear1: str, linear2: str, activation: str, *, gate: str | None = None, dropout: bool = False
) -> tuple[type, Callable[[Any], str | None]]:
    """Return mixin and condition of a module that is exactly this network."""
    names = [n for n in (linear1, linear2, gate) if n is not None]

    class FeedForward:
        def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
            first, second = getattr(self, linear1), getattr(self, linear2)
            if first.weight.dtype != second.weight.dtype:  # T5 may keep `wo` in float32
                return NotImplemented
            p = probability(self.dropout, self.training) if dropout else 0.0
            through = None if gate is None else getattr(self, gate)
            return feed_forward(
                hidden_states, first, second, getattr(self, activation), gate=through, dropout=p
            )

    def condition(m: Any) -> str | None:
        reason = needs(getattr(m, activation), *[getattr(m, n) for n in names])
        return droppable(m.dropout) if reason is None and dropout else reason

    return FeedForward, condition


def _network_rule(
    digest: str, *attributes: str, gate: str | None = None, dropout: bool = False, **models: str
) -> None:
    mixin, condition = _network(*attributes, gate=gate, dropout=dropout)
    _rule(Rule("feed_forward", "feed_forward", mixin, condition, (digest,)), **models)


_network_rule(
    "5c180f599572", "up_proj", "down_proj", "act_fn", gate="gate_proj",
    llama="LlamaMLP", mistral="MistralMLP", qwen2="Qwen2MLP", qwen3="Qwen3MLP", gemma="GemmaMLP",
    gemma2="Gemma2MLP",
    gemma3="Gemma3MLP",
)  # fmt: skip
_network_rule(
    "d14f25465c50",
    "fc1",
    "fc2",
    "activation_fn",
    vit="ViTMLP",
    deit="DeiTMLP",
    clip="CLIPMLP",
    siglip="SiglipMLP",
    dinov2="Dinov2MLP",
)
_network_rule(
    "aebbf1bda02d",
    "wi",
    "wo",
    "act",
    dropout=True,
    t5="T5DenseActDense",
    mt5="MT5DenseActDense",
    umt5="UMT5DenseActDense",
)
_network_rule(
    "5af15851e1e6", "wi_1", "wo", "act", gate="wi_0", dropout=True,
    t5="T5DenseGatedActDense", mt5="MT5DenseGatedActDense", umt5="UMT5DenseGatedActDense",
)  # fmt: skip
_rule(
    Rule(
        "feed_forward", "feed_forward", object,
        lambda m: (
            "its Conv1D weights lie transposed to torch.nn.Linear's: "
            "copying them costs more than fusing gains"
        ),
    ),
    gpt2="GPT2MLP",
)  # fmt: skip


class OnePassGelu:
    """GELU in one pass for GPT-2, in place of transformers' seven passes."""

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(input, approximate="tanh")


RULES["transformers.activations.NewGELUActivation"] = Rule(
    "feed_forward", "PyTorch's gelu, in one pass", OnePassGelu, digests=("f7fc71a61c5b",)
)


class ResidualNorm:
    def forward(self: Any, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return add_norm(
            self.dense(hidden_states),
            input_tensor,
            self.LayerNorm,
            probability(self.dropout, self.training),
        )[0]


class FeedForwardChunk:
    def feed_forward_chunk(self: Any, attention_output: torch.Tensor) -> torch.Tensor:
        first, last = self.intermediate, self.output
        hidden = feed_forward(attention_output, first.dense, last.dense, first.intermediate_act_fn)
        return add_norm(
            hidden, attention_output, last.LayerNorm, probability(last.dropout, self.training)
        )[0]


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    from ..hugging_face import weights_wanted

    return weights_wanted(kwargs)


def runs_on_ours(config: Any) -> bool:
    """Return whether a model of this configuration uses our attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ..hugging_face import attention_forward

    return ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation) is attention_forward


# The modules of a layer whose weights post_norm_layer reads.
_LAYER_PATHS = tuple(
    tuple(path.split("."))
    for path in (
        "attention.self.query", "attention.self.key", "attention.self.value",
        "attention.output.dense", "attention.output.LayerNorm", "intermediate.dense",
        "output.dense", "output.LayerNorm",
    )
)  # fmt: skip


class LayerFacts(NamedTuple):
    """Hold what a call of a whole layer reads of its modules, each at 1.2 us."""

    config: Any
    drops: bool
    ours: bool  # its projections may run our product
    settings: tuple[Any, ...]  # of post_norm_layer: paths, scale, head size, activation, both eps

    @classmethod
    def of(cls, layer: Any) -> LayerFacts:
        attend, after, last = layer.attention.self, layer.attention.output, layer.output
        drops = (
            (attend.training and attend.dropout.p > 0)
            or probability(after.dropout, after.training) > 0
            or probability(last.dropout, last.training) > 0
        )
        projections = (attend.query, attend.key, attend.value, after.dense)
        settings = (
            _LAYER_PATHS,
            attend.scaling,
            attend.attention_head_size,
            activation_name(layer.intermediate.intermediate_act_fn),
            after.LayerNorm.eps,
            last.LayerNorm.eps,
        )
        ours = all(isinstance(projection, Converted) for projection in projections)
        return cls(attend.config, drops, ours, settings)


class PostNormLayer:
    """A whole layer of an encoder, without a call of any inner module."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        *,
        facts: LayerFacts,
        **kwargs: Any,
    ) -> Any:
        if (
            past_key_values is not None
            or encoder_hidden_states is not None
            or self.chunk_size_feed_forward
            or not runs_on_ours(facts.config)
            or weights_wanted(kwargs)
        ):
            return NotImplemented
        found = _in_one_call(self, hidden_states, attention_mask, facts, kwargs)
        if found is not None:
            return found
        from ..hugging_face import attention_forward

        attend, after = self.attention.self, self.attention.output
        heads = (*hidden_states.shape[:-1], -1, attend.attention_head_size)
        query, key, value = (
            _project(hidden_states, by).view(heads).transpose(1, 2)
            for by in (attend.query, attend.key, attend.value)
        )
        p = attend.dropout.p if attend.training else 0.0
        out, _ = attention_forward(
            attend, query, key, value, attention_mask, p, attend.scaling, **kwargs
        )
        p = probability(after.dropout, after.training)
        x, _ = add_norm(_project(out.flatten(2), after.dense), hidden_states, after.LayerNorm, p)
        return FeedForwardChunk.feed_forward_chunk(self, x)


def rows_in_cpp(x: torch.Tensor, ours: bool) -> int | None:
    """Return the max rows of our product in a whole layer, or None if Python computes the layer.

    Args:
        ours: the layer's projections may run our product.
    """
    if torch.is_grad_enabled() or not x.is_cpu:
        return None
    limits = cpu.faster().get(x.dtype)
    if limits is None:
        return None
    if packed.weights and x.numel() > limits.unpacked * x.shape[-1]:  # it may use packed weights
        return None
    return limits.inference if ours else 0


def _in_one_call(
    layer: Any, x: torch.Tensor, mask: Any, facts: LayerFacts, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the layer's output without gradient and dropout by one call of C++, if it takes it."""
    from ..hugging_face.mask import Mask

    if facts.drops or torch.compiler.is_compiling():
        return None
    max_rows = rows_in_cpp(x, facts.ours)
    if max_rows is None or any(value is not None for value in kwargs.values()):
        return None
    if isinstance(mask, Mask):
        if mask.causal is not None or mask.lengths is not None or mask.segments is not None:
            return None
        if mask.shape[2:] != (x.shape[1], x.shape[1]):
            return None
        mask = mask.dense if mask.padding is None else mask.padding
    found = fast_path.entries.post_norm_layer(x, mask, layer, facts.settings, max_rows)
    return None if found is NotImplemented else found


def _project(x: torch.Tensor, layer: Any) -> torch.Tensor:
    product = linear if isinstance(layer, Converted) else torch.nn.functional.linear
    return product(x, layer.weight, layer.bias)


# Digests of the forwards of the attention modules that a whole layer bypasses.
_IN_A_LAYER = {
    "Attention": ("00372ce79fb3",),
    "SelfAttention": ("7a8aa0b7fcdf", "089b98687b95"),  # from transformers 5.24
    "SelfOutput": ("7041c0929031",),
}


def _attention_changed(layer: Any) -> str | None:
    """Return why a whole layer's attention must be called as modules, or None."""
    if torch.compiler.is_compiling():  # it would trace the digests, and fuses calls itself
        return "is compiled"
    if "feed_forward_chunk" in layer.__dict__:
        return "has a feed_forward_chunk of its own, set on the instance"
    outer = layer.attention
    if (reason := _other_class(layer, Attention=outer)) is not None:
        return reason
    attend, after = outer.self, outer.output
    if (reason := _other_class(layer, SelfAttention=attend, SelfOutput=after)) is not None:
        return reason
    for inner, digests in zip((outer, attend, after), _IN_A_LAYER.values()):
        if code.digest(original_class(inner), "forward") not in digests:
            return f"has a {type(inner).__name__} whose forward is not one we have checked"
    return first_reason(
        hooked(outer, attend, after),
        unfusable(attend.query, attend.key, attend.value, after.dense),
        droppable(attend.dropout, after.dropout),
        fusable_norm(after.LayerNorm),
    )


def _other_class(layer: Any, **inner: Any) -> str | None:
    """Return which inner module has not the class of this name in the layer's file, or None."""
    name = original_class(layer).__name__.removesuffix("Layer")
    for ending, module in inner.items():
        cls = original_class(module)
        if (cls.__module__, cls.__name__) != (type(layer).__module__, name + ending):
            return f"has a {type(module).__name__} where {name}{ending} was expected"
    return None


def _network_changed(m: Any) -> str | None:
    """Return why the network of a layer must be called as modules, or None."""
    return first_reason(
        _other_class(m, Intermediate=m.intermediate, Output=m.output),
        needs(m.intermediate.intermediate_act_fn, m.intermediate.dense, m.output.dense),
        droppable(m.output.dropout),
        fusable_norm(m.output.LayerNorm),
        unhooked(m.intermediate, m.output),
    )


_bert = dict(
    bert="Bert",
    roberta="Roberta",
    xlm_roberta="XLMRoberta",
    electra="Electra",
    camembert="Camembert",
)
bypass("727c5ce1df61", **{model: f"{name}Intermediate" for model, name in _bert.items()})
_rule(
    Rule(
        "block",
        "add_norm",
        ResidualNorm,
        lambda m: first_reason(droppable(m.dropout), fusable_norm(m.LayerNorm)),
        ("7041c0929031",),
    ),
    **{model: f"{name}SelfOutput {name}Output" for model, name in _bert.items()},
)
_rule(
    Rule(
        "block",
        "feed_forward and add_norm",
        FeedForwardChunk,
        _network_changed,
        ("ef0dc32604fb",),
        "feed_forward_chunk",
        also=(
            Rule(
                "block",
                "a whole layer",
                PostNormLayer,
                lambda m: _attention_changed(m) or _network_changed(m),
                ("03956bababb0",),
                by_probe=False,
                facts=LayerFacts.of,
            ),
        ),
    ),
    **{model: f"{name}Layer" for model, name in _bert.items()},
)


# Rules of full blocks; arguments that only attention reads are passed on unchanged.


def _is_half(x: torch.Tensor) -> bool:
    """Return whether x is float16, which these blocks clamp by value; they run unconverted."""
    return x.dtype == torch.float16


class PostNormEncoderLayer:  # BART
    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        if _is_half(hidden_states):
            return NotImplemented
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        return _post_norm_network(
            self, _post_norm(self, attended, hidden_states, self.self_attn_layer_norm)
        )


class PostNormDecoderLayer:  # BART
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        cache = {self.cache_keyword: past_key_values}
        attended, _ = self.self_attn(
            hidden_states, attention_mask=attention_mask, **cache, **kwargs
        )
        hidden_states = _post_norm(self, attended, hidden_states, self.self_attn_layer_norm)
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                hidden_states,
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                **cache,
                **kwargs,
            )
            hidden_states = _post_norm(self, attended, hidden_states, self.encoder_attn_layer_norm)
        return _post_norm_network(self, hidden_states)


def _post_norm(m: Any, x: torch.Tensor, residual: torch.Tensor, norm: Any) -> torch.Tensor:
    return add_norm(x, residual, norm, probability(m.dropout, m.training))[0]


def _post_norm_network(m: Any, x: torch.Tensor) -> torch.Tensor:
    inner = feed_forward(
        x, m.fc1, m.fc2, m.activation_fn, dropout=probability(m.activation_dropout, m.training)
    )
    return _post_norm(m, inner, x, m.final_layer_norm)


def _bart_condition(m: Any) -> str | None:
    norms = [
        m.self_attn_layer_norm,
        m.final_layer_norm,
        *([m.encoder_attn_layer_norm] if hasattr(m, "encoder_attn") else []),
    ]
    dropouts = droppable(m.dropout, m.activation_dropout)
    return first_reason(needs(m.activation_fn, m.fc1, m.fc2), dropouts, fusable_norm(*norms))


_bart = "feed_forward and add_norm"
_rule(
    Rule("block", _bart, PostNormEncoderLayer, _bart_condition, ("e941385cf6bd",)),
    bart="BartEncoderLayer", marian="MarianEncoderLayer",
)  # fmt: skip
_rule(
    Rule("block", _bart, PostNormDecoderLayer, _bart_condition, ("230546a84026",)),
    bart="BartDecoderLayer", marian="MarianDecoderLayer",
)  # fmt: skip


class PreNormEncoderLayer:  # MBART, Whisper
    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> torch.Tensor:
        if _is_half(hidden_states):
            return NotImplemented
        p = probability(self.dropout, self.training)
        attended, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states),
            attention_mask=attention_mask,
            **kwargs,
        )
        normed, stream = add_norm(attended, hidden_states, self.final_layer_norm, p)
        inner = probability(self.activation_dropout, self.training)
        out = feed_forward(normed, self.fc1, self.fc2, self.activation_fn, dropout=inner)
        return stream + torch.nn.functional.dropout(out, p, p > 0)


_rule(
    Rule("block", _bart, PreNormEncoderLayer, _bart_condition, ("538999f5fadd",)),
    mbart="MBartEncoderLayer", pegasus="PegasusEncoderLayer", whisper="WhisperEncoderLayer",
)  # fmt: skip
