# SPDX-License-Identifier: Apache-2.0
"""Random problems split over processes stay within the bounds of one process."""

from __future__ import annotations

import pytest

from pytransformer.testing import bounds
from support.draw_attention import CHANCES, draw
from support.ranks import Pool
from support.split_attention import attend_or_refuse, cut, joined, padded, within

CASES = 40
REFUSED = {
    "ring": ("bottom_right", "one query"),
    "ulysses": ("must divide query's heads", "one query"),
}


@pytest.mark.parametrize(
    "scheme, ranks, layout",
    [
        ("ring", 2, "contiguous"),
        ("ring", 2, "zigzag"),
        ("ring", 3, "contiguous"),
        ("ring", 4, "zigzag"),
        ("ulysses", 2, "contiguous"),
    ],
)
def test_random_problems_within_the_bounds(
    pool: Pool, scheme: str, ranks: int, layout: str, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("--fuzz-seed")
    refused, wrong = 0, []
    for case in range(CASES):
        number = 1000 * ranks + case
        problem = draw(seed, number)
        whole = padded(problem, 2 * ranks)
        shards = pool.run(ranks, attend_or_refuse, whole, scheme, layout)
        if isinstance(shards[0], str):
            refused += 1
            assert any(reason in shards[0] for reason in REFUSED[scheme]), shards[0]
            continue
        results = cut(joined(whole, shards, layout), problem)
        solution = problem.solve()
        checks = bounds.check(solution, results, problem.dtype, problem.limits)
        wrong += [
            f"case {seed}/{number} {c}\n  {problem}"
            for c in checks
            if not within(c, problem.dtype, scheme)
        ]
    assert not wrong, f"{len(wrong)} of {CASES}, {refused} refused\n" + "\n".join(wrong)
    assert refused < CASES * (0.25 if scheme == "ring" else 0.75)


@pytest.mark.slow
def test_eight_processes_within_the_bounds() -> None:
    """A separate pool runs some problems on eight ranks."""
    processes, judged = Pool(8), 0
    try:
        for case in range(10):
            problem, layout = draw(8, case), ("contiguous", "zigzag")[case % 2]
            whole = padded(problem, 16)
            shards = processes.run(8, attend_or_refuse, whole, "ring", layout)
            if isinstance(shards[0], str):
                assert any(reason in shards[0] for reason in REFUSED["ring"]), shards[0]
                continue
            checks = bounds.check(
                problem.solve(),
                cut(joined(whole, shards, layout), problem),
                problem.dtype,
                problem.limits,
            )
            assert not [f"{c}\n{problem}" for c in checks if not within(c, problem.dtype, "ring")]
            judged += 1
    finally:
        processes.close()
    assert judged >= 5


def test_every_keyword_is_drawn(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--fuzz-seed")
    drawn = set[str]().union(
        *(draw(seed, 1000 * ranks + case).features for ranks in (2, 3, 4) for case in range(CASES))
    )
    assert drawn >= {
        *CHANCES,
        "global_keys",
        "dense",
        "alibi",
        "t5",
        "bool_mask",
        "float_mask",
        "lowest",
        "gqa",
        "spoiled",
    }
