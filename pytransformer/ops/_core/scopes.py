# SPDX-License-Identifier: Apache-2.0
"""Blocks that apply in one context: in threads, coroutines, generators, and when blocks overlap.

A context variable separates threads and tasks. Three cases need more:

- Blocks that end out of order. Each block removes itself, and an ended block never counts.
- Generators, which run in the context of the code that resumes them. A block of a running generator
  is inside the blocks of its caller, and hides the blocks that suspended generators opened later.
  While a generator is suspended its block also applies to the caller, because context managers and
  fixtures are written as generators.
- Autograd's device threads, which inherit no context. They read the blocks of the thread that
  called backward, from the thread-local state that autograd copies, and the blocks that were open
  in forward, which :func:`carried` restores.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
SUSPENDABLE = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR
_count = itertools.count()


class Block(Generic[T]):
    """One value, while its ``with`` block is open. ``frame`` runs the block."""

    def __init__(self, value: T, frame: FrameType | None) -> None:
        self.value, self.frame, self.open, self.order = value, frame, True, next(_count)
        self.suspendable = frame is not None and bool(frame.f_code.co_flags & SUSPENDABLE)

    def close(self) -> None:
        self.open, self.frame = False, None


class Scope(Generic[T]):
    """The blocks of one kind; ``open`` contains all open blocks of the process."""

    def __init__(self, name: str) -> None:
        self.open: list[Block[T]] = []
        self._key = f"pytransformer.{name}"
        self._here: ContextVar[tuple[Block[T], ...]] = ContextVar(self._key, default=())

    @contextlib.contextmanager
    def holding(self, value: T) -> Iterator[None]:
        """Apply the value inside the block."""
        block = Block(value, _frame_of_the_block())
        self.open.append(block)
        try:
            self._put((*self._here.get(), block), block)
            yield
        finally:
            block.close()
            self.open.remove(block)
            self._put(self._here.get(), block)

    def _put(self, blocks: Sequence[Block[T]], changed: Block[T]) -> None:
        blocks = tuple(b for b in blocks if b.open)
        self._here.set(blocks)
        if not changed.suspendable:  # a suspended block would reach other tasks of the thread
            plain = tuple(b for b in blocks if not b.suspendable)
            torch._C._stash_obj_in_tls(self._key, (threading.get_ident(), plain))

    def blocks(self) -> Sequence[Block[T]]:
        """Return the open blocks that apply here, innermost last."""
        if not self.open:
            return ()
        blocks = [b for b in self._here.get() if b.open]
        if torch._C._is_key_in_tls(self._key):
            thread, inherited = torch._C._get_obj_in_tls(self._key)
            if thread != threading.get_ident():  # an autograd thread, on behalf of ``thread``
                blocks = [*(b for b in inherited if b.open and b not in blocks), *blocks]
        suspendable = [b for b in self.open if b.suspendable]
        return _by_frames(blocks, suspendable) if suspendable else blocks

    def values(self) -> list[T]:
        """Return the values that apply here, innermost last."""
        return [b.value for b in self.blocks()] if self.open else []

    @contextlib.contextmanager
    def carried(self, blocks: Sequence[Block[T]]) -> Iterator[None]:
        """Apply forward's blocks in backward, outside of the blocks that already apply."""
        here = self._here.get()
        token = self._here.set((*(b for b in blocks if b.open and b not in here), *here))
        try:
            yield
        finally:
            self._here.reset(token)


def _frame_of_the_block() -> FrameType | None:
    """Return the frame with the ``with`` statement.

    A context manager written as a generator opens its blocks for its caller.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        is_manager = bool(frame.f_code.co_flags & SUSPENDABLE) and _is_contextlib(frame.f_back)
        if not is_manager and not _is_contextlib(frame):
            break
        frame = frame.f_back
    return frame


def _is_contextlib(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_globals.get("__name__") == "contextlib"


def _by_frames(blocks: Sequence[Block[T]], suspendable: Sequence[Block[T]]) -> list[Block[T]]:
    """Return the blocks ordered by running frame, outermost first.

    Blocks that a running generator hides are dropped.
    """
    depth: dict[FrameType, int] = {}
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        depth[frame] = -len(depth)
        frame = frame.f_back
    known = dict.fromkeys((*blocks, *(b for b in suspendable if b.frame in depth)))
    running = [(b, depth[b.frame]) for b in known if b.frame in depth]
    running.sort(key=lambda entry: (entry[1], entry[0].order))
    innermost = next((b for b, _ in reversed(running) if b.suspendable), None)
    inside = {b for b, _ in running}
    around = [
        b for b in known if b not in inside and (innermost is None or b.order < innermost.order)
    ]
    return [*sorted(around, key=lambda b: b.order), *(b for b, _ in running)]
