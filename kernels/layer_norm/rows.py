# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of the norms: the problem, addresses of rows, statistics.

Names: i_ index of a program or loop, b_ tile of values, m_ mask; r are rows [ROWS], j0 is a tile's
first column, both in the full problem; H is the norm's input: x, or residual + dropout(x) as
stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.reference.philox import TAG_ADD_NORM, keep_scale, threshold

from .._lang import from_start, keep_tile
from .configs import Config

TAG = tl.constexpr(TAG_ADD_NORM)


class Rows(NamedTuple):
    """Strides of a tensor's rows, indexed by (outer, inner); columns are contiguous."""

    outer: int
    inner: int


class Dropout(NamedTuple):
    """Dropout of x; row_start is an offset of its rows."""

    seed: torch.Tensor | None
    row_start: int
    p: float


class Problem(NamedTuple):
    """One call. The number of columns is a separate argument, because its divisor decides the width
    of loads.
    """

    rows: int
    inner: int  # rows per outer index
    eps: float
    seed: torch.Tensor | None
    row_start: int | None  # of dropout; None is 0
    threshold: int
    keep_scale: float


@dataclass(frozen=True)
class Kind:
    """Compile-time constants of a kernel."""

    ROWS: int
    BN: int
    WIDE: bool  # rows are wider than BN
    FLAT: bool  # one outer index: addresses need no division
    RMS: bool
    DROPOUT: bool  # some are dropped, and seed is given
    DROPPED: bool  # all are dropped


def describe(
    rows: torch.Tensor, tile: tuple[Config, bool], eps: float, rms: bool, dropout: Dropout
) -> tuple[Problem, Kind]:
    """Return the problem of a tensor (outer, inner, columns), and the compile-time constants for
    this tile.
    """
    outer, inner, _ = rows.shape
    (config, wide), t = tile, threshold(dropout.p)
    return (
        Problem(
            outer * inner,
            inner,
            eps,
            dropout.seed,
            dropout.row_start or None,
            t,
            keep_scale(dropout.p),
        ),
        Kind(config.ROWS, config.BN, wide, outer == 1, rms, 0 < t < 65536, t == 65536),
    )


def strides(t: torch.Tensor | None) -> Rows | None:
    """Return the row strides of a tensor (outer, inner, columns); 0 for dimensions of size 1."""
    return (
        None if t is None else Rows(*(0 if n == 1 else s for n, s in zip(t.shape[:2], t.stride())))
    )


@triton.jit
def rows_of(i_tile, C: tl.constexpr):
    return (tl.zeros([], tl.int64) + i_tile) * C.ROWS + tl.arange(0, C.ROWS)


@triton.jit
def columns_of(j0, C: tl.constexpr):
    return j0 + tl.arange(0, C.BN)


@triton.jit
def inside(m_r, j0, columns, C: tl.constexpr):
    """Return the mask [ROWS, BN] of existing elements."""
    return m_r[:, None] & (columns_of(j0, C) < columns)[None, :]


@triton.jit
def at(P, stride, r, j0, p, C: tl.constexpr):
    """Return pointers [ROWS, BN]."""
    if C.FLAT:
        offset = r * stride.inner
    else:
        offset = r // p.inner * stride.outer + r % p.inner * stride.inner
    return P + offset[:, None] + columns_of(j0, C)[None, :]


@triton.jit
def load_vector(P, j0, columns, C: tl.constexpr):
    """Load weight or bias as float32 [1, BN]."""
    j = columns_of(j0, C)
    return tl.load(P + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def dropped(b_x, r, j0, p, C: tl.constexpr):
    """Apply dropout to float32 b_x. A select, not a product, so a dropped NaN becomes 0."""
    if C.DROPPED:
        return tl.zeros_like(b_x)
    if C.DROPOUT:
        tag = tl.full([], TAG, tl.uint32)
        r = from_start(r, p.row_start)
        low, high = (r & 0xFFFFFFFF)[:, None], (r >> 32)[:, None]
        keep = keep_tile(tl.load(p.seed), low, high, tag, j0, p.threshold, C.ROWS, C.BN)
        return tl.where(keep, b_x * p.keep_scale, 0.0)
    return b_x


@triton.jit
def mean_of(b, columns):
    """Return the mean [ROWS]; masked elements of b are 0."""
    return tl.sum(b, 1) / columns
