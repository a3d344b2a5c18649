# SPDX-License-Identifier: Apache-2.0
"""Which tiles of (query chunk, key chunk) have visible pairs, and from them who computes, sends and receives what, and when.

At step t rank r computes with keys of rank ``(r - t) mod n``. A chunk of keys goes only to the ranks that see some of it, once to
each: from the neighbour below, which had it a step before, or from its owner where the neighbour had no need of it. The
gradients of a chunk go the same ways one step later: to the neighbour above where that adds its share next, else home.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What is known of visible pairs without looking at each: numbers of the raw op (-1: no bound), by absolute index."""

    causal: bool = False
    left: int = -1
    right: int = -1
    global_keys: int = 0
    offset: int = 0  # of the alignment
    prefix: int = 0  # no sequence has a longer one
    queries: int = 1 << 62  # nor more queries
    keys: int = 1 << 62
    hidden: frozenset[tuple[int, int]] = frozenset()  # (first query, first key) of chunks of which a block mask shows nothing

    def visible(self, queries: range, keys: range) -> bool:
        """Whether some pair may be visible. False is certain."""
        first, last = queries.start, min(queries.stop, self.queries) - 1
        least, most = keys.start, min(keys.stop, self.keys) - 1
        if first > last or least > most or (queries.start, keys.start) in self.hidden:
            return False
        first, last = first + self.offset, last + self.offset
        below = not self.causal or least <= last or least < self.prefix
        in_window = (self.left < 0 or most >= first - self.left) and (self.right < 0 or least <= last + self.right)
        return below and (in_window or least < self.global_keys)


class Message(NamedTuple):
    """A chunk of the keys of rank ``owner`` that goes from one rank to another."""

    source: int
    target: int
    owner: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """One call's tiles and messages. ``queries``, ``keys``: for each rank the absolute rows of its chunks."""

    pattern: Pattern
    queries: tuple[tuple[range, ...], ...]
    keys: tuple[tuple[range, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.queries)

    def owner(self, rank: int, step: int) -> int:
        """Whose keys the rank computes with."""
        return (rank - step) % self.ranks

    def tiles(self, rank: int, step: int) -> list[tuple[int, int]]:
        """(query chunk, key chunk of the owner): those with visible pairs, in the order in which they are merged."""
        if not 0 <= step < self.ranks:
            return []
        of_keys = self.keys[self.owner(rank, step)]
        pairs = ((i, j) for j in range(len(of_keys)) for i in range(len(self.queries[rank])))
        return [(i, j) for i, j in pairs if self.pattern.visible(self.queries[rank][i], of_keys[j])]

    def needs(self, rank: int, step: int) -> list[int]:
        """The owner's chunks that the rank sees some of."""
        return sorted({j for _, j in self.tiles(rank, step)})

    def receives(self, rank: int, step: int) -> list[Message]:
        """What must have come before the rank computes the step."""
        owner, below = self.owner(rank, step), (rank - 1) % self.ranks
        had = self.needs(below, step - 1) if step > 1 else []
        return [Message(below if j in had else owner, rank, owner, j) for j in self.needs(rank, step)] if step else []

    def returns(self, rank: int, step: int) -> list[Message]:
        """Where the gradients of the chunks of a step go once the rank has added its share."""
        owner, above = self.owner(rank, step), (rank + 1) % self.ranks
        next_too = self.needs(above, step + 1)
        return [Message(rank, above if j in next_too else owner, owner, j) for j in self.needs(rank, step)] if step else []

    def key_messages(self, step: int) -> tuple[Message, ...]:
        """All messages of the group that must have come before a step, in an order that is the same on every rank."""
        return self._messages[0].get(step, ())

    def gradient_messages(self, step: int) -> tuple[Message, ...]:
        """Those that hand on the gradients of a step's chunks."""
        return self._messages[1].get(step, ())

    @functools.cached_property
    def _messages(self) -> tuple[dict[int, tuple[Message, ...]], ...]:
        return tuple(
            {step: tuple(m for rank in range(self.ranks) for m in of(rank, step)) for step in range(1, self.ranks)}
            for of in (self.receives, self.returns)
        )


@functools.lru_cache(maxsize=256)
def ring_plan(pattern: Pattern, queries: tuple[tuple[range, ...], ...], keys: tuple[tuple[range, ...], ...]) -> RingPlan:
    """The plan, kept: its messages are enumerated once, about n² of them."""
    return RingPlan(pattern, queries, keys)
