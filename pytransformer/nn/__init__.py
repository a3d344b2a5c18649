# SPDX-License-Identifier: Apache-2.0
"""Modules built on the fused ops: the components of :mod:`pytransformer.models`.

Masks are lengths, key padding and causality, never (Lq, Lk) tensors. No module selects a backend.
"""

from .attention import MultiHeadAttention
from .blocks import Block, Residual, Stack, Stream
from .cache import DecoderCache, KeyValueCache, LayerCache, Step
from .conformer import ConformerBlock, ConvolutionModule, ConvolutionSubsampling
from .ctc import ctc_loss, ctc_read
from .experts import Experts, MixtureOfExperts, MixtureOptions, balance_loss
from .feed_forward import FeedForward
from .fixed_steps import FixedSteps
from .heads import Classifier
from .layer_norm import LayerNorm, RMSNorm
from .linformer import LinformerSelfAttention, SequenceProjection
from .masks import causal, kept, padding, position_ids
from .mixing import FourierMixing, SeparableMixing, TokenMixing
from .packed import drop_packed_weights, pack_weights, packed_bytes
from .paged_cache import OutOfPages, PagedCache, PagedLayer, Pages
from .patches import PatchEmbedding
from .patterns import Pattern
from .positions import (
    Alibi,
    LearnedPositions,
    RelativePositionTable,
    SinusoidalPositions,
    sinusoidal,
)
from .relative import RelativeMultiHeadAttention, by_distance, relative_sinusoids
from .rotary import RotaryMultiHeadAttention
from .scoring import AdditiveScore, DotScore, GeneralScore, attend
from .taps import AttentionTap, taps

__all__ = [
    "AdditiveScore",
    "Alibi",
    "AttentionTap",
    "Block",
    "Classifier",
    "ConformerBlock",
    "ConvolutionModule",
    "ConvolutionSubsampling",
    "DecoderCache",
    "DotScore",
    "Experts",
    "FeedForward",
    "FixedSteps",
    "FourierMixing",
    "GeneralScore",
    "KeyValueCache",
    "LayerCache",
    "LayerNorm",
    "LearnedPositions",
    "LinformerSelfAttention",
    "MixtureOfExperts",
    "MixtureOptions",
    "MultiHeadAttention",
    "OutOfPages",
    "PagedCache",
    "PagedLayer",
    "Pages",
    "PatchEmbedding",
    "Pattern",
    "RMSNorm",
    "RelativeMultiHeadAttention",
    "RelativePositionTable",
    "Residual",
    "RotaryMultiHeadAttention",
    "SeparableMixing",
    "SequenceProjection",
    "SinusoidalPositions",
    "Stack",
    "Step",
    "Stream",
    "TokenMixing",
    "attend",
    "balance_loss",
    "by_distance",
    "causal",
    "ctc_loss",
    "ctc_read",
    "drop_packed_weights",
    "kept",
    "pack_weights",
    "packed_bytes",
    "padding",
    "position_ids",
    "relative_sinusoids",
    "sinusoidal",
    "taps",
]
