# SPDX-License-Identifier: Apache-2.0
"""One tile of attention, and the merge and gradients of a row's tiles.

A row's softmax over all keys combines its tiles, each with a separate normalizer. With lse of the
tile and of the row,

    out = sum over tiles of exp(lse_tile - lse) out_tile,    lse = log of the sum of exp(lse_tile)

and in backward every weight is ``exp(score - lse)`` with lse of the row, so a tile's gradients are
independent of other tiles.

For large scores float32 loses the log of the sum in lse: a row whose visible scores are all
finfo.min has lse finfo.min for any number of keys. Such rows are recomputed with ``-lse_tile``
added to their scores, which changes no weight, and lse is stored as that shift plus a small rest
(:class:`Lse`).

Source: merging by lse follows Liu et al., "Ring Attention with Blockwise Transformers" (2023),
after Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..ops._problem.blocks import BLOCK_TENSORS, visible_block_pairs
from ..ops.attention import attention_op

# Up to this |lse|, float32 holds the log of a sum to 2^-14. Beyond it CPU kernels recompute the
# statistics over the keys of their call.
TRUSTED = 1024.0
# A score this large absorbs any addend, even in float64.
SWALLOWS = 2.0**100
# Backends whose backward uses the given lse. The reference differentiates its forward instead.
BY_LSE = ("cpu", "triton", "cuda")

Grads = tuple[torch.Tensor | None, ...]  # of out and lse


class Lse(NamedTuple):
    """lse as ``shift + rest``, (B, Hq, Lq) each.

    shift is 0 (None: in all rows) unless lse is beyond TRUSTED.
    """

    shift: torch.Tensor | None
    rest: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.rest if self.shift is None else self.rest + self.shift

    def rows(self, start: int, stop: int) -> Lse:
        return Lse(
            None if self.shift is None else self.shift[:, :, start:stop],
            self.rest[:, :, start:stop],
        )


def shifted(a: Any, shift: torch.Tensor) -> Any:
    """Return the tile with ``-shift`` added to each row's scores.

    The shift uses a free dense term (bias or mask), otherwise it is added to the mask.
    """
    minus = -shift[..., None]
    # No free term, but block masks exclude dense ones.
    if a.bias is not None and a.block_offsets is not None:
        a = _with_dense_mask(a)
    if a.bias is None:
        return a._replace(bias=minus)
    if a.mask is None:
        return a._replace(mask=minus)
    if a.mask.dtype == torch.bool:
        return a._replace(mask=torch.where(a.mask, minus, -math.inf))
    limit = torch.finfo(minus.dtype).max
    moved = (a.mask.double().clamp(-limit, limit).to(minus.dtype) + minus).clamp(-limit, limit)
    return a._replace(mask=torch.where(a.mask == -math.inf, -math.inf, moved))


def _with_dense_mask(a: Any) -> Any:
    """Return the tile with its block mask as a bool mask, for rare rows with lse beyond TRUSTED."""
    rows = torch.arange(a.query.shape[2], device=a.query.device)
    pairs = visible_block_pairs(
        a.block_offsets, a.block_entries, a.block_bits, rows, a.key.shape[2]
    )
    return a._replace(mask=pairs, **dict.fromkeys(BLOCK_TENSORS))


def _alternatives(a: Any, shift: torch.Tensor | None) -> list[tuple[Any, torch.Tensor | None]]:
    """Return the shifted problems, each with the rows for which it is correct (None: all).

    The shift joins the dense terms, and ALiBi and T5 biases are added after it. A row of finfo.min
    absorbs these biases, so the shifted problem must omit them there.
    """
    if shift is None:
        return [(a, None)]
    swallowing = shift.abs() > SWALLOWS
    two_dense = a.bias is not None and a.mask is not None and a.mask.is_floating_point()
    if not (a.slopes is not None or a.table is not None or two_dense) or not swallowing.any():
        return [(shifted(a, shift), None)]
    swallowed = a._replace(slopes=None if a.slopes is None else torch.zeros_like(a.slopes))
    swallowed = swallowed._replace(table=None if a.table is None else torch.zeros_like(a.table))
    if two_dense:
        swallowed = swallowed._replace(bias=torch.where(a.bias.abs() > SWALLOWS, a.bias, 0.0))
    return [(shifted(a, shift), ~swallowing), (shifted(swallowed, shift), swallowing)]


def tile_forward(a: Any, backend: str | None, strict: bool) -> tuple[torch.Tensor, Lse]:
    """Return (out, lse) of the tile."""
    out, lse = attention_op(a, backend, strict)
    # Synchronize a GPU only if lse may lose the sum by its kernels' rule: dense added terms.
    if not (a.query.device.type == "cpu" or a.added):
        return out, Lse(None, lse)
    large = (lse.abs() > TRUSTED) & lse.isfinite()
    if not large.any():
        return out, Lse(None, lse)
    shift = torch.where(large, lse, 0.0)
    rest = lse
    for problem, rows in _alternatives(a, shift):
        found, of_found = attention_op(problem, backend, strict)
        out = found if rows is None else torch.where(rows[..., None], found, out)
        rest = of_found if rows is None else torch.where(rows, of_found, rest)
    return out, Lse(shift, rest)


class Merged:
    """The merged tiles of some rows, in float32 (float64 for float64), in the caller's order."""

    def __init__(self, query: torch.Tensor, value_dim: int) -> None:
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.out = query.new_zeros((*query.shape[:3], value_dim), dtype=work)
        self.lse = Lse(None, query.new_full(query.shape[:3], -math.inf, dtype=work))

    def add(self, out: torch.Tensor, lse: Lse, start: int, stop: int) -> None:
        """Merge a tile into the rows from start to stop."""
        old = self.lse.rows(start, stop)
        shift = _common_shift(old, lse)
        a, b = (_under(x, shift) for x in (old, lse))
        rest = torch.logaddexp(a, b)
        rows = self.out[:, :, start:stop]
        rows.copy_(_share(a, rest) * rows + _share(b, rest) * out)
        self.lse.rest[:, :, start:stop] = rest
        if shift is not None:
            if self.lse.shift is None:
                self.lse = Lse(torch.zeros_like(self.lse.rest), self.lse.rest)
            assert self.lse.shift is not None
            self.lse.shift[:, :, start:stop] = shift


def _common_shift(a: Lse, b: Lse) -> torch.Tensor | None:
    """Return the shift of the larger lse; a row without visible keys is ignored."""
    if a.shift is None and b.shift is None:
        return None
    shifts = [torch.zeros_like(x.rest) if x.shift is None else x.shift for x in (a, b)]
    return torch.where(b.total > a.total, shifts[1], shifts[0])


def _under(lse: Lse, shift: torch.Tensor | None) -> torch.Tensor:
    """Return the rest of lse under another shift."""
    if shift is None:
        return lse.rest
    own = 0.0 if lse.shift is None else lse.shift
    return lse.rest + (own - shift)


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return exp(part - whole) of two rests under one shift, (…, 1); 0 if nothing is visible."""
    return torch.where(part == -math.inf, 0.0, torch.exp(part - whole))[..., None]


def lse_shares(part: Lse, whole: Lse) -> torch.Tensor:
    """Return exp(part - whole)."""
    return _share(_under(part, whole.shift), whole.rest)[..., 0]


def tile_backward(
    a: Any,
    out: torch.Tensor,
    lse: Lse,
    grads: Grads,
    wanted: Sequence[bool],
    backend: str | None,
    strict: bool,
) -> list[torch.Tensor | None]:
    """Return the tile's share of the gradients of the differentiable arguments.

    ``out``, ``lse`` and ``grads`` belong to the full row.
    """
    given = a[: len(wanted)]
    wanted = [want and t is not None for t, want in zip(given, wanted)]
    if attention_op.select(a, backend, strict).name not in BY_LSE:
        grads, out, lse = _of_the_tile_alone(a, out, lse, grads, backend, strict)
    total: list[torch.Tensor | None] = [None] * len(wanted)
    for problem, rows in _alternatives(a, lse.shift):
        of_rows, saved = grads, lse.rest
        if rows is not None:
            of_rows = tuple(None if g is None else _only(rows, g) for g in grads)
            saved = torch.where(rows, saved, -math.inf)
        results = attention_op.backward(
            *of_rows, *problem, out, saved.contiguous(), wanted, backend, strict
        )
        for place, (r, t, want) in enumerate(zip(results, given, wanted)):
            if want:  # only a shifted mask has a gradient larger than the argument
                assert r is not None and t is not None
                r, before = r.sum_to_size(t.shape), total[place]
                total[place] = r if before is None else before + r
    return total


def _only(rows: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.where(rows if t.dim() == rows.dim() else rows[..., None], t, 0.0)


def _of_the_tile_alone(
    a: Any,
    out: torch.Tensor,
    lse: Lse,
    grads: Grads,
    backend: str | None,
    strict: bool,
) -> tuple[Grads, torch.Tensor, Lse]:
    """Return the inputs of a backward that differentiates the tile's softmax.

    With the tile's share w = exp(lse_tile - lse) of the row,

    d_out_tile = w d_out,    d_lse_tile = w (d_out · (out_tile - out) + d_lse)
    """
    d_out, d_lse = grads
    tile_out, tile_lse = tile_forward(a, backend, strict)
    share = lse_shares(tile_lse, lse)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    inner = (d_out.to(share.dtype) * (tile_out.to(share.dtype) - out.to(share.dtype))).sum(-1)
    d_lse = inner if d_lse is None else inner + d_lse
    live = tile_lse.total > -math.inf
    d_lse = torch.where(live, share * d_lse, 0.0)
    return (
        ((share[..., None] * d_out).to(a.query.dtype), d_lse),
        tile_out,
        Lse(None, tile_lse.total),
    )
