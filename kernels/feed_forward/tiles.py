# SPDX-License-Identifier: Apache-2.0
"""Shared by the feed-forward kernels: the program's tile, the gemm, activations and derivatives,
dropout.

Names as in kernels/attention: i rows [BM], n columns of hidden [BN], b_ values, p_ pointers, m_
masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pytransformer.reference.philox import TAG_FEED_FORWARD, keep_scale, threshold

from .. import tuned
from .._lang import LOG2E, dot, from_start, keep_tile, precision, steps_of
from ..attention import configs as attention_configs
from .configs import Config, config

TAG = tl.constexpr(TAG_FEED_FORWARD)
# row tiles that programs process column by column, so that L2 holds both operands
GROUP = tl.constexpr(8)


class Shape(NamedTuple):
    """Sizes and strides of a gemm (rows, K) @ (K, N) whose second operand has either layout; a
    stride of 1 is None.
    """

    LAYOUT = True
    K: int
    N: int
    a_row: int
    b_k: int | None
    b_n: int | None
    g_k: int | None  # gate weight
    g_n: int | None


def steps(weight: torch.Tensor | None) -> tuple[int | None, int | None]:
    """Return a weight's strides in Shape's form."""
    return (0, 0) if weight is None else tuple(None if s == 1 else s for s in weight.stride())


class Dropout(NamedTuple):
    seed: torch.Tensor | None
    row_start: int | None  # None is 0
    column_start: int | None  # a multiple of 32
    threshold: int
    keep_scale: float


@dataclass(frozen=True)
class Kind:
    """Compile-time constants of a kernel."""

    BM: int
    BN: int
    BK: int
    ACTIVATION: str
    GATED: bool
    DROPOUT: bool
    DROPS_ALL: bool
    EVEN: bool  # K is a multiple of BK
    FUSED: bool  # the kernel computes the gemm, not the library
    PRECISION: str


def choose(kernel: str, a: Any, rows: int) -> Config:
    gated = " gated" if kernel == "hidden" and a.gate_weight is not None else ""
    table = tuned.table("feed_forward", a.x.device)
    return config(
        kernel + gated, attention_configs.capability(a.x.device), rows, a.x.element_size(), table
    )


def describe(a: Any, tile: Config, K: int, *, fused: bool) -> tuple[Dropout, Kind]:
    t = threshold(a.dropout_p)
    kind = Kind(
        BM=tile.BM,
        BN=tile.BN,
        BK=tile.BK,
        ACTIVATION=a.activation,
        GATED=a.gate_weight is not None,
        DROPOUT=0 < t < 65536,
        DROPS_ALL=t == 65536,
        EVEN=K % tile.BK == 0,
        FUSED=fused,
        PRECISION=precision(a.x.dtype),
    )
    return Dropout(
        a.dropout_seed, a.row_start or None, a.column_start or None, t, keep_scale(a.dropout_p)
    ), kind


def programs(rows: int, columns: int, tile: Config) -> int:
    return -(-rows // tile.BM) * -(-columns // tile.BN)


@triton.jit
def tile_of(rows, N, C: tl.constexpr):
    """Return (row tile, rows [BM] int64, columns [BN]) of this program: GROUP row tiles share each
    column tile in turn.
    """
    down = (rows + C.BM - 1) // C.BM
    across = (N + C.BN - 1) // C.BN
    i_group = tl.program_id(0) // (GROUP * across)
    i_inside = tl.program_id(0) % (GROUP * across)
    height = tl.minimum(down - i_group * GROUP, GROUP)
    i_tile = i_group * GROUP + i_inside % height
    i = i_tile.to(tl.int64) * C.BM + tl.arange(0, C.BM)
    return i_tile, i, i_inside // height * C.BN + tl.arange(0, C.BN)


@triton.jit
def products(A, B, G, rows, shape, i, n, C: tl.constexpr):
    """Return float32 [BM, BN]: A @ B, and A @ G if gated. Rows and columns past the end repeat the
    last and are not stored.
    """
    k = tl.arange(0, C.BK)
    p_a = A + tl.minimum(i, rows - 1)[:, None] * shape.a_row + k[None, :]
    n = tl.minimum(n, shape.N - 1).to(tl.int64)[None, :]
    p_b = B + steps_of(k.to(tl.int64)[:, None], shape.b_k) + steps_of(n, shape.b_n)
    acc = tl.full([C.BM, C.BN], 0.0, tl.float32)
    gate = acc
    if C.GATED and G is not None:
        p_g = G + steps_of(k.to(tl.int64)[:, None], shape.g_k) + steps_of(n, shape.g_n)
    for k0 in range(0, shape.K, C.BK):
        m_k = k < shape.K - k0
        if C.EVEN:
            b_a = tl.load(p_a)
            b_b = tl.load(p_b)
        else:
            b_a = tl.load(p_a, mask=m_k[None, :], other=0.0)
            b_b = tl.load(p_b, mask=m_k[:, None], other=0.0)
        acc = dot(b_a, b_b, acc, C)
        if C.GATED and G is not None:
            if C.EVEN:
                b_g = tl.load(p_g)
            else:
                b_g = tl.load(p_g, mask=m_k[:, None], other=0.0)
            gate = dot(b_a, b_g, gate, C)
            p_g += steps_of(C.BK, shape.g_k)
        p_a += C.BK
        p_b += steps_of(C.BK, shape.b_k)
    return acc, gate


@triton.jit
def plus_bias(b_x, BIAS, n, N):
    if BIAS is not None:
        b_x += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return b_x


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def activate(x, C: tl.constexpr):
    """Return act(x); NaN stays NaN."""
    if C.ACTIVATION == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif C.ACTIVATION == "gelu":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif C.ACTIVATION == "gelu_tanh":
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        y = x * sigmoid(x)
    return y


@triton.jit
def slope(x, C: tl.constexpr):
    """Return act'(x)."""
    if C.ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif C.ACTIVATION == "gelu":
        y = (
            0.5
            + 0.5 * tl.erf(x * 0.7071067811865476)
            + x * 0.3989422804014327 * tl.exp2(x * x * (-0.5 * LOG2E))
        )
    elif C.ACTIVATION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        # clamp: beyond, s (1 - s) is 0 and the square may overflow
        near = tl.minimum(tl.maximum(x, -32.0), 32.0)
        y = s + near * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    else:
        s = sigmoid(x)
        y = s + x * s * (1.0 - s)
    return y


@triton.jit
def drop(b_x, i, n, dropout, C: tl.constexpr):
    """Apply dropout to b_x [BM, BN]: kept values are scaled, dropped values become 0 (NaN too)."""
    if C.DROPOUT:
        row = from_start(i, dropout.row_start)[:, None]
        tag = tl.full([], TAG, tl.uint32)
        seed, low, high = tl.load(dropout.seed), row & 0xFFFFFFFF, row >> 32
        keep = keep_tile(
            seed,
            low,
            high,
            tag,
            from_start(tl.min(n, 0), dropout.column_start),
            dropout.threshold,
            C.BM,
            C.BN,
        )
        b_x = tl.where(keep, b_x * dropout.keep_scale, 0.0)
    if C.DROPS_ALL:
        b_x = tl.zeros_like(b_x)
    return b_x
