# SPDX-License-Identifier: Apache-2.0
"""Peers of `rotary` and `append_kv`: plain PyTorch code as in transformers' models."""

from __future__ import annotations

from typing import Any

import torch

from pytransformer.cli.providers import NAIVE, Prepared, Problem, Provider, Row, compiled
from pytransformer.ops.rotary_positions import RotaryPositions

Tables = tuple[torch.Tensor, torch.Tensor]


def _quarter(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _turn(x: torch.Tensor, tables: Tables, interleaved: bool) -> torch.Tensor:
    cos, sin = (t.unsqueeze(1) for t in tables)
    first = x[..., : cos.shape[-1]]
    turned = first * cos + _quarter(first, interleaved) * sin
    return (
        torch.cat((turned, x[..., cos.shape[-1] :]), -1) if cos.shape[-1] < x.shape[-1] else turned
    )


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _tables(positions: torch.Tensor, turning: RotaryPositions, dtype: torch.dtype) -> Tables:
    """Return cos and sin rounded to the model's dtype, from our angles.

    The float32 angle product in model code exceeds the bound at position 1,000.
    """
    cos, sin = turning.tables(positions, dtype=dtype)
    return (cos[None], sin[None]) if cos.dim() == 2 else (cos, sin)


def _naive_rotary(problem: Problem) -> Prepared:
    n: dict[str, Any] = problem.named
    x = n["x"]
    turning = RotaryPositions(
        n.get("dims") or x.shape[-1],
        scaling=n.get("scaling"),
        interleaved=n.get("interleaved", False),
    )

    def forward() -> tuple[torch.Tensor, ...]:
        tables = _tables(n["positions"], turning, x.dtype)
        return (_turn(_norm(x, n.get("weight"), n.get("eps", 1e-6)), tables, turning.interleaved),)

    return Prepared("norm, x * cos + rotate(x) * sin, in the inputs' dtype", forward)


def _naive_append(problem: Problem) -> Prepared:
    n: dict[str, Any] = problem.named
    query, key, cache, turning = n["query"], n["key"], n["cache"], n["rotary"]
    eps, size = n.get("eps", 1e-6), n["cache"].key.shape[2]

    def forward() -> tuple[torch.Tensor, ...]:
        tables = _tables(n["positions"], turning, query.dtype)
        turned = [
            _turn(_norm(x, n.get(w), eps), tables, turning.interleaved)
            for x, w in ((query, "q_norm"), (key, "k_norm"))
        ]
        batch, row = (n["positions"] >= 0).nonzero(as_tuple=True)
        place = n["positions"][batch, row]
        first = batch if cache.page_table is None else cache.page_table[batch, place // size].long()
        for kept, rows in ((cache.key, turned[1]), (cache.value, n["value"])):
            kept[first, :, place % size] = rows[batch, :, row]
        return (turned[0],)

    return Prepared("norm, x * cos + rotate(x) * sin, index_put_ of keys and values", forward)


def _prepare(problem: Problem) -> Prepared:
    return _naive_rotary(problem) if problem.case.op == "rotary" else _naive_append(problem)


PROVIDERS = {
    "rotary": (Provider(NAIVE, _prepare), compiled(_prepare)),
    "append_kv": (Provider(NAIVE, _prepare),),
}
_ROWS = {"B": 2, "Hq": 16, "Lq": 1024, "D": 128}
_STEP = {"B": 8, "Hq": 32, "Hkv": 8, "Lq": 1, "D": 128}
QUICK = (
    Row("rotary", {"B": 1, "Hq": 8, "Lq": 512, "D": 64}),
    Row("append_kv", _STEP, modes=("fwd",)),
)
SUITES = {
    "aims": (
        Row("rotary", _ROWS),
        Row("rotary_norm", _ROWS),
        Row("append_kv", _STEP, modes=("fwd",)),
    )
}
