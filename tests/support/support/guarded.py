# SPDX-License-Identifier: Apache-2.0
"""Tensors between guard values that reveal a stray read or write, at any stride and offset.

NaN surrounds an input, so that a stray read shows in the result. A finite sentinel surrounds an
output, so that a stray write shows here; a NaN guard would not reveal a NaN being written.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLACK = 512  # elements on each side: more than a tile row of vectors
SENTINEL = -12352.0  # exact in every floating dtype


def outside(dtype: torch.dtype) -> float | int | bool:
    """Return an input's guard: NaN, or an integer that no length, index or segment has."""
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min // 2


def _slots(dims: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return memory orders of (..., heads, rows, columns): permutations from memory to logical."""
    order = tuple(range(dims))
    if dims < 3:
        return {"contiguous": (order, 1)}
    rows_first = (*order[:-3], order[-2], order[-3], order[-1])
    columns_first = (*order[:-2], order[-1], order[-2])
    return {
        "contiguous": (order, 1),
        "rows_first": (rows_first, 1),
        "fused": (rows_first, 3),
        "columns_first": (columns_first, 1),
    }


LAYOUTS = ("contiguous", "rows_first", "fused", "columns_first", "step", "offset")


def place(x: Tensor, layout: str = "contiguous", fill: float | int | bool | None = None) -> Tensor:
    """Return a copy of x as a view into a buffer of `fill` (NaN by default), with this layout.

    The layouts are:

    contiguous
    rows_first      (B, L, H, D) in memory
    fused           the middle third of a fused (B, L, H, 3 D) projection
    columns_first   the last dimension is strided
    step            every other row and column of a larger tensor
    offset          contiguous, one element off any alignment
    """
    fill = outside(x.dtype) if fill is None else fill
    permutation, thirds = _slots(x.dim()).get(layout, (tuple(range(x.dim())), 1))
    shape = [x.shape[i] for i in permutation]
    step = 2 if layout == "step" else 1
    memory = [n * (step if i >= len(shape) - 2 else 1) for i, n in enumerate(shape)]
    if memory:
        memory[-1] *= thirds
    count = 1
    for n in memory:
        count *= n
    start = SLACK + (layout == "offset")
    buffer = torch.full((count + 2 * SLACK + 1,), fill, dtype=x.dtype, device=x.device)
    inner = buffer[start : start + count].view(memory)
    if thirds > 1:
        inner = inner[..., shape[-1] : 2 * shape[-1]]
    if step > 1:
        for dim in range(max(0, x.dim() - 2), x.dim()):
            inner = inner[(slice(None),) * dim + (slice(None, None, 2),)]
    view = (
        inner.permute([permutation.index(i) for i in range(x.dim())]) if x.dim() else inner.view(())
    )
    view.copy_(x)
    return view.detach()


def random_layout(rng: random.Random, x: Tensor, plain: float = 0.4) -> str:
    """Return a random layout that x supports."""
    if rng.random() < plain:
        return "contiguous"
    return rng.choice(
        [name for name in LAYOUTS if name in _slots(x.dim()) or name in ("step", "offset")]
    )


@dataclass(frozen=True)
class Guard:
    """A buffer whose middle is an output; `intact` is True if the guards are unchanged."""

    buffer: Tensor
    count: int

    def intact(self) -> bool:
        around = torch.cat([self.buffer[:SLACK], self.buffer[SLACK + self.count :]])
        return bool((around == around.new_tensor(sentinel(around.dtype))).all())


def sentinel(dtype: torch.dtype) -> float | int | bool:
    """Return an output's guard value."""
    if dtype.is_floating_point:
        return SENTINEL if dtype.itemsize > 1 else -80.0  # representable in float8
    return True if dtype == torch.bool else -77 if dtype.is_signed else 77


def guarded_output(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    fill: float | int | bool | None = None,
) -> tuple[Tensor, Guard]:
    """Return a tensor with this size and dense strides, filled with `fill`, and its Guard.

    `fill` is NaN by default. The tensor owns the guarded storage and is not a view, so autograd
    treats it as any new output.
    """
    count = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride))
    buffer = torch.full((count + 2 * SLACK,), sentinel(dtype), dtype=dtype, device=device)
    buffer[SLACK : SLACK + count] = outside(dtype) if fill is None else fill
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(buffer.untyped_storage(), SLACK, tuple(size), tuple(stride))
    return tensor, Guard(buffer, count)
