# SPDX-License-Identifier: Apache-2.0
"""Keys and values in eight bits, float8_e4m3fn or int8, with a float32 scale per row and head.

    scale = max(amax |x| / limit, 2^-126)
    x8    = round(x / scale), half to even;   x ~ scale * x8

``limit`` is the largest number of the dtype, 448 or 127, so nothing saturates. A row of zeros has
zeros and the minimum scale. A row with an Inf or a NaN has zeros and the scale NaN: int8 has no
NaN, and reading the row gives NaN in both dtypes.

Both dtypes are exact in bfloat16 and float16, so attention multiplies the scores and weights by the
scales and leaves the rows unscaled.
"""

from __future__ import annotations

import torch

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# the minimum normal float32: dividing by it never overflows, with subnormals flushed to zero or not
LEAST_SCALE = 2.0**-126


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows (..., D) in ``dtype``, float32 scales (...)) of x (..., D).

    :func:`pytransformer.attention` takes the scales as ``key_scale`` or ``value_scale``. x is
    float32, bfloat16 or float16.

    Raises:
        TypeError: x has another dtype, or ``dtype`` is not float8_e4m3fn or int8.
    """
    if dtype not in LIMITS:
        raise TypeError(
            f"quantize_kv: dtype must be torch.float8_e4m3fn or torch.int8, got {dtype}"
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize_kv: x must be float32, bfloat16 or float16, got {x.dtype}")
    rows = x.detach().to(torch.float32)
    largest = rows.abs().amax(-1)
    finite = largest.isfinite()
    # a tensor, because CUDA multiplies by the rounded reciprocal of a Python number
    limit = largest.new_full((), LIMITS[dtype])
    scale = torch.where(finite, (largest / limit).clamp(min=LEAST_SCALE), torch.nan)
    parts = torch.where(finite[..., None], rows / scale[..., None], 0.0)
    return (parts.round() if dtype == torch.int8 else parts).to(dtype), scale


def dequantize_kv(
    rows: torch.Tensor, scale: torch.Tensor, work: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return scale * rows, (..., D) times (...), in the dtype ``work``."""
    return rows.to(work) * scale.to(work)[..., None]
