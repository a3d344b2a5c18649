# SPDX-License-Identifier: Apache-2.0
"""The public functions of `pytransformer`; `pytransformer.reference` has the same names."""

from .append_kv import append_kv
from .attention import attention
from .attention_varlen import attention_varlen
from .cross_entropy import linear_cross_entropy
from .feed_forward import feed_forward
from .layer_norm import add_norm, layer_norm, rms_norm
from .rotary import rotary

__all__ = [
    "add_norm",
    "append_kv",
    "attention",
    "attention_varlen",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
]
