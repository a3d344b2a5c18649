# SPDX-License-Identifier: Apache-2.0
"""Position biases as values, and the integers behind them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

MAX_BUCKETS = 1 << 16  # of a table: the time to compute their boundaries stays below 0.3 s


@dataclass(frozen=True)
class AlibiBias:
    """ALiBi: adds ``-slopes[h] * |j - i - offset|`` to the score of query i and key j.

    Attributes:
        slopes: (Hq,) floating, positive in the paper; gets a gradient if it requires one.

    Source: Press, Smith, Lewis, "Train short, test long" (2022), section 3.
    """

    slopes: torch.Tensor


@dataclass(frozen=True)
class RelativePositionBias:
    """T5's bucketed relative position bias: adds ``table[bucket(j - i - offset), h]``; the (Lq, Lk) bias is never built.

    Attributes:
        table: (buckets, Hq) floating; gets a gradient, summed in a fixed order.
        bidirectional: half of the buckets for keys after the query (encoders); otherwise those keys share bucket 0.
        max_distance: distances from here on share the last bucket.

    Source: Raffel et al., "Exploring the limits of transfer learning" (2020), section 2.1; buckets as Hugging Face's
    ``T5Attention._relative_position_bucket`` on CPU.
    """

    table: torch.Tensor
    bidirectional: bool = True
    max_distance: int = 128


@functools.lru_cache(maxsize=64)
def bucket_starts(buckets: int, bidirectional: bool, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance of each bucket of one direction, by integers alone.

    With n buckets a direction and e = n // 2: bucket d for d < e, and bucket e + k starts at the
    smallest d with ``d^(n-e) * e^k >= max_distance^k * e^(n-e)``, which is Hugging Face's float
    formula without its rounding: the root ``e * (max_distance / e)^(k / (n-e))``, rounded up.
    """
    n = buckets // 2 if bidirectional else buckets
    e = n // 2
    starts = list(range(e))
    for k in range(n - e):
        root = e * (max_distance / e) ** (k / (n - e))
        start = math.ceil(root)
        # Float64 is wrong by less than 1e-14 of the root. Integers decide if one is nearly as near.
        if abs(root - round(root)) < 1e-13 * root:
            divisor = math.gcd(k, n - e)
            p, q = k // divisor, (n - e) // divisor
            near = round(root)
            start = near if near**q * e**p >= max_distance**p * e**q else near + 1
        starts.append(start)
    return tuple(starts)


def buckets_of(relative: torch.Tensor, buckets: int, bidirectional: bool, max_distance: int) -> torch.Tensor:
    """The bucket of each ``j - i - offset`` (any integer tensor), int64."""
    starts = torch.tensor(bucket_starts(buckets, bidirectional, max_distance), device=relative.device)
    distance = relative.abs() if bidirectional else (-relative).clamp_min(0)
    bucket = torch.searchsorted(starts, distance.contiguous(), right=True) - 1
    return bucket + (relative > 0) * (buckets // 2) if bidirectional else bucket


@functools.lru_cache(maxsize=64)
def bucket_row(
    buckets: int, bidirectional: bool, max_distance: int, pad: int, device: torch.device
) -> tuple[torch.Tensor, int, int]:
    """The bucket of d = -before - pad … after + pad, int32, where the bucket changes no more beyond -before and after; before, after."""
    before = bucket_starts(buckets, bidirectional, max_distance)[-1]
    after = before if bidirectional else 0
    distance = torch.arange(-before - pad, after + pad + 1)
    return buckets_of(distance, buckets, bidirectional, max_distance).to(device=device, dtype=torch.int32), before, after
