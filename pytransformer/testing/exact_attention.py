# SPDX-License-Identifier: Apache-2.0
"""The exact result of a named attention call: padded, packed, or some rows of a large one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..ops._core.registry import OPS
from ..ops.block_mask import BlockMask
from ..reference._attention import visible_parts
from ..reference.eight_bit import LEAST_SCALE, LIMITS, dequantize_kv
from . import oracle

# Max pairs of query and key over all heads in a partial comparison; they take about a second.
PAIRS = 1 << 21
# A row is an independent problem only if scores depend on nothing except these arguments.
ROWWISE = {
    "query", "key", "value", "causal", "window", "global_keys", "scale", "softcap", "key_lengths",
    "query_lengths",
}  # fmt: skip


def rows_of(shape: Mapping[str, int], named: Mapping[str, Any], seed: int) -> torch.Tensor | None:
    """Return the query rows to compare if float64 cannot solve the full problem; None for all.

    Each of several equal segments contributes one random row, in every head. The upstream gradient
    is zero elsewhere, so the gradients of keys and values are exact for these rows, and those of
    other queries are zero.
    """
    others = set(named) - ROWWISE
    if others and not (others == {"attn_mask"} and isinstance(named["attn_mask"], BlockMask)):
        return None
    stretch = -(-shape["B"] * shape["Hq"] * shape["Lq"] * shape["Lk"] // PAIRS)
    if stretch == 1:
        return None
    starts = torch.arange(0, shape["Lq"], stretch)
    drawn = starts + torch.randint(
        stretch, starts.shape, generator=torch.Generator().manual_seed(seed)
    )
    return drawn.clamp(max=shape["Lq"] - 1)


def some_rows(
    named: Mapping[str, Any], grads: list[torch.Tensor] | None, rows: torch.Tensor
) -> oracle.Solution:
    """Return the solution of those query rows."""
    query, key, value = (named[name] for name in ("query", "key", "value"))
    parts = visible_parts(OPS["attention"].prepare(**named)[0], rows)
    mask = functools.reduce(
        torch.Tensor.logical_and, parts, torch.ones(1, 1, len(rows), key.shape[2], dtype=torch.bool)
    )
    terms: dict[str, Any] = {name: named[name] for name in ("scale", "softcap") if name in named}
    return oracle.solve(
        query[..., rows, :],
        key,
        value,
        *(g[..., rows, :] for g in grads or []),
        attn_mask=mask,
        **terms,
    )


def eight_bit_floor(
    answer: oracle.Solution, dtype: torch.dtype, keys: int, dropout_p: float
) -> oracle.Solution:
    """Return the solution with the extra underflow of eight-bit values in its floor.

    Kernels multiply a weight by the scale of its value. A product below the min normal float32 may
    become zero, although the row's values reach 448 (127) times the scale.
    """
    out = answer.results["out"]
    lost = LIMITS[dtype] * LEAST_SCALE * keys / max(1 - dropout_p, 2.0**-16)
    return dataclasses.replace(
        answer,
        results={
            **answer.results,
            "out": dataclasses.replace(out, floor=out.floor + lost * (out.S > 0)),
        },
    )


def _gathered(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with its pages gathered and eight-bit values dequantized."""
    named = dict(named)
    for n in ("key", "value"):
        if (scale := named.pop(f"{n}_scale", None)) is not None:
            named[n] = dequantize_kv(named[n], scale.expand(named[n].shape[:3]), torch.float64)
    if (table := named.pop("page_table", None)) is not None:
        for n in ("key", "value"):
            named[n] = named[n][table.long()].transpose(1, 2).flatten(2, 3)
    return named


def padded(named: Mapping[str, Any], grads: list[torch.Tensor] | None) -> oracle.Solution:
    """Solve `attention`; gather pages and dequantize eight-bit values."""
    eight = named["key"].dtype if named.get("key_scale") is not None else None
    named = _gathered(named)
    answer = oracle.solve(**{**named, **dict(zip(("grad_out", "grad_lse"), grads or []))})
    return (
        answer
        if eight is None
        else eight_bit_floor(answer, eight, named["key"].shape[2], named.get("dropout_p", 0.0))
    )


def packed(named: Mapping[str, Any], grads: list[torch.Tensor] | None) -> oracle.Solution:
    """Solve packed sequences as padded ones with lengths, and pack the results.

    Keys in pages are padded already.
    """
    named = _gathered(named)
    qkv = [named.pop(name) for name in ("query", "key", "value")]
    cu_q, cu_k = named.pop("cu_seqlens_q"), named.pop("cu_seqlens_k")
    longest_q, longest_k = named.pop("max_seqlen_q"), named.pop("max_seqlen_k")
    spans = [
        (cu[:-1].tolist(), cu.diff().tolist(), longest)
        for cu, longest in ((cu_q, longest_q), (cu_k, longest_k))
        if cu is not None
    ]

    def pad(rows: torch.Tensor, side: int) -> torch.Tensor:
        starts, lengths, longest = spans[side]
        padded = rows.new_zeros(len(starts), rows.shape[1], longest, *rows.shape[2:])
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            padded[b, :, :length] = rows[start : start + length].detach().transpose(0, 1)
        return padded

    def pack(padded: torch.Tensor, side: int) -> torch.Tensor:
        lengths = spans[side][1]
        return torch.cat(
            [padded[b, :, :length].transpose(0, 1) for b, length in enumerate(lengths)]
        )

    # Packed lse is (heads, rows); the other tensors have rows first.
    upstream = [pad(g if g.dim() == 3 else g.t(), 0) for g in grads or []]
    sides = {"out": 0, "lse": 0, "query": 0, "key": 1, "value": 1}
    keys = qkv[1:]
    if cu_k is not None:
        keys, named["key_lengths"] = [pad(t, 1) for t in keys], cu_k.diff()
    solution = oracle.solve(pad(qkv[0], 0), *keys, *upstream, query_lengths=cu_q.diff(), **named)
    results = dict(solution.results)
    for name, side in sides.items():
        if (r := results.get(name)) is not None:
            value, S, floor = (pack(t, side) for t in (r.value, r.S, r.floor))
            if name == "lse":
                value, S, floor = value.t(), S.t(), floor.t()
            results[name] = dataclasses.replace(r, value=value, S=S, floor=floor)
    return dataclasses.replace(solution, results=results)
