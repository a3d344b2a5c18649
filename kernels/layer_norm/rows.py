# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the norms share: the problem as they get it, where a row lies, its statistics.

Names: i_ index of a program or loop, b_ tile of values, m_ mask; r are rows [ROWS], j0 a tile's first column, both in the
whole problem; H is what is normalized: x, or residual + dropout(x) as stored.
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
    """Strides of a tensor's rows, which are counted over (outer, inner); columns are contiguous."""

    outer: int
    inner: int


class Dropout(NamedTuple):
    """Of x; its rows count from row_start."""

    seed: torch.Tensor | None
    row_start: int
    p: float


class Problem(NamedTuple):
    """One call. The number of columns is apart: how it divides decides how wide loads are."""

    rows: int
    inner: int  # rows to one outer index
    eps: float
    seed: torch.Tensor | None
    row_start: int | None  # of dropout; None is 0
    threshold: int
    keep_scale: float


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for."""

    ROWS: int
    BN: int
    WIDE: bool  # rows are wider than BN
    FLAT: bool  # one outer index: no division to find a row
    RMS: bool
    DROPOUT: bool  # some are dropped; seed is there
    DROPPED: bool  # all are


def describe(rows: torch.Tensor, tile: tuple[Config, bool], eps: float, rms: bool, dropout: Dropout) -> tuple[Problem, Kind]:
    """The problem of a tensor (outer, inner, columns), and what to compile for it with this tile."""
    outer, inner, _ = rows.shape
    (config, wide), t = tile, threshold(dropout.p)
    return (
        Problem(outer * inner, inner, eps, dropout.seed, dropout.row_start or None, t, keep_scale(dropout.p)),
        Kind(config.ROWS, config.BN, wide, outer == 1, rms, 0 < t < 65536, t == 65536),
    )


def strides(t: torch.Tensor | None) -> Rows | None:
    """Of a tensor (outer, inner, columns); 0 where there is one, whatever the tensor says."""
    return None if t is None else Rows(*(0 if n == 1 else s for n, s in zip(t.shape[:2], t.stride())))


@triton.jit
def rows_of(i_tile, C: tl.constexpr):
    return (tl.zeros([], tl.int64) + i_tile) * C.ROWS + tl.arange(0, C.ROWS)


@triton.jit
def columns_of(j0, C: tl.constexpr):
    return j0 + tl.arange(0, C.BN)


@triton.jit
def inside(m_r, j0, columns, C: tl.constexpr):
    """[ROWS, BN]: elements that there are."""
    return m_r[:, None] & (columns_of(j0, C) < columns)[None, :]


@triton.jit
def at(P, stride, r, j0, p, C: tl.constexpr):
    """[ROWS, BN] pointers."""
    if C.FLAT:
        offset = r * stride.inner
    else:
        offset = r // p.inner * stride.outer + r % p.inner * stride.inner
    return P + offset[:, None] + columns_of(j0, C)[None, :]


@triton.jit
def load_vector(P, j0, columns, C: tl.constexpr):
    """[1, BN] float32 of weight or bias."""
    j = columns_of(j0, C)
    return tl.load(P + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def dropped(b_x, r, j0, p, C: tl.constexpr):
    """Dropout of float32 b_x. Selected, not multiplied: what is dropped is gone even if it was NaN."""
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
    """[ROWS]: masked elements of b are 0."""
    return tl.sum(b, 1) / columns
