# SPDX-License-Identifier: Apache-2.0
"""Keys and values in eight bits, float8_e4m3fn or int8, with a float32 scale for each row: one key of one head.

    scale = max(amax |x| / limit, 2^-126),  x8 = round(x / scale) to the nearest, half to even;   x ~ scale * x8

``limit`` is the largest number of the dtype, 448 or 127, so nothing saturates. A row of zeros has zeros and the least scale. A row with an
Inf or a NaN has zeros and a scale of NaN: int8 has no NaN, and whoever reads the row gets NaN in both dtypes.

Both dtypes are exact in bfloat16 and float16, so attention multiplies scores and weights by the scales and the rows themselves by nothing.
"""

from __future__ import annotations

import torch

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
LEAST_SCALE = 2.0**-126  # the least normal float32: a division by it overflows nowhere, subnormals flushed to zero or not


def quantize_kv(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows in eight bits, scales): of x (..., D) the rows (..., D) in ``dtype``, and float32 (...), which
    :func:`pytransformer.attention` takes as ``key_scale`` or ``value_scale``. x is float32, bfloat16 or float16.

    Raises:
        TypeError: another dtype of x, or one that is not float8_e4m3fn or int8.
    """
    if dtype not in LIMITS:
        raise TypeError(f"quantize_kv: dtype must be torch.float8_e4m3fn or torch.int8, got {dtype}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize_kv: x must be float32, bfloat16 or float16, got {x.dtype}")
    rows = x.detach().to(torch.float32)
    largest = rows.abs().amax(-1)
    finite = largest.isfinite()
    limit = largest.new_full((), LIMITS[dtype])  # by a number CUDA would multiply with its rounded reciprocal
    scale = torch.where(finite, (largest / limit).clamp(min=LEAST_SCALE), torch.nan)
    parts = torch.where(finite[..., None], rows / scale[..., None], 0.0)
    return (parts.round() if dtype == torch.int8 else parts).to(dtype), scale


def dequantize_kv(rows: torch.Tensor, scale: torch.Tensor, work: torch.dtype = torch.float32) -> torch.Tensor:
    """What rows in eight bits stand for: (..., D) and (...) in the dtype ``work``."""
    return rows.to(work) * scale.to(work)[..., None]
