# SPDX-License-Identifier: Apache-2.0
"""Checks append_kv into eight-bit caches.

Written rows must equal quantize_kv of the rows in query's dtype bit for bit, and other rows must
not change.

assert wrong("cuda", torch.int8, torch.bfloat16, dims=(64, 24), page=4) == []
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import pytransformer as pt

FILL, LENGTH, ROOM = 5, 5, 12


def drawn(
    dtype: torch.dtype, dims: tuple[int, int], heads: tuple[int, int] = (3, 2)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of two sequences, strided like projections.

    In the first sequence, some value rows with scale 1 have rounding ties and subnormals of each
    dtype. Both have rows of zeros and non-finite rows.
    """
    generator = torch.Generator().manual_seed(dims[0])
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    query, key, value = (
        torch.randn(2, LENGTH, h, d, generator=generator).transpose(1, 2) for h, d in shapes
    )
    for row, numbers in enumerate(
        ((448.0, 17.0, -19.0, 2.0**-10, 3 * 2.0**-10), (127.0, 0.5, -1.5, 2.5, -126.5))
    ):
        value[0, 0, row] = torch.tensor(numbers).repeat(-(-dims[1] // 5))[: dims[1]]
    key[0, 1, 3], value[1, 0, 4] = 0.0, -0.0
    key[1, 1, 0, 2], value[1, 1, 1, 3], value[0, 1, 4, 0] = torch.nan, torch.inf, -torch.inf
    return query.to(dtype), key.to(dtype), value.to(dtype)


def wrong(
    backend: str,
    eight: torch.dtype,
    dtype: torch.dtype,
    dims: tuple[int, int] = (64, 24),
    page: int | None = None,
    turned: int = 0,
    device: str = "cpu",
) -> list[str]:
    """Return the differences for keys and values with ``dims`` columns, ``turned`` of them rotated.

    The cache has pages of `page` keys, or is contiguous.
    """
    rows, generator = drawn(dtype, dims), torch.Generator().manual_seed(page or 0)
    positions = torch.stack([torch.randperm(ROOM, generator=generator)[:LENGTH] for _ in range(2)])
    positions[1, 2] = -1
    first, size, table = 2, ROOM, None
    if page:
        first, size = 2 * ROOM // page + 1, page
        table = torch.randperm(first, generator=generator)[: 2 * ROOM // page].view(2, -1).int()
    table = table if table is None else table.to(device)
    rooms = [(first, 2, size, d) for d in dims]
    wide = [torch.full(room, FILL, dtype=dtype, device=device) for room in rooms]
    plain = pt.KeyValues(wide[0], wide[1], table)
    numbers = [
        torch.full(room, FILL, dtype=torch.int8, device=device).view(eight) for room in rooms
    ]
    scales = [torch.full(room[:3], float(FILL), device=device) for room in rooms]
    cache = pt.KeyValues(numbers[0], numbers[1], table, scales[0], scales[1])
    options: dict[str, Any] = {
        "rotary": pt.RotaryPositions(turned) if turned else None,
        "k_norm": torch.linspace(0.5, 2, dims[0], device=device),
    }
    query, key, value = (t.to(device) for t in rows)
    places = positions.to(device)
    outs = [
        pt.append_kv(query, key, value, c, places, **options, backend=backend, strict=True)
        for c in (plain, cache)
    ]
    found = [] if torch.equal(*outs) else ["the query differs from that of a plain cache"]

    there = torch.zeros(first, size, dtype=torch.bool)  # rows that are written
    for b, i in (positions >= 0).nonzero().tolist():
        position = int(positions[b, i])
        there[
            (b, position)
            if table is None or page is None
            else (int(table[b, position // page]), position % page)
        ] = True
    for name in ("key", "value"):
        wanted, scale = pt.quantize_kv(getattr(plain, name).cpu(), eight)
        mine, my_scale = getattr(cache, name).cpu(), getattr(cache, f"{name}_scale").cpu()
        wanted = wanted.view(torch.uint8).masked_fill(~there[:, None, :, None], FILL)
        if not torch.equal(mine.view(torch.uint8), wanted):
            found.append(f"numbers of {name} differ")
        if not torch.equal(
            my_scale.nan_to_num(-1), scale.masked_fill(~there[:, None], float(FILL)).nan_to_num(-1)
        ):
            found.append(f"scales of {name} differ")
    return found
