# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache: sequences allocate pages of a pool, share common prefixes and free pages.

:mod:`.pages` tracks the pages; attention reads the pools by ``page_table``
(:func:`pytransformer.attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.append_kv import KeyValues
from .cache import (
    DecoderCache,
    Reserved,
    Step,
    new_tokens,
    refuse_gradients,
    reordered,
    storage,
    write,
)
from .masks import is_lengths, is_tree, padding, tree
from .pages import OutOfPages, Pages

__all__ = ["OutOfPages", "PagedCache", "PagedLayer", "Pages"]


class PagedLayer:
    """One layer's pools of keys and values, and its cross-attention keys and values.

    The first :meth:`append` allocates the pools, (num_pages, Hkv, page_size, D).
    """

    def __init__(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> None:
        self.num_pages, self.page_size, self.dtype = num_pages, page_size, storage(dtype)
        self.stored: KeyValues | None = None
        self.cross: tuple[torch.Tensor, torch.Tensor] | None = None
        self.step: Step | None = None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.stored is None else self.stored[:2]

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        return {} if self.stored is None else self.stored.scales

    def positions(self, columns: int, device: torch.device) -> torch.Tensor:
        return self._next().places(columns, device)

    def _next(self) -> Step:
        if self.step is None or self.step.positions is None:
            raise ValueError(
                "PagedCache: call cache.step before its layers, as models do; it assigns the pages"
                " of the tokens"
            )
        return self.step

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, Hkv, new, D) and return the pools.

        Raises:
            ValueError: no step was made, the batch size or head shape changed, or a tensor requires
                a gradient.
        """
        refuse_gradients("PagedCache", key, value)
        step, self.step = self._next(), None
        assert step.positions is not None
        if self.stored is None:
            self.stored = KeyValues.empty(key, value, (self.num_pages, self.page_size), self.dtype)
        for pool, new, name in zip(self.stored[:2], (key, value), ("key", "value")):
            want = (step.positions.shape[0], pool.shape[1], step.positions.shape[1], pool.shape[3])
            if tuple(new.shape) != want:
                raise ValueError(
                    f"PagedCache: {name} must be {want} as before, got {tuple(new.shape)}; reset()"
                    " the cache"
                )
        write(
            self.stored._replace(page_table=step.visible["page_table"]), key, value, step.positions
        )
        return self.stored[:2]

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to) that the next write changes while other sequences read them."""
        if pages and self.stored is not None:
            source, to = torch.tensor(pages, device=self.stored.key.device).T
            for pool in self.stored.numbers:
                pool[to] = pool[source]


class PagedCache(DecoderCache):
    """The caches of all layers of a decoder in ``num_pages`` pages of ``page_size`` positions.

    ``model.make_paged_cache(num_pages)`` creates it; pass it as ``past_key_values``. Memory is
    allocated once: 2 num_pages Hkv page_size D elements per layer, in ``dtype`` as in
    :class:`KeyValueCache`. A sequence allocates pages as it grows. :meth:`reorder` lets beams share
    pages; a write to a shared page copies it first. By default the batch of a call is new
    sequences, until :meth:`free`. For continuous batching, :meth:`open`, :meth:`fork` and
    :meth:`close` manage named sequences, and :meth:`select` sets the rows of the next call.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int = 64, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype
        self.pages = Pages(num_pages, page_size)
        self.rows: list[int] = []
        self._layers = [PagedLayer(num_pages, page_size, dtype) for _ in range(num_layers)]
        self._device = torch.device("cpu")

    @property
    def layers(self) -> list[PagedLayer]:
        return self._layers

    @property
    def length(self) -> int:
        return max((self.pages.lengths[name] for name in self.rows), default=0)

    @property
    def lengths(self) -> torch.Tensor:
        return torch.tensor(
            [self.pages.lengths[name] for name in self.rows], dtype=torch.int64, device=self._device
        )

    @property
    def table(self) -> torch.Tensor:
        """Return the batch's page table, (B, pages) int32, 0 after a sequence's last page."""
        tables = [self.pages.tables[name] for name in self.rows]
        width = max((len(table) for table in tables), default=0)
        rows = [table + [0] * (width - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32, device=self._device).view(len(rows), width)

    def step(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Step:
        """Reserve pages for the next tokens; see :meth:`DecoderCache.step`.

        Raises:
            OutOfPages: the pool is too small; the message has the missing number, and the cache is
                unchanged.
        """
        with self.transaction():
            if not self.rows:
                self.rows = [self.pages.open() for _ in range(ids.shape[0])]
            self._device = ids.device
            return self._step(ids.shape[0], ids.shape[1], attention_mask)

    def _step(self, batch: int, columns: int, attention_mask: torch.Tensor | None) -> Step:
        if len(self.rows) != batch:
            raise ValueError(
                f"PagedCache: it holds {len(self.rows)} sequences, got {batch}; free() or select()"
                " them"
            )
        held, start = self.lengths.cpu(), self.length
        lengths = attention_mask if is_lengths(attention_mask, batch) else None
        visible: dict[str, Any] = {}
        at: torch.Tensor | None = None
        if lengths is None and attention_mask is not None:
            if bool((held != start).any()):
                raise ValueError(
                    "PagedCache: its sequences differ in length; expected attention_mask as lengths"
                    f" ({batch},), cached tokens included, or None, got shape"
                    f" {tuple(attention_mask.shape)}"
                )
            if is_tree(attention_mask):
                visible, at = tree(attention_mask, batch, columns, start + columns)
            else:
                visible = padding(attention_mask, batch, start + columns)
        new, total, positions = new_tokens(
            "PagedCache", held, columns, None if lengths is None else lengths.cpu()
        )
        copies = self.pages.grow(dict(zip(self.rows, new.tolist())))
        table = self.table
        # Extend to full pages; attention ignores keys beyond the lengths.
        if "attn_mask" in visible:
            behind = table.shape[1] * self.pages.page_size - start - columns
            visible["attn_mask"] = torch.nn.functional.pad(visible["attn_mask"], (0, behind))
        new, total, positions = (t.to(self._device) for t in (new, total, positions))
        visible |= {"causal": "bottom_right", "key_lengths": total, "page_table": table}
        if lengths is not None:
            visible["query_lengths"] = new
        step = Step(
            start, self.length, visible, None if lengths is None else new, total, positions, at
        )
        for layer in self.layers:
            layer.copy(copies)
            layer.step = step
        return step

    def open(self, tokens: Sequence[int] = ()) -> int:
        """Open a sequence and return its name.

        The leading ``tokens`` whose pages are known are already read; their number is
        ``cache.pages.lengths[name]``. This requires that keys and values depend on the preceding
        tokens only, so it excludes encoders and prefix_lengths.
        """
        return self.pages.open(tokens)

    def know(self, name: int, tokens: Sequence[int]) -> None:
        """Let sequences with the same prefix share the full pages, even after this one ends."""
        self.pages.know(name, tokens)

    def fork(self, name: int) -> int:
        """Open a sequence that shares all pages of this one, and return its name."""
        return self.pages.fork(name)

    def close(self, name: int) -> None:
        """End the sequence; its pages become free, or stay reusable by their tokens."""
        self.pages.close(name)
        self.rows = [row for row in self.rows if row != name]

    def select(self, names: Sequence[int]) -> None:
        """Set the rows of the next call, each a different sequence."""
        if len(set(names)) != len(names) or any(name not in self.pages.tables for name in names):
            raise ValueError(
                f"PagedCache.select: expected different open sequences, got {list(names)}"
            )
        if any(layer.cross is not None for layer in self.layers):
            raise ValueError(
                "PagedCache.select: the rows of cross-attention's keys follow reorder() alone; use"
                " that, or free() first"
            )
        self.rows = list(names)

    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        before, after, kept = self.rows, list[int](), set[int]()
        for row in rows.tolist():
            name = before[row]
            after.append(self.pages.fork(name) if name in kept else name)
            kept.add(name)
        self.rows = after
        for name in before:
            if name not in kept:
                self.pages.close(name)
        for layer in self.layers if cross else ():
            layer.cross = reordered(layer.cross, rows)

    def crop(self, length: int | torch.Tensor) -> None:
        held = [self.pages.lengths[name] for name in self.rows]
        if isinstance(length, torch.Tensor):
            kept = length.tolist()
            if len(kept) != len(held) or any(not 0 <= n <= m for n, m in zip(kept, held)):
                raise ValueError(f"PagedCache.crop: lengths must be from 0 to {held}, got {kept}")
        elif not 0 <= length <= self.length:
            raise ValueError(
                f"PagedCache.crop: length must be between 0 and {self.length}, got {length}"
            )
        else:
            kept = [min(length, n) for n in held]
        for name, n in zip(self.rows, kept):
            self.pages.crop(name, n)

    def reserve(self, tokens: int) -> Reserved:
        """Reserve pages for ``tokens`` more tokens; see :meth:`DecoderCache.reserve`.

        Unused pages are freed at the end. Until then the rows must not change; other sequences may
        open and close.

        Raises:
            OutOfPages: the pool is too small; the message has the missing number, and the cache is
                unchanged.
        """
        if not self.rows or any(layer.stored is None for layer in self.layers):
            raise ValueError("PagedCache: run a prompt first, which allocates its pools")
        lengths, longest, names = self.lengths, self.length, list(self.rows)
        with self.transaction():
            copies = self.pages.grow(dict.fromkeys(names, tokens))
            for layer in self.layers:
                layer.copy(copies)
            table = self.table
        layers = [
            (layer.stored._replace(page_table=table), layer.cross)
            for layer in self.layers
            if layer.stored is not None
        ]

        def done(lengths: list[int]) -> None:
            for name, length in zip(names, lengths):
                self.pages.crop(name, length)

        return Reserved(layers, lengths, longest + tokens, done)

    def free(self) -> None:
        for name in self.rows:
            self.pages.close(name)
        self.rows = []
        for layer in self.layers:
            layer.cross, layer.step = None, None

    def snapshot(self) -> Any:
        return (
            dict(self.pages.tables),
            dict(self.pages.lengths),
            self.rows,
            [layer.cross for layer in self.layers],
        )

    def restore(self, snapshot: Any) -> None:
        tables, lengths, self.rows, cross = snapshot
        self.pages.restore(tables, lengths)
        for layer, kept in zip(self.layers, cross):
            layer.cross, layer.step = kept, None

    def reset(self) -> None:
        """Drop all contents, pools and known pages."""
        sizes = self.pages.num_pages, self.pages.page_size
        self.pages, self.rows, self._layers = (
            Pages(*sizes),
            [],
            [PagedLayer(*sizes, self.dtype) for _ in self.layers],
        )
