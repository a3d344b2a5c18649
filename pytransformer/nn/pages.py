# SPDX-License-Identifier: Apache-2.0
"""Which page belongs to whom: the bookkeeping of a paged cache, without a tensor.

A sequence is a table of pages, all full but the last. Pages are counted: sequences that began alike share them, and a page that is
written, though others read it, is copied first. A full page may be *known* by its tokens and those before it; it then stays, after its last
sequence has ended, until room is needed: the one that was used longest ago goes first.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), section 4.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class OutOfPages(RuntimeError):
    """There are fewer pages than the sequences need. Nothing has changed."""


class _Known(NamedTuple):
    """A full page's place in the index: ``key`` is (serial of the page before, its tokens); ``serial`` is never used again."""

    key: tuple[int, tuple[int, ...]]
    serial: int


class Pages:
    """Sequences, named by numbers, over ``num_pages`` pages of ``page_size`` positions.

    Attributes:
        tables: each sequence's pages. A list is replaced, never changed, so a copy of the dict is a snapshot.
        lengths: each sequence's number of positions.
        counts: for each page, the number of tables that contain it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"PagedCache: {name} must be at least 1, got {value}")
        self.num_pages, self.page_size = num_pages, page_size
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.counts = [0] * num_pages
        self._names = itertools.count()
        self._serials = itertools.count(1)  # 0: before the first page
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._known: dict[int, _Known] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, in no table; used longest ago first

    @property
    def available(self) -> int:
        """Pages that no sequence has."""
        return len(self._free) + len(self._idle)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def open(self, tokens: Sequence[int] = ()) -> int:
        """A new sequence. Of ``tokens``, those whose pages are known are in it; the last one never is, for its logits are wanted."""
        name = next(self._names)
        table: list[int] = []
        serial, size = 0, self.page_size
        for start in range(0, len(tokens) - size, size):
            page = self._pages.get((serial, tuple(tokens[start : start + size])))
            if page is None:
                break
            serial = self._known[page].serial
            self._hold(page)
            table.append(page)
        self.tables[name], self.lengths[name] = table, len(table) * size
        return name

    def grow(self, new: Mapping[int, int]) -> list[tuple[int, int]]:
        """Room for so many more positions of each sequence. Returns the pages to be copied before they are written: (from, to).

        Raises:
            OutOfPages: for all or none.
        """
        needed = self._needed(new)
        if needed > self.available:
            raise OutOfPages(
                f"PagedCache: {needed} more pages of {self.page_size} positions are needed, and {self.available} of {self.num_pages} are "
                f"without a sequence; close sequences, or make it with num_pages={self.num_pages + needed - self.available} or more"
            )
        copies = []
        for name, count in new.items():
            if count == 0:
                continue
            table, length = list(self.tables[name]), self.lengths[name]
            if length % self.page_size:
                last = table[-1]
                if self.counts[last] > 1:
                    table[-1] = self._take()
                    copies.append((last, table[-1]))
                    self._release(last)
                else:
                    self._forget(last)  # it will hold something else
            while len(table) < self.pages_for(length + count):
                table.append(self._take())
            self.tables[name], self.lengths[name] = table, length + count
        return copies

    def _needed(self, new: Mapping[int, int]) -> int:
        """Pages that :meth:`grow` takes: those at the end, and copies. Of the sequences that share a page the last need not copy it."""
        needed, sharers = 0, Counter[int]()
        for name, count in new.items():
            if count:
                length = self.lengths[name]
                needed += self.pages_for(length + count) - len(self.tables[name])
                if length % self.page_size:
                    sharers[self.tables[name][-1]] += 1
        return needed + sum(min(n, self.counts[page] - 1) for page, n in sharers.items())

    def fork(self, name: int) -> int:
        """A new sequence with the same positions, in the same pages."""
        other = next(self._names)
        self.tables[other], self.lengths[other] = self.tables[name], self.lengths[name]
        for page in self.tables[name]:
            self._hold(page)
        return other

    def crop(self, name: int, length: int) -> None:
        """Forget the positions from ``length`` on."""
        table, count = self.tables[name], self.pages_for(length)
        for page in reversed(table[count:]):
            self._release(page)
        if count < len(table):
            self.tables[name] = table[:count]
        self.lengths[name] = length

    def close(self, name: int) -> None:
        """The sequence ends."""
        self.crop(name, 0)
        del self.tables[name], self.lengths[name]

    def restore(self, tables: Mapping[int, list[int]], lengths: Mapping[int, int]) -> None:
        """Return to a snapshot of :attr:`tables` and :attr:`lengths`, from any state, also one that an exception interrupted.

        All else follows from the tables and from the pages that are still known by their tokens: they were forgotten before anything
        else was written to them.
        """
        self.tables, self.lengths = dict(tables), dict(lengths)
        counts = [0] * self.num_pages
        for table in self.tables.values():
            for page in table:
                counts[page] += 1
        self.counts = counts
        self._pages = {known.key: page for page, known in self._known.items()}
        idle = dict.fromkeys(self._idle) | dict.fromkeys(self._known)  # keep the order of use
        self._idle = OrderedDict.fromkeys(page for page in idle if page in self._known and not counts[page])
        free = dict.fromkeys(self._free) | dict.fromkeys(range(self.num_pages))
        self._free = [page for page in free if page not in self._known and not counts[page]]

    def know(self, name: int, tokens: Sequence[int]) -> None:
        """Let the sequence's full pages be found by its ``tokens``, those that it holds, from the first on."""
        serial, size = 0, self.page_size
        for i, page in enumerate(self.tables[name][: min(len(tokens), self.lengths[name]) // size]):
            key = (serial, tuple(tokens[i * size : (i + 1) * size]))
            if key not in self._pages:
                if page in self._known:  # by other tokens: the sequence was cropped and its tokens are not what they were
                    self._forget(page)
                self._pages[key], self._known[page] = page, _Known(key, next(self._serials))
            serial = self._known[self._pages[key]].serial

    def _hold(self, page: int) -> None:
        self.counts[page] += 1
        self._idle.pop(page, None)

    def _release(self, page: int) -> None:
        self.counts[page] -= 1
        if self.counts[page] == 0:
            if page in self._known:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _take(self) -> int:
        if not self._free:
            page = next(iter(self._idle))
            self._forget(page)
        page = self._free.pop()
        self.counts[page] = 1
        return page

    def _forget(self, page: int) -> None:
        """The page is no longer found by its tokens. What followed it is not either; that goes when its turn comes."""
        known = self._known.pop(page, None)
        if known is not None:
            del self._pages[known.key]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
