# SPDX-License-Identifier: Apache-2.0
"""The functions that ``integrations.transformers.register()`` registers; imports transformers.

transformers calls :func:`attention_mask` once per forward pass and passes the result, a
:class:`.mask.Mask`, to :func:`attention_forward` in every layer. :mod:`.models` lists the
architectures that use the interface, :mod:`.keywords` the extra arguments of attention.
"""

from .attention import attention_forward, collected, weights_wanted
from .lowering import attention_mask, causal_window

__all__ = ["attention_forward", "attention_mask", "causal_window", "collected", "weights_wanted"]
