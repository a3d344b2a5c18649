# SPDX-License-Identifier: Apache-2.0
"""Paged and contiguous keys and values give the same bits on "cuda"; a GPU runs these too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._backends.gpu import attention as gpu_attention
from support.pages import Pools, in_pages

RAW_OP = "attention_fwd"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LK = 100  # one tile and a tail in 16 bits, three and a tail in float32
LENGTHS = (LK, 0, 33)


class Problem(NamedTuple):
    name: str
    check: Callable[[], bool]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(
    lq: int,
    page_size: int,
    dtype: torch.dtype,
    lengths: tuple[int, ...] = LENGTHS,
    device: str = "cpu",
) -> tuple[Tensor, Pools, Tensor]:
    """Return queries, pools in random page order, and lengths.

    Rows that no call may read contain NaN.
    """
    batch, lk, n = len(lengths), max(lengths), torch.tensor(lengths, device=device)
    query, key, value = (
        draw(batch, 4, lq, 16),
        draw(batch, 2, lk, 16, seed=1),
        draw(batch, 2, lk, 24, seed=2),
    )
    query, key, value = (t.to(device, dtype) for t in (query, key, value))
    return query, in_pages(key, value, n, page_size, seed=page_size), n


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return pt.attention(
        query,
        key,
        value,
        key_lengths=lengths,
        **options,
        return_lse=True,
        backend="cuda",
        strict=True,
    )


def same(query: Tensor, pools: Pools, lengths: Tensor, **options: Any) -> bool:
    found = attend(query, *pools.tensors, lengths, page_table=pools.table, **options)
    return all(map(torch.equal, found, attend(query, *pools.contiguous, lengths, **options)))


def same_packed(
    queries: tuple[int, ...],
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    **options: Any,
) -> bool:
    """Compare packed queries over pages with packed queries over contiguous keys."""
    _, pools, lengths = inputs(1, page_size, dtype, device=device)
    offsets = torch.tensor([0, *queries], device=device).cumsum(0)
    query = draw(sum(queries) + 1, 4, 16, seed=5).to(device, dtype)
    given = {**options, "return_lse": True, "backend": "cuda", "strict": True}
    paged = {"page_table": pools.table, "key_lengths": lengths, **given}
    found = pt.attention_varlen(query, *pools.tensors, offsets, None, max(queries), None, **paged)
    key, value = (
        torch.cat([rows[:, :n] for rows, n in zip(t, LENGTHS)], 1).transpose(0, 1)
        for t in pools.contiguous
    )
    cu_k = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    longest = max(queries), pools.num_keys
    want = pt.attention_varlen(query, key, value, offsets, cu_k, *longest, **given)
    return all(map(torch.equal, found, want))


def clamped(query: Tensor, pools: Pools, lengths: Tensor) -> bool:
    """Return the table with entries clamped to the pool, as on a GPU without checks."""
    last = pools.tensors[0].shape[0] - 1
    table, nearest = pools.table.to(torch.int64, copy=True), pools.table.to(torch.int64, copy=True)
    table[0, 3], table[0, 4], table[2, 0] = -5, 2**40, last + 1
    nearest[0, 3], nearest[0, 4], nearest[2, 0] = 0, last, last
    filled = [t.nan_to_num(0.5) for t in pools.tensors]
    with mock.patch.object(gpu_attention, "looks_at_values", lambda device: False):
        found = attend(query, *filled, lengths, page_table=table)
    return all(map(torch.equal, found, attend(query, *filled, lengths, page_table=nearest)))


def problems(device: str = "cpu") -> Iterator[Problem]:
    yield Problem(
        "pages of 16, tiles of queries", lambda: same(*inputs(40, 16, BF16, device=device))
    )
    yield Problem(
        "pages of 7, tiles of queries",
        lambda: same(*inputs(40, 7, F32, device=device), causal="bottom_right"),
    )
    yield Problem(
        "pages of 16, split",
        lambda: same(*inputs(1, 16, BF16, (400, 3, 260), device), causal="bottom_right"),
    )
    yield Problem(
        "packed chunks over pages of 7",
        lambda: same_packed((40, 5, 1), 7, BF16, device, causal="bottom_right"),
    )
    yield Problem(
        "packed steps over pages of 16, split", lambda: same_packed((1, 3, 0), 16, F16, device)
    )
    yield Problem("entries outside the pool", lambda: clamped(*inputs(40, 16, F16, device=device)))


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        return [] if problem.check() else ["other bits than keys in one piece give"]
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
