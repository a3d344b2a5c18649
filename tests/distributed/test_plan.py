# SPDX-License-Identifier: Apache-2.0
"""Plans of ring attention against an enumeration of all pairs of rows, without processes."""

from __future__ import annotations

import itertools

import pytest
import torch

from pytransformer.distributed.layout import chunk_ranges, in_order
from pytransformer.distributed.plan import Message, Pattern, RingPlan
from pytransformer.testing import oracle

PATTERNS = {
    "all": Pattern(),
    "causal": Pattern(causal=True),
    "causal window": Pattern(causal=True, left=5),
    "window": Pattern(left=4, right=3),
    "narrow window": Pattern(left=0, right=0),
    "global keys": Pattern(causal=True, left=3, global_keys=2),
    "offset": Pattern(causal=True, offset=24),
    "negative offset": Pattern(causal=True, left=9, offset=-12),
    "prefix": Pattern(causal=True, prefix=14),
    "lengths": Pattern(queries=17, keys=9),
}
WORLDS = [
    (2, "contiguous"),
    (3, "contiguous"),
    (4, "contiguous"),
    (2, "zigzag"),
    (3, "zigzag"),
    (8, "zigzag"),
]
LENGTH = 48


def plan_of(pattern: Pattern, ranks: int, layout: str) -> RingPlan:
    keys = LENGTH + pattern.offset if pattern.offset else LENGTH
    return RingPlan(pattern, chunk_ranges(layout, ranks, LENGTH), chunk_ranges(layout, ranks, keys))


def visible_pairs(p: Pattern) -> torch.Tensor:
    """Return (Lq, Lk) from the op's oracle."""
    keys = LENGTH + p.offset
    keywords = oracle.Keywords(
        causal=None if not p.causal else "bottom_right" if p.offset else "top_left",
        window=tuple(None if n < 0 else n for n in (p.left, p.right)),
        global_keys=p.global_keys,
        prefix_lengths=torch.tensor([p.prefix]) if p.prefix else None,
        query_lengths=torch.tensor([min(p.queries, LENGTH)]),
        key_lengths=torch.tensor([min(p.keys, keys)]),
    )
    return oracle.visible_pairs(keywords, 1, LENGTH, keys)[0][0, 0]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("ranks, layout", WORLDS)
def test_tiles_equal_those_with_visible_pairs(name: str, ranks: int, layout: str) -> None:
    """No visible tile is missing and no hidden one is computed.

    For each single keyword, visibility by ranges is exact.
    """
    plan, pairs = plan_of(PATTERNS[name], ranks, layout), visible_pairs(PATTERNS[name])
    for rank, step in itertools.product(range(ranks), range(ranks)):
        keys = plan.keys[plan.owner(rank, step)]
        for (i, queries), (j, of_keys) in itertools.product(
            enumerate(plan.queries[rank]), enumerate(keys)
        ):
            seen = bool(pairs[queries.start : queries.stop, of_keys.start : of_keys.stop].any())
            assert seen == ((i, j) in plan.tiles(rank, step)), (queries, of_keys)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("ranks, layout", WORLDS)
def test_keys_arrive_once_from_their_owner(name: str, ranks: int, layout: str) -> None:
    """Each gradient of a used chunk returns to the owner once."""
    plan = plan_of(PATTERNS[name], ranks, layout)
    has = {0: {(rank, rank, j) for rank in range(ranks) for j in range(len(plan.keys[rank]))}}
    sums: dict[tuple[int, int, int], list[int]] = {}  # (rank, owner, chunk) -> ranks
    home: dict[tuple[int, int], list[int]] = {}
    for step in range(1, ranks):
        has[step] = set()
        for m in plan.key_messages(step):
            assert m.owner == plan.owner(m.target, step) and m.chunk in plan.needs(m.target, step)
            assert m.source == m.owner or (m.source, m.owner, m.chunk) in has[step - 1]
            assert (m.target, m.owner, m.chunk) not in has[step], "twice"
            has[step].add((m.target, m.owner, m.chunk))
        needed = {
            (rank, plan.owner(rank, step), j)
            for rank in range(ranks)
            for j in plan.needs(rank, step)
        }
        assert has[step] == needed
        came, sums = sums, {place: [place[0]] for place in needed}
        for place, shares in came.items():
            if place in sums:
                sums[place] += shares
        handed = {}
        for m in plan.gradient_messages(step):
            shares = sums.pop((m.source, m.owner, m.chunk))
            if m.target == m.owner:
                home.setdefault((m.owner, m.chunk), []).extend(shares)
            else:
                handed[m.target, m.owner, m.chunk] = shares
        assert not sums, "gradients left behind"
        sums = handed
    assert not sums
    users = {(o, j): [] for o in range(ranks) for j in range(len(plan.keys[o]))}
    for step in range(1, ranks):
        for rank, owner, j in has[step]:
            users[owner, j].append(rank)
    assert {place: sorted(shares) for place, shares in home.items()} == {
        p: sorted(u) for p, u in users.items() if u
    }


def sent(plan: RingPlan) -> int:
    """Count the chunks that cross between ranks in forward."""
    return sum(len(plan.key_messages(step)) for step in range(1, plan.ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_hidden_chunks_are_not_sent(ranks: int) -> None:
    """The numbers are those of docs/distributed.md."""
    n = ranks
    assert sent(plan_of(Pattern(), n, "contiguous")) == n * (n - 1)
    assert sent(plan_of(Pattern(causal=True), n, "contiguous")) == n * (n - 1) // 2
    assert sent(plan_of(Pattern(causal=True), n, "zigzag")) == 3 * n * (n - 1) // 2
    size = LENGTH // n
    assert sent(plan_of(Pattern(causal=True, left=size), n, "contiguous")) == n - 1
    assert sent(plan_of(Pattern(left=0, right=0), n, "zigzag")) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_balances_causal_tiles(ranks: int) -> None:
    """Every rank has 2n + 1 tiles, each a quarter of a contiguous tile."""
    even, uneven = (
        plan_of(Pattern(causal=True), ranks, layout) for layout in ("zigzag", "contiguous")
    )

    def tiles(plan: RingPlan, rank: int) -> int:
        return sum(len(plan.tiles(rank, step)) for step in range(ranks))

    assert [tiles(even, r) for r in range(ranks)] == [2 * ranks + 1] * ranks
    assert [tiles(uneven, r) for r in range(ranks)] == [r + 1 for r in range(ranks)]


def test_shards_concatenate_in_order() -> None:
    whole = torch.arange(24)
    for ranks, layout in ((2, "zigzag"), (3, "zigzag"), (4, "contiguous")):
        shards = [
            torch.cat([whole[c.start : c.stop] for c in of_rank])
            for of_rank in chunk_ranges(layout, ranks, 24)
        ]
        assert torch.equal(in_order(shards, 0, layout), whole)
    assert chunk_ranges("zigzag", 2, 8) == ((range(2), range(6, 8)), (range(2, 4), range(4, 6)))


def test_messages_name_their_ranks() -> None:
    plan = plan_of(Pattern(causal=True), 2, "contiguous")
    assert plan.key_messages(1) == (Message(source=0, target=1, owner=0, chunk=0),)
    assert plan.gradient_messages(1) == (Message(source=1, target=0, owner=0, chunk=0),)
