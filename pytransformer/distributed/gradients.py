# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation of a backward pass, for local rows and for other ranks' keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops._core.tensors import empty_in_order
from .call import PLACES, RingCall
from .exchange import Exchange, Payload
from .group import sum_over_ranks
from .plan import Message

OF_KEYS = ("key", "value")


class Gradients:
    """Gradients by argument, in float32 (float64 for float64).

    The gradients of another rank's key chunk travel from rank to rank one step behind the keys and
    accumulate in step order. The owner adds the sum to its local gradients.
    """

    def __init__(self, call: RingCall, wanted: Sequence[bool]) -> None:
        self.call, self.wanted = call, tuple(wanted)
        named = zip(PLACES, call.a, wanted)
        self.of = {name: torch.zeros_like(t, dtype=call.a.work) for name, t, want in named if want}
        self._mine: dict[int, Payload] = {}  # this step's gradients of another rank's chunks
        # Accumulated with other ranks' gradients, to be passed on.
        self._sums: dict[int, Payload] = {}

    @property
    def wanted_of_tiles(self) -> tuple[bool, ...]:
        """Return which gradients tiles compute; sinks join a row after its tiles."""
        return tuple(want and name != "sinks" for name, want in zip(PLACES, self.wanted))

    def add(self, i: int, j: int, step: int, found: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a tile, query chunk i and key chunk j."""
        by_name = {name: t for name, t in zip(PLACES, found) if t is not None}
        of_keys = tuple(
            by_name.pop(name).to(self.call.a.work) for name in OF_KEYS if name in by_name
        )
        if step == 0:
            self._add_keys(j, of_keys)
        else:
            self._mine[j] = _sum(self._mine.get(j), of_keys)
        for name, t in by_name.items():
            self.call.part_of(name, self.of[name], i, j, step).add_(t)

    def pass_on(self, exchange: Exchange, step: int) -> dict[Message, Payload]:
        """Send the gradients of a step's chunks to the next rank or the owner.

        Returns the receive buffers for :meth:`receive`.
        """
        if not self._names:
            return {}
        return exchange.add(
            self.call.plan.gradient_messages(step), lambda m: self._sums[m.chunk], self._empty
        )

    def receive(self, coming: dict[Message, Payload]) -> None:
        """Accumulate received gradients, after the step's tiles and the exchange are complete."""
        self._sums, self._mine = self._mine, {}
        for message, payload in coming.items():
            if message.owner == self.call.rank:
                self._add_keys(message.chunk, payload)
            else:
                self._sums[message.chunk] = _sum(payload, self._sums[message.chunk])

    def finished(self) -> list[torch.Tensor | None]:
        """Return the gradients of PLACES in their arguments' dtype and memory order.

        Gradients of replicated arguments are summed over the ranks.
        """
        if self.call.sum_gradients and self.call.plan.ranks > 1:
            alike = [name for name in self.of if self.call.is_alike(name)]
            self.of.update(
                zip(alike, sum_over_ranks([self.of[name] for name in alike], self.call.group))
            )
        pairs = ((self.of.get(name), t) for name, t in zip(PLACES, self.call.a))
        return [None if total is None else empty_in_order(t).copy_(total) for total, t in pairs]

    @property
    def _names(self) -> list[str]:
        return [name for name in OF_KEYS if name in self.of]

    def _empty(self, message: Message) -> Payload:
        first, last = self.call.key_rows(message.chunk)
        shapes = [self.of[name][:, :, first:last].shape for name in self._names]
        return tuple(self.call.a.query.new_empty(shape, dtype=self.call.a.work) for shape in shapes)

    def _add_keys(self, chunk: int, payload: Payload) -> None:
        first, last = self.call.key_rows(chunk)
        for name, t in zip(self._names, payload):
            self.of[name][:, :, first:last] += t


def _sum(a: Payload | None, b: Payload) -> Payload:
    return b if a is None else tuple(x + y for x, y in zip(a, b))
