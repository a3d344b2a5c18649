# SPDX-License-Identifier: Apache-2.0
"""Online softmax of a tile's rows, with sinks, and dropout of its weights.

    m' = max(m, max_j s);  l' = l e^(m - m') + sum_j e^(s - m')

Scores are in natural units, or in base 2 with C.BASE2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._lang import FLOAT_MAX, LOG2E, from_start, keep_tile
from .tiles import column


@triton.jit
def power(x, C: tl.constexpr):
    """Return e^x of score differences."""
    if C.BASE2:
        return tl.exp2(x)
    return tl.exp2(x * LOG2E)


@triton.jit
def finite(b_m):
    """Return a row's maximum, or 0 without visible keys, where -inf - -inf would be NaN."""
    return tl.where(b_m == float("-inf"), 0.0, b_m)


@triton.jit
def softmax_step(b_m, b_l, b_s, AXIS: tl.constexpr, C: tl.constexpr):
    """Return each row's maximum and sum including the scores b_s, the rescale of its older sums,
    and the weights of b_s; rows extend along AXIS.
    """
    b_row_max = tl.maximum(b_m, tl.max(b_s, AXIS))  # [BM]
    safe = finite(b_row_max)
    b_p = power(b_s - tl.expand_dims(safe, AXIS), C)  # [BM, BN]
    alpha = power(b_m - safe, C)  # [BM]
    return b_row_max, b_l * alpha + tl.sum(b_p, AXIS), alpha, b_p


@triton.jit
def sink_of(i_h, p):
    """Return the sink of a row's head, -inf without one: a scalar, or [BM] if a tile's rows have
    different heads.

    +inf becomes half of the largest float, which is finite in base 2 too.
    """
    return tl.minimum(tl.load(p.sinks + i_h), 0.5 * FLOAT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def above_sink(b_sink):
    """Return the minimum lse of a query that sees a key, one or two ulp above its sink, so lse
    shows which queries see none.
    """
    ulp = tl.maximum(tl.abs(b_sink) * 1.1920929e-07, 1.17549435e-38)
    return tl.where(b_sink == float("-inf"), b_sink, b_sink + ulp)


@triton.jit
def with_sink(b_m, b_l, i_h, p, C: tl.constexpr):
    """Return maximum and sum of each row including its sink, in the units of scores, and the
    rescale of older sums.
    """
    b_sink = sink_of(i_h, p) * LOG2E if C.BASE2 else sink_of(i_h, p)
    b_row_max = tl.maximum(b_m, b_sink)
    safe = finite(b_row_max)
    alpha = power(b_m - safe, C)
    return b_row_max, b_l * alpha + power(b_sink - safe, C), alpha


@triton.jit
def keep_mask(i, j, i_b, i_h, p, C: tl.constexpr):
    """Return the keep mask [BM, BN]. With keys as rows it would need a transposition."""
    tl.static_assert(not C.KEYS_FIRST)
    j0 = tl.min(j, 0) + p.key_start
    seed, row, head = (
        tl.load(p.seed),
        (i + p.query_start)[:, None],
        from_start(column(i_h, C), p.head_start),
    )
    return keep_tile(seed, row, head, from_start(i_b, p.batch_start), j0, p.threshold, C.BM, C.BN)


@triton.jit
def dropped(b, keep, p):
    """Return b where keep, else 0.

    The zero is computed at run time: LLVM sinks the rounding to 16 bits below the select of a
    literal zero.
    """
    return tl.where(keep, b, tl.cast(p.threshold >> 30, tl.float32))
