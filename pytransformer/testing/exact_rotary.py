# SPDX-License-Identifier: Apache-2.0
"""Exact results of rotary and append_kv in float64, with their error bounds.

The bound, with r(y) = (-y2, y1) for a pair, g = dy (weight + offset), xhat = x rstd:

    out      |y cos| + |r(y) sin|
    dy       |d_out cos| + |r(d_out sin)|       dx without a norm
    dx       rstd (|g| + |xhat| mean(|g xhat|)) with |g| from the magnitudes of dy
    weight   sum over rows of |dy| |xhat|, with the magnitudes of dy

Frequencies come from RotaryPositions; tests compare these float32 numbers with transformers'.
Angles are computed here in float64. A cache must not change outside the written slots, so S is 0
there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Problem

LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.bfloat16: {"zero_mean": (1.0, 1.0), "any": (1.0, 1.0)},
    torch.float16: {"zero_mean": (1.0, 1.0), "any": (1.0, 1.0)},
    torch.float32: {"zero_mean": (4.0, 4.0), "any": (4.0, 6.0)},
}
FILL = 7.0  # initial contents of caches


def turning(p: Problem) -> Any:
    """Return the problem's RotaryPositions."""
    import pytransformer as pt

    first = p.tensors["x" if p.op == "rotary" else "query"]
    scaling = p.keywords.get("scaling")
    return pt.RotaryPositions(
        p.keywords.get("dims") or first.shape[-1], p.keywords.get("base", 10000.0),
        pt.RotaryScaling(*scaling) if isinstance(scaling, tuple) else scaling,
        p.keywords.get("interleaved", False),
    )  # fmt: skip


def _angles(p: Problem) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin for each column, float64, (B or 1, L, rotary_dim)."""
    t = p.tensors
    if "cos" in t:
        return t["cos"].double(), t["sin"].double()
    if p.op == "append_kv" and "base" not in p.keywords:
        return None
    work = torch.float64 if p.dtype == torch.float64 else torch.float32
    frequencies = t["frequencies"] if "frequencies" in t else turning(p).frequencies(dtype=work)
    angle = t["positions"].double()[..., None] * frequencies.double()
    angle = angle if angle.dim() == 3 else angle[None]
    column = torch.arange(2 * angle.shape[-1])
    pair = column // 2 if p.keywords.get("interleaved") else column % angle.shape[-1]
    return angle.cos()[..., pair], angle.sin()[..., pair]


def _partner(p: Problem, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each number's partner and its sign in r(y)."""
    column, half = torch.arange(y.shape[-1]), y.shape[-1] // 2
    if p.keywords.get("interleaved"):
        return y[..., column ^ 1], torch.where(column % 2 == 0, -1.0, 1.0).double()
    return (
        y[..., (column + half) % max(y.shape[-1], 1)],
        torch.where(column < half, -1.0, 1.0).double(),
    )


def _turned(p: Problem, y: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """Return y rotated, and each result's magnitude."""
    angles = _angles(p)
    if angles is None:
        return y, y.abs()
    cos, sin = (t[:, None] for t in angles)
    turned = y[..., : cos.shape[-1]]
    other, sign = _partner(p, turned * sin) if back else _partner(p, turned)
    other = -sign * other if back else sign * other * sin
    value = torch.cat((turned * cos + other, y[..., cos.shape[-1] :]), -1)
    return value, torch.cat(((turned * cos).abs() + other.abs(), y[..., cos.shape[-1] :].abs()), -1)


def _normed(p: Problem, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, rstd, and the weight with its offset."""
    if weight is None:
        return x, torch.ones(()), torch.ones(())
    rstd = (x.square().mean(-1, keepdim=True) + p.keywords.get("eps", 1e-6)).rsqrt()
    scale = weight + p.keywords.get("weight_offset", 0.0)
    return x * rstd * scale, rstd, scale


def solve(p: Problem) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S."""
    t = {n: v.double() if v.is_floating_point() else v for n, v in p.tensors.items()}
    results: dict[str, oracle.Result] = {}

    def put(name: str, value: Tensor, size: Tensor, gradient: bool, dtype: torch.dtype) -> None:
        floor = torch.where(
            size > 0, 2.0**-24 if dtype == torch.float16 else 0.0, 0.0
        )  # fp16's min subnormal is a rounding step in itself
        results[name] = oracle.Result(value, size, floor.double(), gradient, dtype)

    if p.op == "append_kv":
        put("out", *_turned(p, _normed(p, t["query"], t.get("q_norm"))[0]), False, p.dtype)
        key, key_size = _turned(p, _normed(p, t["key"], t.get("k_norm"))[0])
        put("key_cache", *_kept(p, t["key_cache"], key, key_size), False, p.dtype)
        put(
            "value_cache",
            *_kept(p, t["value_cache"], t["value"], torch.zeros_like(t["value"])),
            False,
            p.dtype,
        )
        return results
    y, rstd, scale = _normed(p, t["x"], t.get("weight"))
    put("out", *_turned(p, y), False, p.dtype)
    dy, size = _turned(p, t.get("grad_out", torch.zeros_like(y)), back=True)
    if "weight" not in t:
        put("x", dy, size, True, p.dtype)
        return results
    xhat, g, g_size = t["x"] * rstd, dy * scale, size * scale.abs()
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    put(
        "x",
        dx,
        rstd * (g_size + xhat.abs() * (g_size * xhat.abs()).mean(-1, keepdim=True)),
        True,
        p.dtype,
    )
    put(
        "weight",
        (dy * xhat).sum((0, 1, 2)),
        (size * xhat.abs()).sum((0, 1, 2)),
        True,
        p.tensors["weight"].dtype,
    )
    return results


def _kept(p: Problem, before: Tensor, rows: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cache with the rows written one at a time, and their magnitudes there."""
    after, sizes = torch.full_like(before, FILL), torch.zeros_like(before)
    page, table = before.shape[2], p.tensors.get("page_table")
    for b, own in enumerate(p.tensors["positions"].tolist()):
        for i, position in enumerate(own):
            if position >= 0:
                first = b if table is None else int(table[b, position // page])
                after[first, :, position % page], sizes[first, :, position % page] = (
                    rows[b, :, i],
                    size[b, :, i],
                )
    return after, sizes
