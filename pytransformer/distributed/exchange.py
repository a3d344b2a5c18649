# SPDX-License-Identifier: Apache-2.0
"""Sends and receives of one step, posted together so they overlap the step's tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from .plan import Message

Payload = tuple[torch.Tensor, ...]


class Exchange:
    """The messages between this rank and its peers, from :meth:`post` to :meth:`wait`.

    Every rank iterates over the same list of messages in the same order, because NCCL pairs the
    sends and receives of two ranks by order. gloo pairs them by tag.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int) -> None:
        self.group, self.rank = group, rank
        self._tag = 0
        self._calls: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def add(
        self,
        messages: Iterable[Message],
        held: Callable[[Message], Payload],
        empty: Callable[[Message], Payload],
    ) -> dict[Message, Payload]:
        """Add messages and return the receive buffers, which are filled once :meth:`wait` returns.

        Args:
            held: returns the payload of a sent message.
            empty: returns the buffers of a received message.
        """
        received: dict[Message, Payload] = {}
        for message in messages:
            self._tag += 1
            if message.source == self.rank:
                for t in held(message):
                    self._call(dist.isend, t, message.target)
            elif message.target == self.rank:
                received[message] = empty(message)
                for t in received[message]:
                    self._call(dist.irecv, t, message.source)
        return received

    def _call(self, call: Callable[..., object], t: torch.Tensor, other: int) -> None:
        if t.numel():
            peer = other if self.group is None else dist.get_global_rank(self.group, other)
            self._calls.append(dist.P2POp(call, t, peer, self.group, self._tag))

    def post(self) -> None:
        if self._calls:
            self._works = dist.batch_isend_irecv(self._calls)

    def wait(self) -> None:
        """Wait until all receives have arrived and sent tensors may be modified."""
        for work in self._works:
            work.wait()
        self._calls, self._works = [], []
