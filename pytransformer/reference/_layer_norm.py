# SPDX-License-Identifier: Apache-2.0
"""Layer norm, RMS norm and the fused residual + dropout + norm in plain PyTorch.

For a row h, with the normalized dimensions flattened::

    layer:  y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias
    rms:    y =  h            / sqrt(mean(h^2)             + eps) * weight + bias

Statistics and arithmetic are float32 (float64 for float64). The result is rounded once, to x's
dtype. A second pass computes the variance about the mean, because E[h^2] - E[h]^2 loses every digit
of a row with a large mean.

Sources: Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer
Normalization" (2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .philox import TAG_ADD_NORM, column_keep_mask, keep_scale


def layer_norm_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Return (out, mean, rstd) of the arguments of the op layer_norm."""
    return _normalize(a.x, a, a.bias, rms=False)


def rms_norm_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Return (out, rstd) of the arguments of the op rms_norm."""
    out, _, rstd = _normalize(a.x, a, None, rms=True)
    return out, rstd


def add_norm_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Return (normed, residual_out, mean, rstd) of add_norm; mean is empty for an RMS norm."""
    residual_out = _add_dropped(a)
    normed, mean, rstd = _normalize(residual_out, a, a.bias, rms=a.rms)
    return normed, residual_out, mean, rstd


def _add_dropped(a: Any) -> torch.Tensor:
    """Return ``residual + dropout(x)`` in residual's dtype, or in x's dtype without a residual.

    Dropout's counter is the flattened leading index plus row_start and the flattened normalized
    index.
    """
    work = _work_dtype(a.x, a.residual)
    branch = a.x.to(work)
    if a.dropout_p > 0.0:
        split = a.x.dim() - a.dims
        rows, columns = math.prod(a.x.shape[:split]), math.prod(a.x.shape[split:])
        keep = column_keep_mask(
            a.dropout_seed, a.dropout_p, rows, columns, TAG_ADD_NORM, a.row_start
        ).view(a.x.shape)
        # select, not multiply: removes a dropped NaN
        branch = torch.where(keep, branch * keep_scale(a.dropout_p), 0.0)
    if a.residual is None:
        return branch.to(a.x.dtype, copy=True)
    return (a.residual.to(work) + branch).to(a.residual.dtype)


def _normalize(
    h: torch.Tensor, a: Any, bias: torch.Tensor | None, *, rms: bool
) -> tuple[torch.Tensor, ...]:
    """Return (normed in x's dtype, mean, rstd) of h over its last a.dims dimensions.

    The statistics have the leading shape.
    """
    h = h.to(_work_dtype(h))
    over = tuple(range(-a.dims, 0))
    mean = h.new_zeros(0) if rms else h.mean(over, keepdim=True)
    centred = h if rms else h - mean
    if not rms:
        # removes the rounding error of a large mean
        centred = centred - centred.mean(over, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(over, keepdim=True) + a.eps)
    y = centred * rstd
    if a.weight is not None:
        y = y * a.weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    rows = h.shape[: h.dim() - a.dims]
    return y.to(a.x.dtype), mean if rms else mean.reshape(rows), rstd.reshape(rows)


def _work_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    return (
        torch.float64
        if any(t is not None and t.dtype == torch.float64 for t in tensors)
        else torch.float32
    )
