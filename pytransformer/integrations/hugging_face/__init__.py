# SPDX-License-Identifier: Apache-2.0
"""What ``integrations.transformers.register()`` hands to Hugging Face transformers. Imports it.

transformers asks :func:`attention_mask` once per forward pass for the mask, and hands what it returned, a :class:`.mask.Mask`, to
:func:`attention_forward` in every layer. :mod:`.models` says which architectures ask at all, :mod:`.keywords` what they may hand to
attention besides.
"""

from .attention import attention_forward, collected, weights_wanted
from .lowering import attention_mask, causal_window

__all__ = ["attention_forward", "attention_mask", "causal_window", "collected", "weights_wanted"]
