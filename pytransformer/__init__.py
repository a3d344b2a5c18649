"""pytransformer: fused attention, norm and feed-forward kernels for PyTorch, with every mask, bias and gradient.

Importing it activates nothing, touches no GPU and needs no compiler; see :func:`explain` for what a call would run.
"""

from . import integrations, reference
from ._first_calls import choose_kernels as _choose_kernels
from ._version import __version__
from .drop_in import activate, deactivate
from .explain import explain
from .ops._core.fallbacks import BackendError, clear_fallbacks, fallbacks
from .ops._core.registry import use_backend
from .ops.attention import attention
from .ops.attention_varlen import attention_varlen
from .ops.attention_weights import attention_summary, attention_weights
from .ops.cross_entropy import linear_cross_entropy
from .ops.feed_forward import feed_forward
from .ops.layer_norm import add_norm, layer_norm, rms_norm
from .ops.masks import AlibiBias, RelativePositionBias
from .ops.scaled_dot_product import scaled_dot_product_attention

__all__ = [
    "AlibiBias",
    "BackendError",
    "RelativePositionBias",
    "__version__",
    "activate",
    "add_norm",
    "attention",
    "attention_summary",
    "attention_varlen",
    "attention_weights",
    "clear_fallbacks",
    "deactivate",
    "explain",
    "fallbacks",
    "feed_forward",
    "integrations",
    "layer_norm",
    "linear_cross_entropy",
    "reference",
    "rms_norm",
    "scaled_dot_product_attention",
    "use_backend",
]

_choose_kernels()
