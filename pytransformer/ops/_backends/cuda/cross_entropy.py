# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of linear_cross_entropy, on csrc/cuda/cross_entropy and csrc/cuda/matmul.

Forward stores no logit: the GEMM's epilogue writes two or three numbers per row and 128 classes.
Backward processes a chunk of rows at a time. A GEMM's epilogue writes their d_logits, and two plain
GEMMs compute dx and add to dweight::

    d_logits = (p_factor p - g q) (1 - tanh²)  in x's dtype; p_factor is g and tanh 0 if no option
    dx = d_logits weight;  dweight += d_logitsᵀ x
    dbias = sum over rows of d_logits, unrounded

In float16 a power of two first scales the maximum of g and p_factor to 2^15, because small
probabilities would underflow. The float32 results are divided by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import as_written, matrix
from ..._problem.cross_entropy import chunks, float_gemm, target_weights
from ..gpu import cross_entropy as gpu
from . import library as cuda_library
from . import matmul as cuda_matmul
from .matmul import WIDTH, alloc_padded, bias_parts, operand, padded_bias, use_cublas

HALF_SCALE = 2.0**15  # float16 ends at 2^16

# Maximum bytes per chunk of rows. Forward: the partials of 2^17 classes take 8 KB per row, so a
# chunk has 32,768 rows. Backward: a chunk has 4,096 rows of d_logits for as many classes. Each
# chunk adds to dweight, which costs 16 bytes per element against 6 operations per row.
PARTIALS_BYTES, D_LOGITS_BYTES = 1 << 28, 1 << 30
PARTIALS_BYTES_EMULATED, D_LOGITS_BYTES_EMULATED = 1 << 11, 1 << 16


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """Return the backend of linear_cross_entropy."""
    kernels = gpu.Kernels(_forward, _backward)
    ours = gpu.backend(
        "cuda", op, lambda: kernels, check_values, why_not, _extra_bytes, cuda_library.recorded
    )

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        return op.backends["reference"].forward(a) if a.x.numel() == 0 else ours.forward(a)

    def backward(a: Any, *given: Any) -> Any:
        return (
            op.backends["reference"].backward(a, *given)
            if a.x.numel() == 0
            else ours.backward(a, *given)
        )

    return dataclasses.replace(ours, forward=forward, backward=backward)


def why_not(a: Any) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    if a.accuracy:
        return "the kernels keep no argmax for return_accuracy"
    if a.class_weight is not None and a.label_smoothing:
        return "the kernels support class_weight without label_smoothing"
    return cuda_matmul.why_not("cross_entropy_fwd", a.x, *a.weight.shape)


def _forward(
    a: Any, losses: torch.Tensor, split_lse: torch.Tensor, correct: torch.Tensor | None = None
) -> None:
    (x, weight, bias), rows = _operands(a), len(a.x)
    step = min(rows, _rows(PARTIALS_BYTES, PARTIALS_BYTES_EMULATED, 4 * _partials(a)))
    partials, picked = (
        torch.empty(step * _partials(a), device=a.x.device),
        torch.empty(step, device=a.x.device),
    )
    for part in chunks(rows, step):
        n = len(losses[part])
        cuda_library.call(
            "cross_entropy_fwd", x.device, x[part], weight.t(), bias, a.target[part],
            partials[: n * _partials(a)], picked[:n],
            losses[part], *split_lse[:, part], a.ignore_index, a.label_smoothing, a.softcap,
        )  # fmt: skip
    if a.class_weight is not None:
        losses *= target_weights(a, torch.float32)


def _backward(
    a: Any,
    g: torch.Tensor,
    p_factor: torch.Tensor | None,
    split_lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    with as_written(a.x.device):
        x, weight, bias = _operands(a)
        (rows, d), classes, device = a.x.shape, a.weight.shape[0], a.x.device
        step = min(rows, _chunk_rows(classes))
        if a.class_weight is not None:
            g = g * target_weights(a, torch.float32)  # the factor of q, without label smoothing
        if p_factor is None and a.softcap:
            p_factor = g
        scale = _scale(g, p_factor) if x.dtype == torch.float16 else None
        if scale is not None:
            g, p_factor = g * scale, None if p_factor is None else p_factor * scale
        unscale = 1.0 if scale is None else 1 / scale
        d_logits = None if dx is None and d_weight is None else alloc_padded(x[:step], classes)
        bias_partials = (
            None if d_bias is None else torch.empty(bias_parts(step), classes, device=device)
        )
        width = -(-d // WIDTH) * WIDTH
        dx_part = None if dx is None else torch.empty(step, width, device=device)
        total = d_weight if d_weight is None or d == width else d_weight.new_empty(classes, width)
        valid = (a.target != a.ignore_index)[:, None]
        for part in chunks(rows, step):
            n = len(g[part])
            to = None if d_logits is None else d_logits[:n]
            sums = None if bias_partials is None else bias_partials[: bias_parts(n)]
            cuda_library.call(
                "cross_entropy_bwd", device, x[part], weight.t(), bias, a.target[part],
                *split_lse[:, part], g[part], None if p_factor is None else p_factor[part], to,
                sums,
                a.ignore_index, a.label_smoothing, a.softcap,
            )  # fmt: skip
            if d_bias is not None:
                assert sums is not None
                d_bias += sums.sum(0)
            if dx is not None:
                assert to is not None and dx_part is not None
                _gemm(to[:, :classes], weight, dx_part[:n])
                product = dx_part[:n, :d]
                dx[part] = torch.where(
                    valid[part], product if scale is None else product * unscale, 0.0
                )
            if d_weight is not None:
                assert to is not None and total is not None
                # an ignored row may hold NaN
                clean = operand(torch.where(valid[part], x[part], 0.0))
                _gemm(to[:, :classes].t(), clean, total, add=part.start > 0)
        if d_weight is not None and (scale is not None or total is not d_weight):
            assert total is not None
            torch.mul(total[:, :d], unscale, out=d_weight)
        if d_bias is not None and scale is not None:
            d_bias *= unscale


def _gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> None:
    """Compute out (+)= a @ b in float32; rows of out hold a multiple of eight elements.

    Our kernel computes sums: on an H100, a separate addition after cuBLAS took 1.05 ms for a
    product of 2.95 ms, and a buffer of out's size.
    """
    columns = b.shape[1]
    if add or not use_cublas(len(out), columns, a.shape[1]):
        cuda_library.call("matmul_sums", a.device, a, b, out, add)
    else:
        float_gemm(a, b, out[:, :columns])


def _scale(g: torch.Tensor, p_factor: torch.Tensor | None) -> torch.Tensor:
    """Return a power of two that scales the max of |g| and |p_factor| to between 2^14 and 2^15.

    No digit changes except in elements that become subnormal.
    """
    largest = g.abs().max()
    if p_factor is not None:
        largest = torch.maximum(largest, p_factor.abs().max())
    exponent = torch.frexp(largest).exponent.clamp(min=-100)
    return torch.ldexp(torch.full_like(g[0], HALF_SCALE), -exponent)


def _operands(a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return operand(matrix(a.x)), operand(matrix(a.weight)), padded_bias(a.bias)


def _partials(a: Any) -> int:
    """Return the number of partials per row that forward writes."""
    return cuda_library.ask("cross_entropy_partials", a.weight.shape[0], a.label_smoothing > 0)


def _rows(max_bytes: int, emulated: int, bytes_of_a_row: int) -> int:
    """Return the rows per chunk, a multiple of 128, the height of a GEMM tile."""
    return (
        max((emulated if cuda_library.emulating() else max_bytes) // bytes_of_a_row // 128, 1) * 128
    )


def _chunk_rows(classes: int) -> int:
    return _rows(D_LOGITS_BYTES, D_LOGITS_BYTES_EMULATED, 2 * classes)


def _extra_bytes(a: Any) -> int:
    """Return the maximum of the bytes of forward and backward.

    Forward needs a chunk's partials. Backward needs a chunk's d_logits, their sums over 64 rows, dx
    in float32 and x, and dweight in float32, twice if its rows are padded.
    """
    rows, (classes, d) = a.target.numel(), a.weight.shape
    forward = (
        4
        * _partials(a)
        * min(rows, _rows(PARTIALS_BYTES, PARTIALS_BYTES_EMULATED, 4 * _partials(a)))
    )
    chunk = min(rows, _chunk_rows(classes))
    backward = chunk * (2 * classes + classes // 16 + 6 * d) + 4 * classes * d * (
        1 if d % WIDTH == 0 else 2
    )
    return max(forward, backward) + 16 * rows  # losses, split lse and g of all rows
