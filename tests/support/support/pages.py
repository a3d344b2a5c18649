# SPDX-License-Identifier: Apache-2.0
"""Paged KV: shuffled pages between free pages of NaN, with wild values in unused table entries.

pools = in_pages(key, value, lengths, page_size=16, seed=0)
pt.attention(query, *pools.tensors, page_table=pools.table, key_lengths=lengths)
pt.attention(query, *pools.contiguous, key_lengths=lengths)  # same bits for the same schedule
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytransformer.nn.paged_cache import PagedCache, Pages

from .guarded import place

FREE = 3  # pages of no sequence
WILD = (-(2**31), -1, 2**30, 2**31 - 1)  # contents of unused entries
LAYOUTS = ("contiguous", "contiguous", "rows_first", "fused", "offset", "columns_first")
BY_KEY = ("attn_mask", "bias")  # keywords whose last dimension is the keys', or 1


@dataclass(frozen=True)
class Pools:
    """KV pools and their contiguous equivalent.

    ``tensors`` are the pools of keys and values, (num_pages, Hkv, page_size, D), and ``table`` is
    (B, pages). ``contiguous`` are keys and values of full pages, (B, Hkv, pages * page_size, D),
    with zeros past the lengths.
    """

    tensors: tuple[Tensor, Tensor]
    table: Tensor
    contiguous: tuple[Tensor, Tensor]

    @property
    def num_keys(self) -> int:
        return self.table.shape[1] * self.tensors[0].shape[2]


def in_pages(
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    page_size: int,
    seed: int = 0,
    *,
    hostile: bool = True,
) -> Pools:
    """Put keys (B, Hkv, Lk, D) and values (B, Hkv, Lk, Dv) into pages.

    Without ``hostile``, unused rows and entries are 0 and the pools are contiguous.
    """
    rng, device = random.Random(f"pages/{seed}"), key.device
    batch, num_keys = key.shape[0], key.shape[2]
    width, used = -(-num_keys // page_size), [-(-n // page_size) for n in lengths.tolist()]
    pages = rng.sample(range(sum(used) + FREE), sum(used))
    table = [
        [pages.pop() for _ in range(n)] + [rng.choice(WILD) if hostile else 0] * (width - n)
        for n in used
    ]
    dtype, layout = (
        (rng.choice((torch.int32, torch.int64)), rng.choice(LAYOUTS))
        if hostile
        else (torch.int32, "contiguous")
    )
    pools, whole = [], []
    for t in (key.detach(), value.detach()):
        pool = t.new_full(
            (sum(used) + FREE, t.shape[1], page_size, t.shape[3]), torch.nan if hostile else 0.0
        )
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


def widened(
    keywords: dict[str, Any], num_keys: int, width: int, batch: int, lengths: Tensor
) -> dict[str, Any]:
    """Extend the keywords of a call over ``num_keys`` keys to full pages, ``width`` keys."""
    found = {**keywords, "key_lengths": lengths}
    for name in BY_KEY:
        t = keywords.get(name)
        if isinstance(t, Tensor) and t.shape[-1] == num_keys and width > num_keys:
            more = torch.ones if t.dtype == torch.bool else torch.zeros
            found[name] = torch.cat(
                [t, more(*t.shape[:-1], width - num_keys, dtype=t.dtype, device=t.device)], -1
            )
    if (t := keywords.get("key_segments")) is not None:
        found["key_segments"] = torch.cat([t, t.new_zeros(batch, width - num_keys)], 1)
    return found


def check_pages(pages: Pages) -> None:
    """Assert that each page is in tables, free, or cached and idle; check counts and index."""
    counts = Counter(page for table in pages.tables.values() for page in table)
    assert pages.tables.keys() == pages.lengths.keys()
    assert all(
        len(table) == pages.pages_for(pages.lengths[name]) for name, table in pages.tables.items()
    )
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
    """Fill a cache's unused memory with NaN: free pages, and rows past a page's last token."""
    pages = cache.pages
    held = torch.zeros(pages.num_pages, pages.page_size, dtype=torch.bool)
    for name, table in pages.tables.items():
        for i in range(pages.lengths[name]):
            held[table[i // pages.page_size], i % pages.page_size] = True
    held[list(pages._known)] = True
    for pool in (
        pool for layer in cache.layers if layer.stored is not None for pool in layer.stored.numbers
    ):
        free = ~held.to(pool.device)[:, None, :]
        # In eight bits, 0x7f is float8's NaN and int8's max; the scales are NaN for both.
        pool.masked_fill_(
            free[..., None] if pool.dim() == 4 else free,
            127 if pool.dtype == torch.int8 else torch.nan,
        )
