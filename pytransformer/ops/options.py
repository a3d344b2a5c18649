# SPDX-License-Identifier: Apache-2.0
"""Types of the ops' choices and keywords, for code that passes them on (models, integrations).

Only for type hints: torch.compile cannot construct a TypedDict by a call; a plain dict is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

import torch

if TYPE_CHECKING:
    from .block_mask import BlockMask

from .masks import AlibiBias, RelativePositionBias

Alignment = Literal["top_left", "bottom_right"]
ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu"]
NormKind = Literal["layer", "rms"]
Reduction = Literal["mean", "sum", "none"]


class _Scores(TypedDict, total=False):
    causal: Alignment | None
    window: tuple[int | None, int | None] | None
    global_keys: int
    sinks: torch.Tensor | None
    softcap: float | None
    scale: float | None


class _Call(TypedDict, total=False):
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    deterministic: bool
    backend: str | None
    strict: bool


class _Stored(TypedDict, total=False):
    page_table: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None


class MaskAndBias(_Scores, total=False):
    """The keywords that determine the softmax weights of :func:`pytransformer.attention`.

    :func:`pytransformer.attention_weights` takes the same keywords.
    """

    attn_mask: torch.Tensor | BlockMask | None
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    prefix_lengths: torch.Tensor | None
    query_segments: torch.Tensor | None
    key_segments: torch.Tensor | None
    bias: torch.Tensor | AlibiBias | RelativePositionBias | None


class AttentionOptions(MaskAndBias, _Stored, _Call, total=False):
    """The keywords of :func:`pytransformer.attention`, except ``return_lse``.

    ``return_lse`` decides the return type.
    """


class PackedOptions(_Scores, _Stored, _Call, total=False):
    """The keywords of :func:`pytransformer.attention_varlen`, except ``return_lse``."""

    key_lengths: torch.Tensor | None
    bias: AlibiBias | RelativePositionBias | None
