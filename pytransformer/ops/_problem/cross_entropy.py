# SPDX-License-Identifier: Apache-2.0
"""What the backends and kernels of linear_cross_entropy share: chunks of rows, and the library's product in float32."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def chunks(rows: int, step: int) -> Iterator[slice]:
    """The rows, a chunk at a time."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def float_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = a @ b in float32 by the library, whatever the dtype of a and b: logits rounded to 16 bits would cost every digit of a
    small probability that a large logit has."""
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return torch.mm(a.float(), b.float(), out=out)
    return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
