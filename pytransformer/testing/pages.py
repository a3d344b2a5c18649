# SPDX-License-Identifier: Apache-2.0
"""Keys and values put into pages: shuffled, among free ones full of NaN, by a table whose unused entries name nothing.

pools = in_pages(key, value, lengths, page_size=16, seed=0)
pt.attention(query, *pools.tensors, page_table=pools.table, key_lengths=lengths)
pt.attention(query, *pools.contiguous, key_lengths=lengths)      # the same bits on backends whose schedule is the same
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..nn.paged_cache import PagedCache, Pages
from .guarded import place

FREE = 3  # pages that no sequence has
WILD = (-(2**31), -1, 2**30, 2**31 - 1)  # what unused entries hold
LAYOUTS = ("contiguous", "contiguous", "rows_first", "fused", "offset", "columns_first")
BY_KEY = ("attn_mask", "bias")  # keywords whose last dimension is the keys', or 1


@dataclass(frozen=True)
class Pools:
    """``tensors``: the pools of keys and of values, (num_pages, Hkv, page_size, D); ``table`` (B, pages); ``contiguous``: keys and values
    of whole pages, (B, Hkv, pages * page_size, D), zeros behind the lengths."""

    tensors: tuple[Tensor, Tensor]
    table: Tensor
    contiguous: tuple[Tensor, Tensor]

    @property
    def num_keys(self) -> int:
        return self.table.shape[1] * self.tensors[0].shape[2]


def in_pages(key: Tensor, value: Tensor, lengths: Tensor, page_size: int, seed: int = 0, *, hostile: bool = True) -> Pools:
    """(B, Hkv, Lk, D) of keys and (B, Hkv, Lk, Dv) of values in pages. Unless ``hostile``, rows that nobody has are zeros and unused
    entries 0, and the pools lie in one piece."""
    rng, device = random.Random(f"pages/{seed}"), key.device
    batch, num_keys = key.shape[0], key.shape[2]
    width, used = -(-num_keys // page_size), [-(-n // page_size) for n in lengths.tolist()]
    pages = rng.sample(range(sum(used) + FREE), sum(used))
    table = [[pages.pop() for _ in range(n)] + [rng.choice(WILD) if hostile else 0] * (width - n) for n in used]
    dtype, layout = (rng.choice((torch.int32, torch.int64)), rng.choice(LAYOUTS)) if hostile else (torch.int32, "contiguous")
    pools, whole = [], []
    for t in (key.detach(), value.detach()):
        pool = t.new_full((sum(used) + FREE, t.shape[1], page_size, t.shape[3]), torch.nan if hostile else 0.0)
        rows = t.new_zeros(batch, t.shape[1], width * page_size, t.shape[3])
        for b, n in enumerate(lengths.tolist()):
            rows[b, :, :n] = t[b, :, :n]
            for i in range(used[b]):
                count = min(n - i * page_size, page_size)
                pool[table[b][i], :, :count] = t[b, :, i * page_size : i * page_size + count]
        pools.append(place(pool, layout) if hostile else pool)
        whole.append(rows)
    named = torch.tensor(table, dtype=dtype, device=device).view(batch, width)
    return Pools((pools[0], pools[1]), named, (whole[0], whole[1]))


def widened(keywords: dict[str, Any], num_keys: int, width: int, batch: int, lengths: Tensor) -> dict[str, Any]:
    """The keywords of a call over ``num_keys`` keys for one over whole pages, ``width`` keys: what is said of keys goes on behind them."""
    found = {**keywords, "key_lengths": lengths}
    for name in BY_KEY:
        t = keywords.get(name)
        if isinstance(t, Tensor) and t.shape[-1] == num_keys and width > num_keys:
            more = torch.ones if t.dtype == torch.bool else torch.zeros
            found[name] = torch.cat([t, more(*t.shape[:-1], width - num_keys, dtype=t.dtype, device=t.device)], -1)
    if (t := keywords.get("key_segments")) is not None:
        found["key_segments"] = torch.cat([t, t.new_zeros(batch, width - num_keys)], 1)
    return found


def check_pages(pages: Pages) -> None:
    """Assert that each page is in tables, free, or known and idle, that it is counted right, and that the index is one to one."""
    counts = Counter(page for table in pages.tables.values() for page in table)
    assert pages.tables.keys() == pages.lengths.keys()
    assert all(len(table) == pages.pages_for(pages.lengths[name]) for name, table in pages.tables.items())
    assert pages.counts == [counts[page] for page in range(pages.num_pages)]
    free, idle = set(pages._free), set(pages._idle)
    assert len(free) == len(pages._free), "a page is free twice"
    assert free | idle == {page for page in range(pages.num_pages) if not counts[page]}
    assert not free & idle
    assert pages.available == pages.num_pages - len(counts)
    assert idle <= pages._known.keys()
    assert not free & pages._known.keys()
    assert {known.key: page for page, known in pages._known.items()} == pages._pages


def poison_free_rows(cache: PagedCache) -> None:
    """NaN wherever a cache stores nothing: pages that are free, and the rows behind the last token of a page."""
    pages = cache.pages
    held = torch.zeros(pages.num_pages, pages.page_size, dtype=torch.bool)
    for name, table in pages.tables.items():
        for i in range(pages.lengths[name]):
            held[table[i // pages.page_size], i % pages.page_size] = True
    held[list(pages._known)] = True
    for pool in (pool for layer in cache.layers if layer.stored is not None for pool in layer.stored.numbers):
        free = ~held.to(pool.device)[:, None, :]
        # Of eight bits 0x7f is float8's NaN and int8's largest; their scales are NaN in both.
        pool.masked_fill_(free[..., None] if pool.dim() == 4 else free, 127 if pool.dtype == torch.int8 else torch.nan)
