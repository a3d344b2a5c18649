# SPDX-License-Identifier: Apache-2.0
"""Shared by forward and backward: the problem, and logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.ops._problem.cross_entropy import float_gemm

from .._lang import tanh
from .configs import Config


class Problem(NamedTuple):
    """One call. The number of classes is a separate argument, because its divisor decides the width
    of loads.
    """

    rows: int  # rows of the chunk
    all_rows: int  # rows of the call; split lse (2, all_rows) has log_sum this far behind row_max
    ignore_index: int
    on_target: float  # 1 - label_smoothing: the target's weight beyond the share of every class
    on_each: float  # label_smoothing


@dataclass(frozen=True)
class Kind:
    """Compile-time constants of a kernel."""

    ROWS: int
    BN: int
    SMOOTH: bool
    SOFTCAP: float  # 0: none
    SCALE: float = 1.0  # factor of the stored p - q


def describe(a: Any, config: Config, scale: float = 1.0) -> tuple[Problem, Kind]:
    """Return the problem of the op's arguments, and the compile-time constants for this tile."""
    s = a.label_smoothing
    return (
        Problem(0, len(a.x), a.ignore_index, 1.0 - s, s),
        Kind(config.ROWS, config.BN, s > 0.0, a.softcap, scale),
    )


def logits_of(a: Any, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return x @ weightᵀ of a chunk's rows in the buffer; its readers add the bias."""
    return float_gemm(x, a.weight.t(), buffer[: len(x)])


@triton.jit
def rows_of(i_tile, C: tl.constexpr):
    return (tl.zeros([], tl.int64) + i_tile) * C.ROWS + tl.arange(0, C.ROWS)


@triton.jit
def load_logits(LOGITS, BIAS, i, j, classes, p, C: tl.constexpr):
    """Load logits [ROWS, BN], after the softcap; -inf past the last row and class."""
    m = (i < p.rows)[:, None] & (j < classes)[None, :]
    b_z = tl.load(LOGITS + i[:, None] * classes + j[None, :], mask=m, other=float("-inf"))
    if BIAS is not None:
        b_z += tl.load(BIAS + j, mask=j < classes, other=0.0).to(tl.float32)[None, :]
    if C.SOFTCAP > 0:
        b_z = tl.where(m, C.SOFTCAP * tanh(b_z / C.SOFTCAP), float("-inf"))
    return b_z
