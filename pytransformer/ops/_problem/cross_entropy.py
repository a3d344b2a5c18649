# SPDX-License-Identifier: Apache-2.0
"""Row chunks and the float32 gemm that backends of linear_cross_entropy share."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def chunks(rows: int, step: int) -> Iterator[slice]:
    """Return slices of ``step`` rows that cover all rows."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def float_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute out = a @ b in float32 with the library, for any dtype of a and b.

    16-bit logits would lose every digit of a small probability beside a large logit.
    """
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return torch.mm(a.float(), b.float(), out=out)
    return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
