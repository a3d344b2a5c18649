# SPDX-License-Identifier: Apache-2.0
"""``x Wᵀ + b`` on the CPU: the kernels of csrc/cpu/feed_forward, and where they beat PyTorch's.

It is no op: :mod:`pytransformer.nn.linear` and ``convert`` call it where PyTorch would run
``aten::linear``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from ..._core import native
from .feed_forward import matrix, vector

FEW_ROWS = 8  # kFewRows of csrc/cpu/core/few_rows.h: faster on every CPU measured
ALL_ROWS = 1 << 40


class MaxRows(NamedTuple):
    """The max number of rows of x for which our product beats PyTorch's."""

    inference: int
    training: int  # forward and backward together; 0: never
    packed: int = 0  # inference with packed weights
    # Inference with at most this many rows ignores packed weights. Zen 3, MiniLM: with 12 to 64
    # rows the check that a copy is current costs 8 to 12 % more of a query than packing does. Zen
    # 4: up to 48 rows neither is faster.
    unpacked: int = FEW_ROWS


EVERYWHERE = MaxRows(ALL_ROWS, ALL_ROWS, ALL_ROWS)
# By vendor, level of PyTorch's kernels, and our instruction set: bench/tools/linear_choice.py
# measures the rows and checks them.
#   AVX-512 of AMD, float32: MKL selects AVX2 on AMD and reaches half of our rate.
#   The same, bfloat16: twice as fast as PyTorch's with 12 rows; forward and backward are equal.
#   AVX2, bfloat16 and float16: PyTorch has no product for them and runs loops at a seventh.
#   AVX2, float32: equal within 10 % beyond the rows listed.
FASTER: dict[tuple[str, str, str], dict[torch.dtype, MaxRows]] = {
    ("AuthenticAMD", "AVX512", "avx512_bf16"): {
        torch.float32: EVERYWHERE._replace(unpacked=48),
        torch.bfloat16: EVERYWHERE._replace(training=0, unpacked=48),
    },
    ("AuthenticAMD", "AVX512", "avx512"): {torch.float32: EVERYWHERE._replace(unpacked=48)},
    ("AuthenticAMD", "AVX2", "avx2"): {
        torch.float32: MaxRows(128, 0, 256, unpacked=64),
        torch.bfloat16: EVERYWHERE._replace(unpacked=64),
        torch.float16: EVERYWHERE._replace(unpacked=64),
    },
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@functools.cache
def faster() -> dict[torch.dtype, MaxRows]:
    """Return, by dtype, up to how many rows our product beats PyTorch's on this CPU."""
    if native.why_not("feed_forward_linear_digest") is not None:
        return {}
    raw = torch.ops.pytransformer_C
    with native.untraced():
        here = (raw.cpu_vendor(), torch.backends.cpu.get_cpu_capability(), raw.cpu_isa())
    return dict.fromkeys(DTYPES, MaxRows(FEW_ROWS, 0)) | FASTER.get(here, {})


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    panels: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x weightᵀ + bias``, without gradient.

    x is (..., k) and weight (n, k), of one dtype; weight or its transpose is contiguous. ``panels``
    is :func:`pack` of the weight. Without the library PyTorch computes the result.
    """
    if native.why_not("feed_forward_linear_digest") is not None:
        return torch.nn.functional.linear(x, weight, bias)
    rows = matrix(x)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    torch.ops.pytransformer_C.feed_forward_linear.default(
        rows, weight, vector(bias, x), panels, out
    )
    return out.view(*x.shape[:-1], weight.shape[0])


def backward(
    d_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    needs_grad: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x, weight (in its layout) and bias that are needed."""
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    dx = x.new_empty(rows, x.shape[-1]) if needs_grad[0] else None
    dw = torch.empty_like(weight) if needs_grad[1] else None
    db = x.new_empty(columns, dtype=work) if needs_grad[2] else None
    torch.ops.pytransformer_C.feed_forward_linear_bwd.default(
        matrix(d_out), matrix(x), weight, dx, dw, db
    )
    return (
        None if dx is None else dx.view(x.shape),
        dw,
        None if db is None else db.to(x.dtype),
    )


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight in the kernels' layout for the active instruction set, as bytes."""
    raw = torch.ops.pytransformer_C
    panels = torch.empty(raw.feed_forward_linear_panels.default(weight), dtype=torch.uint8)
    raw.feed_forward_linear_pack.default(weight, panels)
    return panels
