# SPDX-License-Identifier: Apache-2.0
"""Tensor layouts and the position check that the backends of rotary and append_kv share."""

from __future__ import annotations

from typing import Any

import torch

from .._core.tensors import last_contiguous


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def plain(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a table or weight as a contiguous tensor of this dtype, copied if needed."""
    return None if t is None else t.to(dtype).contiguous()


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return x with a contiguous last dimension; other strides are arbitrary."""
    return last_contiguous(x)


def check_positions(a: Any) -> None:
    """Raise ValueError for a position beyond the cache or a page outside the pool."""
    size, pages = a.key_cache.shape[2], a.page_table
    limit = size if pages is None else pages.shape[1] * size
    if not a.positions.numel():
        return
    highest = int(a.positions.max())
    if highest >= limit:
        room = (
            f"{limit} keys a sequence"
            if pages is None
            else f"{pages.shape[1]} pages of {size} keys a sequence"
        )
        raise ValueError(
            f"append_kv: positions holds {highest}, and the cache has room for {room}; make it"
            " longer, or write none by -1"
        )
    if pages is None or not pages.numel():
        return
    asked = pages.long().gather(1, a.positions.clamp(min=0) // size)[a.positions >= 0]
    outside = asked[(asked < 0) | (asked >= a.key_cache.shape[0])]
    if outside.numel():
        raise ValueError(
            f"append_kv: page_table names page {int(outside[0])} for a position that is written,"
            f" and the pool has {a.key_cache.shape[0]}"
        )
