# SPDX-License-Identifier: Apache-2.0
"""Problems of the fused sm_90a backward, in any order and in the order of keys."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attention_problems import BF16, F16, Problem, integers, padding


def unordered(problem: Problem) -> Problem:
    """Return the problem for the kernel that adds d_query across blocks."""
    return problem._replace(
        name=f"{problem.name}, unordered",
        keywords=lambda n: {**problem.keywords(n), "deterministic": False},
    )


# Several KV blocks add to the same queries: from three positions, over several heads of a group,
# around the last tile of a head.
ANY_ORDER = (
    Problem("64 and 80, unordered", BF16, (1, 2, 1, 140, 200, 64, 80),
        lambda n: {"deterministic": False}),
    Problem("many keys, unordered", BF16, (1, 2, 1, 200, 520, 128, 128),
        lambda n: {"deterministic": False}),
    # Missing or hidden keys whose weights would overflow float32.
    Problem("one key, unordered", BF16, (1, 1, 1, 300, 1, 64, 64),
        lambda n: {"deterministic": False, "scale": 16.0}),
    Problem(
        "few keys, unordered", BF16, (2, 1, 1, 300, 71, 64, 64),
        lambda n: {"attn_mask": torch.stack([torch.arange(71) % 70 == 0,
            (torch.arange(71) - 63).abs() < 2])[:, None, None],
                   "deterministic": False, "scale": 32.0},
    ),
)  # fmt: skip
# The same kernel with many keys, where blocks add in turn: the first block of a tile is that of the
# first key or of a later one.
IN_ORDER = (
    Problem("many keys in order, grouped", BF16, (1, 2, 1, 200, 1060, 128, 128), lambda n: {}),
    Problem("many keys in order, causal", F16, (2, 1, 1, 300, 1024, 64, 64),
        lambda n: {"causal": "bottom_right"}),
    Problem(
        "many keys in order, lengths and window", BF16, (2, 1, 1, 300, 1100, 96, 96),
        lambda n: {"query_lengths": integers(300, 170), "key_lengths": integers(1090, 450),
            "window": (140, 30),
                   "causal": "bottom_right"},
    ),
    Problem(
        "many keys in order, prefix", BF16, (2, 1, 1, 270, 1030, 64, 64),
        lambda n: {"causal": "top_left", "prefix_lengths": integers(400, 10)},
    ),
    Problem(
        "many keys in order, padding", F16, (3, 1, 1, 150, 1030, 128, 128),
        lambda n: {"attn_mask": padding(1030, (300, 1000), (0, 1030), (0, 0),
            holes=n(3, 1, 1, 1030))},
    ),
    # Bits in lane order, with any number of keys.
    Problem(
        "mask and dropout in order", BF16, (2, 2, 1, 100, 200, 128, 128),
        lambda n: {"attn_mask": n(1, 2, 100, 200) > -0.5, "causal": "bottom_right",
            "dropout_p": 0.2, "dropout_seed": 9},
    ),
    Problem(
        "mask and segments in order", F16, (2, 1, 1, 200, 300, 64, 64),
        lambda n: {"attn_mask": n(1, 1, 200, 300) > -0.5, "window": (None, 250),
            "query_segments": torch.arange(400).view(2, 200) // 110,
            "key_segments": torch.arange(600).view(2, 300) // 150},
    ),
)  # fmt: skip


def any_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Yield the unordered problems of sm90_problems and of this file."""
    return (*map(unordered, problems), *ANY_ORDER)
