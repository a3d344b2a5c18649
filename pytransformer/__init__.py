# SPDX-License-Identifier: Apache-2.0
"""pytransformer: fused attention, norm and feed-forward kernels for PyTorch, with every mask, bias
and gradient.

Importing it activates nothing, touches no GPU and needs no compiler; see :func:`explain` for what a
call would run.
"""

from typing import TYPE_CHECKING, Any

from . import _checkout  # noqa: F401  # raises if this folder hides an installed package

# isort: split
from . import integrations, reference
from ._first_calls import choose_kernels as _choose_kernels
from ._version import __version__
from .drop_in import activate, deactivate
from .explain import explain
from .ops import public as _public
from .ops._core.dispatch import BackendError, clear_fallbacks, fallbacks
from .ops._core.op import sharded_loaders as _sharded_loaders
from .ops._core.registry import use_backend
from .ops.append_kv import KeyValues
from .ops.attention_weights import attention_summary, attention_weights
from .ops.block_mask import BlockMask
from .ops.masks import AlibiBias, RelativePositionBias
from .ops.public import *  # noqa: F403  # the ops
from .ops.rotary_positions import RotaryPositions, RotaryScaling
from .ops.scaled_dot_product import scaled_dot_product_attention
from .reference.eight_bit import dequantize_kv, quantize_kv
from .verify import verify

if TYPE_CHECKING:
    from . import compat as compat
    from . import models as models
    from . import nn as nn
    from . import training as training
    from . import viz as viz

__all__ = [
    "AlibiBias",
    "BackendError",
    "BlockMask",
    "KeyValues",
    "RelativePositionBias",
    "RotaryPositions",
    "RotaryScaling",
    "__version__",
    "activate",
    "attention_summary",
    "attention_weights",
    "clear_fallbacks",
    "deactivate",
    "dequantize_kv",
    "explain",
    "fallbacks",
    "integrations",
    "quantize_kv",
    "reference",
    "scaled_dot_product_attention",
    "use_backend",
    "verify",
]
__all__ += _public.__all__

_ON_FIRST_USE = (
    "compat",
    "models",
    "nn",
    "training",
    "viz",
)  # not in __all__: a star import would load them


def __getattr__(name: str) -> Any:
    """The subpackages that a caller of the ops never needs, imported by the first ``pt.models`` and
    the like.

    Of ``nn``, `integrations` has already taken what it needs; the others are 45 modules.
    """
    if name in _ON_FIRST_USE:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")  # which makes it an attribute: asked for once
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})


def _sharding() -> Any:
    from .distributed.sharding import run

    return run


_sharded_loaders.append(_sharding)
_choose_kernels()
