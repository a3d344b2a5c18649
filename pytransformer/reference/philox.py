# SPDX-License-Identifier: Apache-2.0
"""Dropout masks from Philox-4x32-7, equal on every backend, tile size and device.

The counter consists of absolute indices. One call of the generator gives four 32-bit words, or
eight 16-bit draws, for the eight elements of one *group*. Slot r is the low (r even) or high half
of word r // 2. An element is dropped if its draw is less than ``t = rint(65536 p)`` and otherwise
scaled by ``65536 / (65536 - t)``.

    key j -> group 4 (j // 32) + (j % 8) // 2, slot 2 ((j % 32) // 8) + j % 2
      j =  0 -> group 0, slot 0        j =  8 -> group 0, slot 2
      j =  1 -> group 0, slot 1        j = 33 -> group 4, slot 1

A group is the eight elements of a row that one thread of a matrix-multiply accumulator holds in 32
columns.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), section 3.3. The layout
is this project's.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
ROUNDS = 7
TAG_ADD_NORM, TAG_FEED_FORWARD = 0x80000001, 0x80000002


def _multiply(a: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of a * constant for int64 a < 2^32, without overflow."""
    upper, lower = a * (constant >> 16), a * (constant & 0xFFFF)
    middle = ((upper & 0xFFFF) << 16) + lower
    return ((upper >> 16) + (middle >> 32)) & _MASK, middle & _MASK


def philox(counter: tuple[torch.Tensor, ...], seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return four int64 tensors of 32-bit words from four counter words and an int64 seed."""
    c0, c1, c2, c3 = (c & _MASK for c in counter)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """Return t = rint(65536 p), half to even; draws below it are dropped."""
    return round(65536 * p)


def keep_scale(p: float) -> float:
    """Return the factor of an element that dropout keeps, or 0 if it drops everything."""
    t = threshold(p)
    return 65536 / (65536 - t) if t < 65536 else 0.0


def _draws(columns: torch.Tensor, seed: torch.Tensor, *words: torch.Tensor) -> torch.Tensor:
    """Return the 16-bit draws of absolute columns (n,), broadcast with the other counter words."""
    group = 4 * (columns // 32) + (columns % 8) // 2
    slot = 2 * ((columns % 32) // 8) + columns % 2
    shape = torch.broadcast_shapes(group.shape, *(w.shape for w in words))
    generated = philox(tuple(torch.broadcast_to(w, shape) for w in (group, *words)), seed)
    word = torch.stack(generated).gather(0, torch.broadcast_to(slot // 2, shape)[None])[0]
    return (word >> (16 * (slot % 2))) & 0xFFFF


def _keep(
    p: float,
    device: torch.device,
    shape: tuple[int, ...],
    columns: torch.Tensor,
    seed: torch.Tensor,
    *words: torch.Tensor,
) -> torch.Tensor:
    t = threshold(p)
    if t in (0, 65536):
        return torch.full(shape, t == 0, dtype=torch.bool, device=device)
    return torch.broadcast_to(_draws(columns, seed, *words) >= t, shape)


def keep_mask(
    seed: torch.Tensor,
    p: float,
    batch: int,
    heads: int,
    num_queries: int,
    num_keys: int,
    query_start: int = 0,
    key_start: int = 0,
    head_start: int = 0,
    batch_start: int = 0,
) -> torch.Tensor:
    """Return the keep mask of attention weights, bool (batch, heads, num_queries, num_keys).

    Counter words: key group, query, query head, batch, all by absolute index.
    """
    device = seed.device

    def index(n: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + n, dtype=torch.int64, device=device)

    return _keep(
        p, device, (batch, heads, num_queries, num_keys), index(num_keys, key_start), seed,
        index(num_queries, query_start)[:, None], index(heads, head_start)[:, None, None],
        index(batch, batch_start)[:, None, None, None],
    )  # fmt: skip


def column_keep_mask(
    seed: torch.Tensor,
    p: float,
    num_rows: int,
    num_columns: int,
    tag: int,
    row_start: int = 0,
    column_start: int = 0,
) -> torch.Tensor:
    """Return the keep mask (num_rows, num_columns) of add_norm or feed_forward, by ``tag``.

    Counter words: column group, low and high half of the row, tag; rows and columns by absolute
    index.
    """
    device = seed.device
    columns = torch.arange(
        column_start, column_start + num_columns, dtype=torch.int64, device=device
    )
    rows = torch.arange(row_start, row_start + num_rows, dtype=torch.int64, device=device)[:, None]
    word = torch.tensor(tag, dtype=torch.int64, device=device)
    return _keep(p, device, (num_rows, num_columns), columns, seed, rows & _MASK, rows >> 32, word)
