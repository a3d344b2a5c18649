# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv: named cases and exact results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import exact_rotary, oracle
from ..case import Builder, Case, Draw, Problem, Work, made
from ..kit import Kit

LLAMA = ("llama3", 8.0, 32)  # matches the cases' short lengths


def _rotary(
    norm: bool = False, part: int = 1, scaling: tuple[Any, ...] | None = None, **fixed: Any
) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        import pytransformer as pt

        start = d.integers(0, 1000, d["B"], 1)
        values: dict[str, Any] = {
            "x": d.normal(d["B"], d["Hq"], d["Lq"], d["D"]),
            "positions": start + torch.arange(d["Lq"], device=d.device),
        }
        if norm:
            values["weight"] = 1 + d.normal(d["D"], scale=0.1)
        if part > 1:
            values["dims"] = d["D"] // part
        if scaling:
            values["scaling"] = pt.RotaryScaling(*scaling)
        return {**values, **fixed}

    return build


def _append(page_size: int | None = None, norm: bool = False) -> Builder:
    """Return a builder that appends the second half of each sequence; its last key is padding."""

    def build(d: Draw) -> dict[str, Any]:
        import pytransformer as pt

        batch, heads, length, dim = d["B"], d["Hkv"], d["Lq"], d["D"]
        query, key, value = (d.normal(batch, h, length, dim) for h in (d["Hq"], heads, heads))
        positions = (length + torch.arange(length)).repeat(batch, 1)
        positions[:, -1] = -1
        first, rows, table = batch, 2 * length, None
        if page_size is not None:
            first, rows = batch * -(-2 * length // page_size), page_size
            table = (
                torch.randperm(first, generator=d.generator)
                .view(batch, -1)
                .to(d.device, torch.int32)
            )
        keys, values = (
            torch.full((first, heads, rows, dim), exact_rotary.FILL, dtype=d.dtype, device=d.device)
            for _ in range(2)
        )
        norms = {n: 1 + d.normal(dim, scale=0.1) for n in ("q_norm", "k_norm")} if norm else {}
        cache = pt.KeyValues(keys, values, table)
        return {
            "query": query, "key": key, "value": value, "cache": cache,
            "positions": positions.to(d.device),
            "rotary": pt.RotaryPositions(dim), **norms,
        }  # fmt: skip

    return build


APPEND = "append_kv"
CASES: dict[str, tuple[str, Builder, str]] = {
    "rotary": ("rotary", _rotary(), "core self_check"),
    "rotary_interleaved": ("rotary", _rotary(interleaved=True), ""),
    "rotary_partial": ("rotary", _rotary(part=2), ""),
    "rotary_llama3": ("rotary", _rotary(scaling=LLAMA), ""),
    "rotary_norm": ("rotary", _rotary(norm=True), "core self_check"),
    APPEND: (APPEND, _append(), "core self_check forward_only"),
    "append_kv_norm_pages": (APPEND, _append(16, norm=True), "forward_only"),
}


def _cases(size: Mapping[str, int]) -> Iterator[Case]:
    for name, (op, build, tags) in CASES.items():
        yield made(
            name, op, "B Hq Hkv Lq D", size, build, tags, _appended if op == APPEND else _turned
        )


def _turned(s: Mapping[str, int]) -> Work:
    """Return 3 operations per element, 4 with the norm's backward, without a matrix product."""
    elements = s["B"] * s["Hq"] * s["Lq"] * s["D"]
    return Work((3.0 * elements, 4.0 * elements), (2 * elements, 3 * elements))


def _appended(s: Mapping[str, int]) -> Work:
    query, kv = (s["B"] * s[h] * s["Lq"] * s["D"] for h in ("Hq", "Hkv"))
    return Work((3.0 * (query + kv), 0.0), (2 * query + 4 * kv, 0))


def _solve(op: str, named: Mapping[str, Any], grads: list[Tensor] | None) -> oracle.Solution:
    tensors = {n: t for n, t in named.items() if isinstance(t, Tensor)}
    keywords = {
        n: named[n]
        for n in ("eps", "weight_offset", "dims", "base", "interleaved", "scaling")
        if n in named
    }
    if op == APPEND:
        turning = named["rotary"]
        keywords |= {"base": turning.base, "dims": turning.dims, "interleaved": turning.interleaved}
        cache = named["cache"]
        tensors |= {"key_cache": cache.key, "value_cache": cache.value}
        if cache.page_table is not None:
            tensors["page_table"] = cache.page_table
    elif grads:
        tensors["grad_out"] = grads[0]
    first = tensors["x" if op == "rotary" else "query"]
    drawn = Problem(op, first.dtype, "zero_mean", tensors, {}, keywords, [])
    return oracle.exact(exact_rotary.solve(drawn))


KIT = Kit(cases=_cases, solve=_solve, limits=exact_rotary.LIMITS)
