# SPDX-License-Identifier: Apache-2.0
"""T5 models: the kernel reads the table of relative position biases, and blocks fuse their norms.

transformers builds the bias as a (1, H, Lq, Lk) tensor in the first layer and passes it to the next
layers. Converted attention passes the (buckets, H) table instead, if the positions follow from the
lengths (no static cache). :func:`..hugging_face.attention_forward` recognizes the table by its two
dimensions. No quadratic tensor is built, and the kernel computes the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from .hugging_face_rules import _is_half, _rule, runs_on_ours, weights_wanted
from .modules import add_norm, bypass, droppable, first_reason, fusable_norm, probability, unhooked
from .rules import Rule


class BiasTable:
    """The table of a T5Attention as its bias; layers without a table pass on what they receive."""

    def compute_bias(
        self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0
    ) -> torch.Tensor:
        by_lengths = (
            isinstance(past_seen_tokens, int) and past_seen_tokens + query_length == key_length
        )
        table = self.relative_attention_bias
        if by_lengths and runs_on_ours(self.config) and type(table) is torch.nn.Embedding:
            return NotImplemented if unhooked(table) else table.weight
        return NotImplemented


class T5Attention:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        mask: Any = None,
        key_value_states: Any = None,
        position_bias: Any = None,
        **kwargs: Any,
    ) -> Any:
        if (
            position_bias is None
            and not self.has_relative_attention_bias
            and not (self.gradient_checkpointing and self.training)
        ):
            # In place of (1, H, Lq, Lk) zeros.
            position_bias = hidden_states.new_zeros((1, self.n_heads, 1, 1))
        return super().forward(hidden_states, mask, key_value_states, position_bias, **kwargs)  # type: ignore[misc]


class UMT5Attention:
    # Cross-attention adds zeros, and transformers' function of this name must still get them.
    position_bias_is_zero = property(lambda self: not self.has_relative_attention_bias)


_TABLE = "attention with the table of biases inside the kernel"
for _mixin, _digest, _digest_of_bias, _models in (
    (T5Attention, "0c2137f706ba", "e0e532ed19ad", {"t5": "T5Attention", "mt5": "MT5Attention"}),
    (UMT5Attention, "b5ff1ff7e87b", "6eaa8bbca484", {"umt5": "UMT5Attention"}),
):
    _bias = Rule(
        "attention", _TABLE, BiasTable, digests=(_digest_of_bias,), method="compute_bias",
        by_probe=False,
    )  # fmt: skip
    _rule(
        Rule("attention", _TABLE, _mixin, digests=(_digest,), by_probe=False, also=(_bias,)),
        **_models,
    )


for _digest, _name in (
    ("c5410f88e524", "SelfAttention"),
    ("29d3f119425e", "CrossAttention"),
    ("5a18d27c0d1b", "FF"),
):
    bypass(_digest, t5=f"T5Layer{_name}", mt5=f"MT5Layer{_name}")


class T5Block:
    """Each residual sum is fused with the norm of the next sub-layer, except the last sum."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        position_bias: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        encoder_decoder_position_bias: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if _is_half(hidden_states) or weights_wanted(
            kwargs
        ):  # transformers collects weights from the sub-layers that this forward bypasses
            return NotImplemented
        cache = {self.cache_keyword: past_key_values}
        first, last = self.layer[0], self.layer[-1]
        out, position_bias, _ = first.SelfAttention(
            first.layer_norm(hidden_states),
            mask=attention_mask,
            position_bias=position_bias,
            **cache,
            **kwargs,
        )
        stream, before, cross_bias = hidden_states, first, None
        if self.is_decoder and encoder_hidden_states is not None:
            cross = self.layer[1]
            normed, stream = _add_norm(out, stream, before, cross.layer_norm)
            out, cross_bias, _ = cross.EncDecAttention(
                normed,
                mask=encoder_attention_mask,
                key_value_states=encoder_hidden_states,
                position_bias=encoder_decoder_position_bias,
                **cache,
                **kwargs,
            )
            before = cross
        normed, stream = _add_norm(out, stream, before, last.layer_norm)
        return stream + last.dropout(last.DenseReluDense(normed)), position_bias, cross_bias


def _add_norm(
    out: torch.Tensor, stream: torch.Tensor, sublayer: Any, norm: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return add_norm(out, stream, norm, probability(sublayer.dropout, sublayer.training))


_rule(
    Rule(
        "block", "add_norm", T5Block, lambda m: first_reason(
            unhooked(*m.layer), droppable(*[sub.dropout for sub in m.layer]),
            fusable_norm(*[sub.layer_norm for sub in m.layer[1:]])
        ),
        ("0e84a344af41",),
    ),
    t5="T5Block", mt5="MT5Block",
)  # fmt: skip
