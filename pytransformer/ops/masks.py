# SPDX-License-Identifier: Apache-2.0
"""Position biases as values, and their integer buckets."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

MAX_BUCKETS = 1 << 16  # maximum of a table: computing the boundaries takes less than 0.3 s


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
    """T5's bucketed relative position bias: adds ``table[bucket(j - i - offset), h]``.

    The (Lq, Lk) bias is never built.

    Attributes:
        table: (buckets, Hq) floating; gets a gradient, summed in a fixed order.
        bidirectional: half of the buckets for keys after the query (encoders); otherwise these keys
            share bucket 0.
        max_distance: greater distances share the last bucket.

    Source: Raffel et al., "Exploring the limits of transfer learning" (2020), section 2.1; buckets
    as Hugging Face's ``T5Attention._relative_position_bucket`` on CPU.
    """

    table: torch.Tensor
    bidirectional: bool = True
    max_distance: int = 128


@functools.lru_cache(maxsize=64)
def bucket_starts(buckets: int, bidirectional: bool, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance of each bucket of one direction, in integer arithmetic.

    Let n be the buckets per direction and e = n // 2. Bucket d < e starts at d. Bucket e + k starts
    at the smallest d with ``d^(n-e) * e^k >= max_distance^k * e^(n-e)``. This is Hugging Face's
    float formula without its rounding: the root ``e * (max_distance / e)^(k / (n-e))``, rounded up.
    """
    n = buckets // 2 if bidirectional else buckets
    e = n // 2
    starts = list(range(e))
    for k in range(n - e):
        root = e * (max_distance / e) ** (k / (n - e))
        start = math.ceil(root)
        # Float64 errs by less than 1e-14 of the root. Decide in integers if an integer is close.
        if abs(root - round(root)) < 1e-13 * root:
            divisor = math.gcd(k, n - e)
            p, q = k // divisor, (n - e) // divisor
            near = round(root)
            start = near if near**q * e**p >= max_distance**p * e**q else near + 1
        starts.append(start)
    return tuple(starts)


def buckets_of(
    relative: torch.Tensor, buckets: int, bidirectional: bool, max_distance: int
) -> torch.Tensor:
    """Return the int64 bucket of each ``j - i - offset`` (any integer tensor)."""
    starts = torch.tensor(
        bucket_starts(buckets, bidirectional, max_distance), device=relative.device
    )
    distance = relative.abs() if bidirectional else (-relative).clamp_min(0)
    bucket = torch.searchsorted(starts, distance.contiguous(), right=True) - 1
    return bucket + (relative > 0) * (buckets // 2) if bidirectional else bucket


@functools.lru_cache(maxsize=64)
def bucket_row(
    buckets: int, bidirectional: bool, max_distance: int, pad: int, device: torch.device
) -> tuple[torch.Tensor, int, int]:
    """Return (int32 buckets of distances -before - pad … after + pad, before, after).

    The bucket is constant below -before and above after.
    """
    before = bucket_starts(buckets, bidirectional, max_distance)[-1]
    after = before if bidirectional else 0
    distance = torch.arange(-before - pad, after + pad + 1)
    return (
        buckets_of(distance, buckets, bidirectional, max_distance).to(
            device=device, dtype=torch.int32
        ),
        before,
        after,
    )
