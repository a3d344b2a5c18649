# SPDX-License-Identifier: Apache-2.0
"""Bucket boundaries of relative positions equal the integer definition at any distance."""

from __future__ import annotations

import random
import time

import pytest
import torch

import pytransformer as pt
from pytransformer.ops.masks import MAX_BUCKETS, bucket_starts


def is_smallest(start: int, n: int, k: int, max_distance: int) -> bool:
    """Return if bucket n

    2 + k starts here, by the inequality of the definition.
    """
    e = n // 2

    def reaches(d: int) -> bool:
        return d ** (n - e) * e**k >= max_distance**k * e ** (n - e)

    return reaches(start) and not reaches(start - 1)


def test_bucket_starts_are_the_min_distances() -> None:
    rng = random.Random(0)
    # Powers, whose boundaries are exact integers, and random distances.
    cases = [
        (n, (n // 2) * 2 ** rng.randint(1, 18)) for n in (2, 3, 8, 16, 32, 64) for _ in range(4)
    ]
    cases += [(n, (n // 2) * 3 ** (n - n // 2)) for n in (2, 4, 8, 12)]
    cases += [
        (rng.randint(2, 80), rng.randint(41, 2 ** rng.randint(6, 31) + 41)) for _ in range(60)
    ]
    for n, max_distance in cases:
        starts = bucket_starts(n, False, max_distance)
        assert starts == bucket_starts(2 * n, True, max_distance) and starts[: n // 2] == tuple(
            range(n // 2)
        )
        for k, start in enumerate(starts[n // 2 :]):
            assert is_smallest(start, n, k, max_distance), (n, max_distance, k)


def test_max_distance_is_fast() -> None:
    bucket_starts.cache_clear()
    query = torch.randn(1, 2, 4, 8)
    began = time.perf_counter()
    for buckets in (32, 512):
        pt.attention(
            query,
            query,
            query,
            bias=pt.RelativePositionBias(torch.zeros(buckets, 2), False, 2**31 - 1),
        )
    assert time.perf_counter() - began < 1.0  # counting up to the distance took hours


def test_values_beyond_the_limits_raise() -> None:
    query = torch.randn(1, 2, 4, 8)
    for table, distance, message in (
        (torch.zeros(32, 2), 2**31, r"max_distance must be an int greater than 8 .*below 2\*\*31"),
        (torch.zeros(MAX_BUCKETS + 2, 2), 2**30, "at most 65,536 buckets, got 65,538"),
    ):
        with pytest.raises(ValueError, match=message):
            pt.attention(query, query, query, bias=pt.RelativePositionBias(table, True, distance))
