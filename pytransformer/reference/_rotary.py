# SPDX-License-Identifier: Apache-2.0
"""Rotary positions with an optional RMS norm per head, and the cache write, in plain PyTorch.

The first ``turned`` of a row's D columns form pairs (x1, x2)::

    y   = x  or  x / sqrt(mean(x^2) + eps) * (weight + weight_offset)
    out = y cos + r(y) sin,  r(x1, x2) = (-x2, x1);   the other columns: y

A pair is (i, i + turned / 2), or (2i, 2i + 1) if interleaved. cos and sin have one entry per
column, so tables with different halves are accepted too. Arithmetic is float32 (float64 for
float64), and the result is rounded once.

Sources: Su et al., "RoFormer" (2021), section 3.4; Dehghani et al., "Scaling Vision Transformers to
22 Billion Parameters" (2023), section 2, for the norm of queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch

from .eight_bit import quantize_kv


def rotary_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Return (out, rstd) of the op rotary; rstd is (B, H, L), or empty without a weight."""
    return _turned(a.x, a.weight, a)


def append_kv_forward(a: Any) -> tuple[torch.Tensor, ...]:
    """Write the caches of the op append_kv and return (query, empty)."""
    query, key = _turned(a.query, a.q_norm, a)[0], _turned(a.key, a.k_norm, a)[0]
    write_rows(a, key)
    return query, query.new_zeros(0)


def write_rows(a: Any, key: torch.Tensor) -> None:
    """Write rotated keys (B, Hkv, L, D) and the op's values into its caches."""
    kept, (first, row) = cache_slots(a)
    for cache, scales, rows in (
        (a.key_cache, a.key_scale, key),
        (a.value_cache, a.value_scale, a.value),
    ):
        # Advanced indices on both sides of a slice move their dimension first: rows are (n, H, D).
        found = rows.transpose(1, 2)[kept]
        if scales is not None:
            found, scale = quantize_kv(found, cache.dtype)
            scales[first, :, row] = scale
            # some torch versions cannot write float8 by index
            cache, found = cache.view(torch.int8), found.view(torch.int8)
        cache[first, :, row] = found


def cache_slots(a: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return the write mask (B, L), and the first cache index and the row of each written position.

    Positions outside the cache are not written.
    """
    size = a.key_cache.shape[2]
    limit = size if a.page_table is None else a.page_table.shape[1] * size
    kept = (a.positions >= 0) & (a.positions < limit)
    position = a.positions.clamp(0, max(limit - 1, 0)).long()
    if a.page_table is None:
        first = torch.arange(len(position), device=position.device)[:, None].expand_as(position)
        return kept, (first[kept], position[kept])
    page = a.page_table.long().gather(1, position // size)
    kept = kept & (page >= 0) & (page < a.key_cache.shape[0])
    return kept, (page[kept], (position % size)[kept])


def _turned(
    x: torch.Tensor, weight: torch.Tensor | None, a: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    rstd = y.new_zeros(0)
    if weight is not None:
        rstd = torch.rsqrt(y.square().mean(-1) + a.eps)
        y = y * rstd[..., None] * (weight.to(y.dtype) + a.weight_offset)
    if a.cos is not None:
        cos, sin = (t.to(y.dtype)[:, None] for t in (a.cos, a.sin))
        turning = y[..., : a.cos.shape[-1]]
        turned = turning * cos + _quarter(turning, a.interleaved) * sin
        y = torch.cat((turned, y[..., a.cos.shape[-1] :]), -1)
    return y.to(x.dtype), rstd


def _quarter(y: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return every pair (y1, y2) rotated by 90 degrees: (-y2, y1)."""
    if interleaved:
        return torch.stack((-y[..., 1::2], y[..., 0::2]), -1).flatten(-2)
    first, second = y.chunk(2, -1)
    return torch.cat((-second, first), -1)
