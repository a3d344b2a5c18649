# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of rotary and append_kv.

bench/conftest.py runs the cases, overhead.py the tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pytransformer as pt


def test_speed(timed) -> None:
    timed()


def overhead(made: Callable[..., Any]) -> dict[str, Any]:
    """Return one token of two sequences beside PyTorch's functions, by name.

    PyTorch runs the formula of transformers' models, and index_copy_ or, with pages, index_put_
    into the cache.
    """
    turning, positions = pt.RotaryPositions(16), torch.tensor([[9], [14]])
    x, weight, tables = torch.randn(2, 2, 1, 16), torch.randn(16), turning.tables(positions)
    angles = turning.frequencies()

    def computed() -> tuple[Tensor, Tensor]:
        angle = torch.cat((positions[..., None] * angles,) * 2, -1)
        return angle.cos(), angle.sin()

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return _turned(torch.nn.functional.rms_norm(x, (16,), weight, 1e-6), *tables)

    return {
        "rotary, tables": made(
            [x], lambda x: pt.rotary(x, cos=tables[0], sin=tables[1]), lambda x: _turned(x, *tables)
        ),
        "rotary, positions": made(
            [x], lambda x: pt.rotary(x, positions), lambda x: _turned(x, *computed())
        ),
        "rotary, norm": made(
            [x, weight], lambda x, w: pt.rotary(x, cos=tables[0], sin=tables[1], weight=w), normed
        ),
        "append_kv": _append(made, None, None),
        "append_kv, rotary": _append(made, None, tables),
        "append_kv, pages": _append(made, 4, None),
        "append_kv, pages, rotary": _append(made, 4, tables),
    }


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _append(
    made: Callable[..., Any], page_size: int | None, tables: tuple[Tensor, Tensor] | None
) -> Any:
    """Compare two sequences of equal length, as index_copy_ requires; pages are in any order."""
    positions, place = torch.tensor([[9], [9]]), torch.tensor([9])
    q, k, v = torch.randn(3, 2, 2, 1, 16).unbind()
    pools = (
        torch.zeros(4, 2, 2, 16, 16) if page_size is None else torch.zeros(4, 8, 2, page_size, 16)
    )
    table = None if page_size is None else torch.tensor([[3, 1, 6, 0], [2, 7, 4, 5]])

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if tables is None else (_turned(q, *tables), _turned(k, *tables))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = turned(q, k)
        for cache, new in zip(pools[2:], (k, v)):
            if table is None:
                cache.index_copy_(2, place, new)
            else:
                page = table.gather(1, positions // page_size)
                cache[page[:, 0], :, positions[:, 0] % page_size] = new[:, :, 0]
        return q

    cache = pt.KeyValues(pools[0], pools[1], table)
    return made(
        [q, k, v],
        lambda q, k, v: pt.append_kv(q, k, v, cache, positions, rotary=tables),
        theirs,
        forward_only=True,
    )
