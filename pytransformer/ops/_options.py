"""The keywords of the attention functions as types, so that what passes them on (models, taps, integrations) is checked too.

For hints alone: torch.compile cannot make one by calling it; a plain dict is one.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from .masks import AlibiBias, RelativePositionBias


class _Scores(TypedDict, total=False):
    causal: str | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    scale: float | None


class _Call(TypedDict, total=False):
    dropout_p: float
    dropout_seed: int | torch.Tensor | None
    deterministic: bool
    backend: str | None
    strict: bool


class MaskAndBias(_Scores, total=False):
    """What makes the softmax weights of :func:`pytransformer.attention`; :func:`pytransformer.attention_weights` takes the same."""

    attn_mask: torch.Tensor | None
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    prefix_lengths: torch.Tensor | None
    query_segments: torch.Tensor | None
    key_segments: torch.Tensor | None
    bias: torch.Tensor | AlibiBias | RelativePositionBias | None


class AttentionOptions(MaskAndBias, _Call, total=False):
    """The keywords of :func:`pytransformer.attention` but ``return_lse``, which decides what is returned."""


class PackedOptions(_Scores, _Call, total=False):
    """The keywords of :func:`pytransformer.attention_varlen` but ``return_lse``."""

    bias: AlibiBias | RelativePositionBias | None
