# SPDX-License-Identifier: Apache-2.0
"""What the backends of rotary and append_kv share: tensors as kernels take them, and the check of where keys go."""

from __future__ import annotations

from typing import Any

import torch

from .._core.tensors import last_contiguous


def work_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def plain(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A table or a weight, contiguous and in this dtype: a copy if it was not."""
    return None if t is None else t.to(dtype).contiguous()


def rows(x: torch.Tensor) -> torch.Tensor:
    """x with a last dimension that kernels can walk: strides of the others may be any."""
    return last_contiguous(x)


def check_positions(a: Any) -> None:
    """ValueError where a key would have no place: a position beyond the cache, or a page that is not there."""
    size, pages = a.key_cache.shape[2], a.page_table
    limit = size if pages is None else pages.shape[1] * size
    if not a.positions.numel():
        return
    highest = int(a.positions.max())
    if highest >= limit:
        room = f"{limit} keys a sequence" if pages is None else f"{pages.shape[1]} pages of {size} keys a sequence"
        raise ValueError(
            f"append_kv: positions holds {highest}, and the cache has room for {room}; make it longer, or write none by -1"
        )
    if pages is None or not pages.numel():
        return
    asked = pages.long().gather(1, a.positions.clamp(min=0) // size)[a.positions >= 0]
    outside = asked[(asked < 0) | (asked >= a.key_cache.shape[0])]
    if outside.numel():
        raise ValueError(
            f"append_kv: page_table names page {int(outside[0])} for a position that is written, and the pool has {a.key_cache.shape[0]}"
        )
