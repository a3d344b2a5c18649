# SPDX-License-Identifier: Apache-2.0
"""The position-wise feed-forward network in plain PyTorch.

::

    hidden = act(x w1^T + b1)                                       plain
    hidden = act(x gate_weight^T + gate_bias) * (x w1^T + b1)       gated
    out    = dropout(hidden) w2^T + b2

All arithmetic is float32 (float64 for float64). out and the saved pre-activations are rounded to
x's dtype.

Sources: Vaswani et al., "Attention Is All You Need" (2017), section 3.3; Shazeer, "GLU Variants
Improve Transformer" (2020); Hendrycks, Gimpel, "Gaussian Error Linear Units" (2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.options import ActivationName
from .philox import TAG_FEED_FORWARD, column_keep_mask, keep_scale

ACTIVATIONS: dict[ActivationName, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def feed_forward_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Return (out, pre, gate) of the arguments of the op feed_forward.

    pre and gate are ``x w1^T + b1`` and ``x gate_weight^T + gate_bias`` if ``a.save``, else empty.
    Dropout's counter is the row of the flattened leading dimensions plus row_start and the column
    of hidden plus column_start.
    """
    pre = _linear(a.x, a.w1, a.b1)
    gate = None if a.gate_weight is None else _linear(a.x, a.gate_weight, a.gate_bias)
    activate = ACTIVATIONS[a.activation]
    hidden = activate(pre) if gate is None else activate(gate) * pre
    if a.dropout_p > 0.0:
        rows, columns = math.prod(hidden.shape[:-1]), hidden.shape[-1]
        starts = a.row_start, a.column_start
        keep = column_keep_mask(
            a.dropout_seed, a.dropout_p, rows, columns, TAG_FEED_FORWARD, *starts
        ).view(hidden.shape)
        # select, not multiply: removes a dropped NaN
        hidden = torch.where(keep, hidden * keep_scale(a.dropout_p), 0.0)
    out = _linear(hidden, a.w2, a.b2).to(a.x.dtype)
    nothing = a.x.new_zeros(0)
    kept = [t.detach().to(a.x.dtype) if a.save and t is not None else nothing for t in (pre, gate)]
    return out, *kept


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.linear(x.to(work), weight.to(work), None if bias is None else bias.to(work))
