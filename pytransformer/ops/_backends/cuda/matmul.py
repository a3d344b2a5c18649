# SPDX-License-Identifier: Apache-2.0
"""Limits and memory layout of the warpgroup GEMMs in csrc/cuda/matmul, for the ``cuda`` backends.

The kernels read matrices with 16-byte aligned rows; other tensors are copied. Rows of a result have
a multiple of eight columns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from . import library as cuda_library

DTYPES = (torch.bfloat16, torch.float16)
WIDTH = 8  # elements of 16 bytes


def why_not(op: str, x: torch.Tensor, *sides: int) -> str | None:
    """Return why the raw op cannot multiply x's rows by weights with these sides, or None."""
    if (reason := cuda_library.why_not(op, x.device)) is not None:
        return reason
    if x.dtype not in DTYPES:
        dtype = str(x.dtype).removeprefix("torch.")
        return (
            f"bfloat16 or float16, got {dtype}; the backends triton and reference have float32, and"
            " reference float64"
        )
    if not cuda_library.runs_sm90a(x.device):
        return (
            "a GPU of compute capability 9.0 and kernels built for it (sm_90a), not"
            " PYTRANSFORMER_CUDA_PATH=portable"
        )
    if (largest := max(x.numel() // max(1, x.shape[-1]), *sides)) > (
        most := cuda_library.ask("matmul_largest_side")
    ):
        return f"sides of at most {most:,}, got {largest:,}"
    return None


def use_cublas(rows: int, columns: int, depth: int) -> bool:
    """Return true if cuBLAS computes a plain GEMM, by csrc/cuda/matmul/sm90/plan.h."""
    return cuda_library.ask(
        "matmul_use_cublas",
        rows,
        columns,
        depth,
        os.environ.get("PYTRANSFORMER_CUDA_PATH") == "sm90",
    )


def bias_parts(rows: int) -> int:
    """Return the number of rows of a bias gradient's partial sums."""
    return -(-rows // cuda_library.ask("matmul_rows_of_a_part"))


def operand(t: torch.Tensor) -> torch.Tensor:
    """Return the matrix if its rows are 16-byte aligned and disjoint, else an aligned copy."""
    if t.stride(0) % WIDTH == 0 and t.stride(0) > 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0:
        return t
    return alloc_padded(t, t.shape[1])[:, : t.shape[1]].copy_(t)


def alloc_padded(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Return uninitialized padded rows for a result with this number of columns."""
    return like.new_empty(like.shape[0], -(-columns // WIDTH) * WIDTH)


@contextlib.contextmanager
def result(t: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """Yield memory for a kernel's result t, (..., columns).

    The memory is t itself if its layout permits, else padded rows that are copied into t at the
    end.
    """
    columns = 0 if t is None else t.shape[-1]
    if t is None or (t.is_contiguous() and columns % WIDTH == 0 and t.data_ptr() % 16 == 0):
        yield t if t is None else t.view(-1, columns)
        return
    rows = t.new_empty(t.numel() // columns, -(-columns // WIDTH) * WIDTH)
    yield rows
    t.copy_(rows[:, :columns].view(t.shape))


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    a2: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Compute out = a @ b (+ a2 @ b2) + bias; operands have the layout that kernels require."""
    rows, columns = out.shape
    if not use_cublas(rows, columns, a.shape[1]):
        with result(out) as to:
            cuda_library.call("matmul", a.device, a, b, a2, b2, padded_bias(bias), to)
        return
    if bias is not None and bias.dtype == out.dtype:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
    if a2 is not None and b2 is not None:
        out.addmm_(a2, b2)
    if bias is not None and bias.dtype != out.dtype:
        out.copy_(out + bias)


def padded_bias(b: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias contiguous, 16-byte aligned and padded to a multiple of eight elements."""
    if b is None:
        return None
    b = b.float() if b.dtype == torch.float64 else b
    if b.is_contiguous() and b.numel() % WIDTH == 0 and b.data_ptr() % 16 == 0:
        return b
    padded = b.new_zeros(-(-b.numel() // WIDTH) * WIDTH)
    padded[: b.numel()] = b
    return padded
