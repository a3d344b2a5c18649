# SPDX-License-Identifier: Apache-2.0
"""What the backends ``cuda`` on GEMMs by warpgroups (csrc/cuda/matmul) share: which problems they take, and memory.

The kernels see matrices whose rows begin at multiples of 16 bytes; other tensors are copied. A result's rows hold a multiple of eight
columns.
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
    """Why the raw op cannot multiply the rows of x with weights of these sides, or None."""
    if (reason := cuda_library.why_not(op, x.device)) is not None:
        return reason
    if x.dtype not in DTYPES:
        dtype = str(x.dtype).removeprefix("torch.")
        return f"bfloat16 or float16, got {dtype}; the backends triton and reference have float32, and reference float64"
    if not cuda_library.runs_sm90a(x.device):
        return "a GPU of compute capability 9.0 and kernels built for it (sm_90a), not PYTRANSFORMER_CUDA_PATH=portable"
    if (largest := max(x.numel() // max(1, x.shape[-1]), *sides)) > (most := cuda_library.ask("matmul_largest_side")):
        return f"sides of at most {most:,}, got {largest:,}"
    return None


def use_cublas(rows: int, columns: int, depth: int) -> bool:
    """Whether cuBLAS does a GEMM without an epilogue: a pure function of csrc/cuda/matmul/sm90/plan.h."""
    return cuda_library.ask("matmul_use_cublas", rows, columns, depth, os.environ.get("PYTRANSFORMER_CUDA_PATH") == "sm90")


def bias_parts(rows: int) -> int:
    """How many lines of partial sums of a bias's gradient the rows of a result leave."""
    return -(-rows // cuda_library.ask("matmul_rows_of_a_part"))


def operand(t: torch.Tensor) -> torch.Tensor:
    """The matrix if its rows begin at multiples of 16 bytes and lie apart, else a copy that is so."""
    if t.stride(0) % WIDTH == 0 and t.stride(0) > 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0:
        return t
    return alloc_padded(t, t.shape[1])[:, : t.shape[1]].copy_(t)


def alloc_padded(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Uninitialised rows for a result of so many columns."""
    return like.new_empty(like.shape[0], -(-columns // WIDTH) * WIDTH)


@contextlib.contextmanager
def result(t: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """What a kernel may write for t, (..., columns): its own memory if that will do, else rows that are copied into it at the end."""
    columns = 0 if t is None else t.shape[-1]
    if t is None or (t.is_contiguous() and columns % WIDTH == 0 and t.data_ptr() % 16 == 0):
        yield t if t is None else t.view(-1, columns)
        return
    rows = t.new_empty(t.numel() // columns, -(-columns // WIDTH) * WIDTH)
    yield rows
    t.copy_(rows[:, :columns].view(t.shape))


def padded_bias(b: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous from a multiple of 16 bytes on, of a multiple of eight numbers that the kernels read."""
    if b is None:
        return None
    b = b.float() if b.dtype == torch.float64 else b
    if b.is_contiguous() and b.numel() % WIDTH == 0 and b.data_ptr() % 16 == 0:
        return b
    padded = b.new_zeros(-(-b.numel() // WIDTH) * WIDTH)
    padded[: b.numel()] = b
    return padded
