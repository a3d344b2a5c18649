# SPDX-License-Identifier: Apache-2.0
"""The visible tiles (query chunk, key chunk) of a ring, and the sends and receives of each step.

At step t rank r computes with keys of rank ``(r - t) mod n``. A key chunk is sent once to each rank
that sees part of it, from the rank below if that rank used it in the previous step, otherwise from
its owner. The gradients of a chunk follow one step later: to the rank above if that rank adds its
share next, otherwise to the owner.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Bounds of the visible pairs: the raw op's numbers (-1: no bound), by absolute index."""

    causal: bool = False
    left: int = -1
    right: int = -1
    global_keys: int = 0
    offset: int = 0  # of the alignment
    prefix: int = 0  # longest prefix of any sequence
    queries: int = 1 << 62  # maximum number of queries
    keys: int = 1 << 62
    # (first query, first key) of chunks that a block mask hides.
    hidden: frozenset[tuple[int, int]] = frozenset()

    def visible(self, queries: range, keys: range) -> bool:
        """Return whether a pair may be visible; False is exact."""
        first, last = queries.start, min(queries.stop, self.queries) - 1
        least, most = keys.start, min(keys.stop, self.keys) - 1
        if first > last or least > most or (queries.start, keys.start) in self.hidden:
            return False
        first, last = first + self.offset, last + self.offset
        below = not self.causal or least <= last or least < self.prefix
        in_window = (self.left < 0 or most >= first - self.left) and (
            self.right < 0 or least <= last + self.right
        )
        return below and (in_window or least < self.global_keys)


class Message(NamedTuple):
    """A key chunk of rank ``owner`` that is sent from one rank to another."""

    source: int
    target: int
    owner: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The tiles and messages of one call.

    ``queries`` and ``keys`` are the absolute rows of each rank's chunks.
    """

    pattern: Pattern
    queries: tuple[tuple[range, ...], ...]
    keys: tuple[tuple[range, ...], ...]

    @property
    def ranks(self) -> int:
        return len(self.queries)

    def owner(self, rank: int, step: int) -> int:
        """Return the rank whose keys this rank uses in a step."""
        return (rank - step) % self.ranks

    def tiles(self, rank: int, step: int) -> list[tuple[int, int]]:
        """Return the visible (query chunk, key chunk of the owner), in merge order."""
        if not 0 <= step < self.ranks:
            return []
        of_keys = self.keys[self.owner(rank, step)]
        pairs = ((i, j) for j in range(len(of_keys)) for i in range(len(self.queries[rank])))
        return [(i, j) for i, j in pairs if self.pattern.visible(self.queries[rank][i], of_keys[j])]

    def needs(self, rank: int, step: int) -> list[int]:
        """Return the owner's chunks that the rank sees part of."""
        return sorted({j for _, j in self.tiles(rank, step)})

    def receives(self, rank: int, step: int) -> list[Message]:
        """Return the messages that must arrive before the rank computes the step."""
        owner, below = self.owner(rank, step), (rank - 1) % self.ranks
        had = self.needs(below, step - 1) if step > 1 else []
        return (
            [Message(below if j in had else owner, rank, owner, j) for j in self.needs(rank, step)]
            if step
            else []
        )

    def returns(self, rank: int, step: int) -> list[Message]:
        """Return the messages with a step's gradients after the rank has added its share."""
        owner, above = self.owner(rank, step), (rank + 1) % self.ranks
        next_too = self.needs(above, step + 1)
        return (
            [
                Message(rank, above if j in next_too else owner, owner, j)
                for j in self.needs(rank, step)
            ]
            if step
            else []
        )

    def key_messages(self, step: int) -> tuple[Message, ...]:
        """Return the messages that must arrive before a step, in the same order on all ranks."""
        return self._messages[0].get(step, ())

    def gradient_messages(self, step: int) -> tuple[Message, ...]:
        """Return the messages that pass on the gradients of a step's chunks."""
        return self._messages[1].get(step, ())

    @functools.cached_property
    def _messages(self) -> tuple[dict[int, tuple[Message, ...]], ...]:
        return tuple(
            {
                step: tuple(m for rank in range(self.ranks) for m in of(rank, step))
                for step in range(1, self.ranks)
            }
            for of in (self.receives, self.returns)
        )


@functools.lru_cache(maxsize=256)
def ring_plan(
    pattern: Pattern, queries: tuple[tuple[range, ...], ...], keys: tuple[tuple[range, ...], ...]
) -> RingPlan:
    """Return the cached plan; its messages, about n², are enumerated once."""
    return RingPlan(pattern, queries, keys)
