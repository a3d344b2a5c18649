# SPDX-License-Identifier: Apache-2.0
"""pytransformer: fused attention, norm and feed-forward kernels for PyTorch, with every mask, bias and gradient.

Importing it activates nothing, touches no GPU and needs no compiler; see :func:`explain` for what a call would run.
"""

from . import integrations, reference
from ._first_calls import choose_kernels as _choose_kernels
from ._version import __version__
from .drop_in import activate, deactivate
from .explain import explain
from .ops import public as _public
from .ops._core.fallbacks import BackendError, clear_fallbacks, fallbacks
from .ops._core.registry import use_backend
from .ops.attention_weights import attention_summary, attention_weights
from .ops.block_mask import BlockMask
from .ops.masks import AlibiBias, RelativePositionBias
from .ops.public import *  # noqa: F403  # the ops
from .ops.scaled_dot_product import scaled_dot_product_attention
from .verify import verify

__all__ = [
    "AlibiBias",
    "BackendError",
    "BlockMask",
    "RelativePositionBias",
    "__version__",
    "activate",
    "attention_summary",
    "attention_weights",
    "clear_fallbacks",
    "deactivate",
    "explain",
    "fallbacks",
    "integrations",
    "reference",
    "scaled_dot_product_attention",
    "use_backend",
    "verify",
]
__all__ += _public.__all__

reference.publish()
_choose_kernels()
