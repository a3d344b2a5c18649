# SPDX-License-Identifier: Apache-2.0
"""The gradient of T5's table from tiles of dS: sums along diagonals, added per bucket of their
distance.

A gather skews a row of tiles, so that diagonals become columns. A diagonal crosses two adjacent
tiles, so each tile is summed with the one to its left; a tile of zeros completes the diagonals that
start in a run's last tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def diagonal_sums(before, b_ds, C: tl.constexpr):
    """Return [BN]: sums of dS along the diagonals d0 - BN + c of this row of tiles, with one skew
    and one column sum.

    d0 is the diagonal of the first element of the tile b_ds; ``before`` is the tile to its left.
    """
    tl.static_assert(C.BM <= C.BN)
    r = tl.arange(0, C.BM)[:, None]
    c = tl.arange(0, C.BN)[None, :]
    return tl.sum(tl.gather(tl.where(c >= r, before, b_ds), (r + c) % C.BN, 1), 0)


@triton.jit
def last_diagonals(before, i, left, offset, origin, p, C: tl.constexpr):
    """Return [BUCKETS]: the sums that a tile to the right of the tile ``left`` would complete."""
    j = origin + left * C.BN + tl.arange(0, C.BN)
    nothing = tl.full([C.BM, C.BN], 0.0, tl.float32)
    return by_bucket(diagonal_sums(before, nothing, C), 0, i, j, offset, p.diagonals, C)


@triton.jit
def by_bucket(sums, step, i, j, offset, diagonals, C: tl.constexpr):
    """Return [BUCKETS]: the sums of the diagonals from the tile's first one plus step on, added per
    bucket.
    """
    d = tl.min(j, 0) - tl.min(i, 0) - offset + step
    d = tl.minimum(tl.maximum(d, diagonals.d_min), diagonals.d_max)
    bucket = tl.load(diagonals.bucket + diagonals.zero + d + tl.arange(0, C.BN))
    return tl.sum(
        tl.where(bucket[:, None] == tl.arange(0, C.BUCKETS)[None, :], sums[:, None], 0.0), 0
    )
