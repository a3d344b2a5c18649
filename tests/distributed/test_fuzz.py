# SPDX-License-Identifier: Apache-2.0
"""Random problems split over processes, judged by the bounds that hold for one process."""

from __future__ import annotations

import pytest
import torch

from pytransformer.testing import bounds
from pytransformer.testing.draw_attention import draw
from pytransformer.testing.ranks import Pool
from pytransformer.testing.split_attention import attend_or_refuse, cut, joined, padded

CASES = 40


def ok(check: bounds.Check, dtype: torch.dtype) -> bool:
    """The raw op rounds each tile's out to the inputs' 16 bits and merging rounds once more: half a unit beyond the bound of one call."""
    twice = check.name == "out" and dtype in (torch.bfloat16, torch.float16)
    return check.reached <= check.allowed + 0.5 * twice


@pytest.mark.parametrize("ranks, layout", [(2, "contiguous"), (2, "zigzag"), (3, "contiguous"), (4, "zigzag")])
def test_within_the_bounds(pool: Pool, ranks: int, layout: str, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--fuzz-seed")
    refused, wrong = 0, []
    for case in range(CASES):
        number = 1000 * ranks + case
        problem = draw(seed, number)
        whole = padded(problem, 2 * ranks)
        shards = pool.run(ranks, attend_or_refuse, whole, "ring", layout)
        if isinstance(shards[0], str):
            refused += 1
            assert "bottom_right" in shards[0] or "one query" in shards[0], shards[0]
            continue
        results = cut(joined(whole, shards, layout), problem)
        solution = problem.solve()
        checks = bounds.check(solution, results, problem.dtype, problem.limits)
        wrong += [f"case {seed}/{number} {c}\n  {problem}" for c in checks if not ok(c, problem.dtype)]
    assert not wrong, f"{len(wrong)} of {CASES}, {refused} refused\n" + "\n".join(wrong)
    assert refused < CASES / 4
