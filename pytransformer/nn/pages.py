# SPDX-License-Identifier: Apache-2.0
"""Page tables of a paged cache, without tensors.

A sequence is a table of pages, all full except the last. Pages have reference counts: sequences
with a common prefix share them, and a write to a shared page copies it first. A full page may be
*known* by its tokens and the tokens before it. A known page outlives its last sequence until room
is needed; the least recently used page is evicted first.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (2023), section 4.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class OutOfPages(RuntimeError):
    """Too few pages for the sequences; the pool is unchanged."""


class _Known(NamedTuple):
    """Index entry of a full page.

    ``key`` is (serial of the preceding page, tokens of this page); ``serial`` is never reused.
    """

    key: tuple[int, tuple[int, ...]]
    serial: int


class Pages:
    """Sequences, named by integers, over ``num_pages`` pages of ``page_size`` positions.

    Attributes:
        tables: each sequence's pages. A list is replaced, never modified, so a copy of the dict is
            a snapshot.
        lengths: each sequence's number of positions.
        counts: reference count of each page.
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
        self._serials = itertools.count(1)  # 0 precedes the first page
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._known: dict[int, _Known] = {}
        # Known, in no table; least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Return the number of pages without a sequence."""
        return len(self._free) + len(self._idle)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page_size)

    def open(self, tokens: Sequence[int] = ()) -> int:
        """Open a sequence that shares the known pages of ``tokens``, and return its name.

        The last token is never included, because its logits are needed.
        """
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
        """Allocate pages for more positions of each sequence.

        Returns the copies (from, to) to make before the next write.

        Raises:
            OutOfPages: there are too few pages; no sequence grew.
        """
        needed = self._needed(new)
        if needed > self.available:
            raise OutOfPages(
                f"PagedCache: {needed} more pages of {self.page_size} positions are needed, and"
                f" {self.available} of {self.num_pages} are without a sequence; close sequences, or"
                f" make it with num_pages={self.num_pages + needed - self.available} or more"
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
                    self._forget(last)  # its contents will change
            while len(table) < self.pages_for(length + count):
                table.append(self._take())
            self.tables[name], self.lengths[name] = table, length + count
        return copies

    def _needed(self, new: Mapping[int, int]) -> int:
        """Return the number of pages that :meth:`grow` takes, for new positions and for copies.

        The last sequence that shares a page needs no copy.
        """
        needed, sharers = 0, Counter[int]()
        for name, count in new.items():
            if count:
                length = self.lengths[name]
                needed += self.pages_for(length + count) - len(self.tables[name])
                if length % self.page_size:
                    sharers[self.tables[name][-1]] += 1
        return needed + sum(min(n, self.counts[page] - 1) for page, n in sharers.items())

    def fork(self, name: int) -> int:
        """Open a sequence with the same positions and pages, and return its name."""
        other = next(self._names)
        self.tables[other], self.lengths[other] = self.tables[name], self.lengths[name]
        for page in self.tables[name]:
            self._hold(page)
        return other

    def crop(self, name: int, length: int) -> None:
        """Drop the positions from ``length`` on."""
        table, count = self.tables[name], self.pages_for(length)
        for page in reversed(table[count:]):
            self._release(page)
        if count < len(table):
            self.tables[name] = table[:count]
        self.lengths[name] = length

    def close(self, name: int) -> None:
        """End the sequence."""
        self.crop(name, 0)
        del self.tables[name], self.lengths[name]

    def restore(self, tables: Mapping[int, list[int]], lengths: Mapping[int, int]) -> None:
        """Return to a snapshot of :attr:`tables` and :attr:`lengths`, even after an exception.

        All other state follows from the tables and the known pages, because a page is forgotten
        before its contents change.
        """
        self.tables, self.lengths = dict(tables), dict(lengths)
        counts = [0] * self.num_pages
        for table in self.tables.values():
            for page in table:
                counts[page] += 1
        self.counts = counts
        self._pages = {known.key: page for page, known in self._known.items()}
        idle = dict.fromkeys(self._idle) | dict.fromkeys(self._known)  # in order of use
        self._idle = OrderedDict.fromkeys(
            page for page in idle if page in self._known and not counts[page]
        )
        free = dict.fromkeys(self._free) | dict.fromkeys(range(self.num_pages))
        self._free = [page for page in free if page not in self._known and not counts[page]]

    def know(self, name: int, tokens: Sequence[int]) -> None:
        """Index the sequence's full pages by its ``tokens``, from the first on."""
        serial, size = 0, self.page_size
        for i, page in enumerate(self.tables[name][: min(len(tokens), self.lengths[name]) // size]):
            key = (serial, tuple(tokens[i * size : (i + 1) * size]))
            if key not in self._pages:
                if page in self._known:  # the sequence was cropped and has other tokens now
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
        """Remove the page from the index; its successors are unreachable and evicted later."""
        known = self._known.pop(page, None)
        if known is not None:
            del self._pages[known.key]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)
