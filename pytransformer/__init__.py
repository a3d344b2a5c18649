"""pytransformer: fused attention, norm and feed-forward kernels for PyTorch, with every mask, bias and gradient.

Importing it activates nothing, touches no GPU and needs no compiler; see :func:`explain` for what a call would run.
"""

from . import reference
from .ops._registry import BackendError, clear_fallbacks, explain, fallbacks, use_backend
from .ops.attention import attention, scaled_dot_product_attention
from .ops.masks import AlibiBias, RelativePositionBias

__version__ = "0.1.0"

__all__ = [
    "AlibiBias",
    "BackendError",
    "RelativePositionBias",
    "attention",
    "clear_fallbacks",
    "explain",
    "fallbacks",
    "reference",
    "scaled_dot_product_attention",
    "use_backend",
]
