# SPDX-License-Identifier: Apache-2.0
"""Random problems of rotary and append_kv against float64, for `fuzz`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds
from pytransformer.testing.case import Problem as Problem
from pytransformer.testing.exact_rotary import FILL, turning
from pytransformer.testing.exact_rotary import LIMITS as LIMITS
from pytransformer.testing.exact_rotary import solve as solve
from pytransformer.testing.oracle import exact

from .fuzz_layer_norm import _values
from .guarded import place, random_layout
from .judge import data_of
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("rotary", "append_kv")


def draw(seed: int, case: int) -> Problem:
    """Return the problem of this seed and number."""
    rng = random.Random(f"rotary {seed} {case}")
    torch.manual_seed(rng.getrandbits(40))
    op, dtype = rng.choice(("rotary", "rotary", "append_kv")), rng.choice(DTYPES)
    batch, length = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2, 5, 17, 40))
    heads, dim = (
        rng.choice((1, 2, 3, 8)),
        rng.choice((2, 4, 6, 10, 16, 30, 32, 34, 48, 64, 66, 80, 128, 130, 256)),
    )
    if rng.random() < 0.04:
        batch = 0
    data = rng.choice(("zero_mean", "zero_mean", "positive", "offset", "heavy", "tiny"))
    features, keywords = {op, data}, dict[str, Any]()
    other = rng.choice(DTYPES[:3]) if dtype != torch.float64 and rng.random() < 0.5 else dtype
    tensors = _rows(rng, op, data, dtype, (batch, heads, length, dim))
    _positions(rng, op, tensors, keywords, features, (batch, length, dim))
    names = ("weight",) if op == "rotary" else ("q_norm", "k_norm")
    for name in names:
        if rng.random() < 0.6:
            tensors[name] = torch.randn(dim, dtype=torch.float64).add(1).to(other)
            features |= {"weight"} | ({"mixed"} if other != dtype else set())
    if rng.random() < 0.4:
        keywords["eps"] = rng.choice((1e-5, 1e-3, 1e-12))
    if rng.random() < 0.3:
        keywords["weight_offset"] = 1.0
        features.add("weight_offset")
    wanted: list[str] = [n for n in ("x", "weight") if n in tensors and rng.random() < 0.85]
    if wanted:
        tensors["grad_out"] = torch.randn(tensors["x"].shape, dtype=torch.float64).to(dtype)
        features.add("grad_out")
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    # Their last dimension must be contiguous, or the op refuses the call.
    for name in ("key_cache", "value_cache"):
        if name in tensors and layouts[name] not in ("offset", "rows_first"):
            layouts[name] = "contiguous"
    if any(layouts.get(n, "contiguous") != "contiguous" for n in ("x", "query", "key")):
        features.add("strided")
    return Problem(op, dtype, data, tensors, layouts, keywords, wanted, features)


def _rows(
    rng: random.Random, op: str, data: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    if op == "rotary":
        return {"x": _values(rng, data, shape, dtype)}
    batch, _, length, dim = shape
    kv = (batch, rng.choice((1, 2)), length)
    return {
        "query": _values(rng, data, shape, dtype), "key": _values(rng, data, (*kv, dim), dtype),
        "value": _values(rng, data, (*kv, rng.choice((dim, 5, 24))), dtype),
    }  # fmt: skip


def _positions(
    rng: random.Random,
    op: str,
    tensors: dict[str, Tensor],
    keywords: dict[str, Any],
    features: set[str],
    sizes: tuple[int, ...],
) -> None:
    """Draw positions, angles and, for append_kv, the caches."""
    batch, length, dim = sizes
    high = rng.choice((50, 5000, 200_000))
    if op == "append_kv":
        room = length + rng.choice((0, 3, 20))
        places = [torch.randperm(room)[:length] for _ in range(batch)]
        positions = torch.stack(places) if places else torch.empty(0, length, dtype=torch.int64)
        if rng.random() < 0.5:
            positions[torch.rand(positions.shape) < 0.3] = -1
            features.add("padding")
        tensors["positions"] = positions
        _caches(rng, tensors, features, batch, room)
    else:
        shape = (length,) if rng.random() < 0.3 else (batch, length)
        tensors["positions"] = torch.randint(-3, high, shape)
    turned = dim if rng.random() < 0.6 else 2 * rng.randint(1, dim // 2)
    if turned < dim:
        features.add("partial")
    if rng.random() < 0.4:
        keywords["interleaved"] = True
        features.add("interleaved")
    kind = rng.choice(
        ("base", "tables", "frequencies") if op == "rotary" else ("base", "tables", "none")
    )
    features.add(kind)
    if kind == "tables":  # not cos and sin of an angle, and the halves differ
        size = (rng.choice((1, batch)), length, turned)
        table = (
            rng.choice((torch.float32, torch.bfloat16))
            if tensors[next(iter(tensors))].dtype != torch.float64
            else torch.float64
        )
        tensors |= {"cos": torch.randn(size).to(table), "sin": torch.randn(size).to(table)}
        if op == "rotary":
            del tensors["positions"]
    elif kind == "frequencies":
        tensors["frequencies"] = torch.rand(turned // 2)
    elif kind == "base":
        keywords |= {"base": rng.choice((10000.0, 500000.0, 37.0)), "dims": turned}
        if rng.random() < 0.3:
            keywords["scaling"] = ("llama3", 8.0, 64)
            features.add("scaling")


def _caches(
    rng: random.Random, tensors: dict[str, Tensor], features: set[str], batch: int, room: int
) -> None:
    heads, dim, value_dim = (
        tensors["key"].shape[1],
        tensors["key"].shape[3],
        tensors["value"].shape[3],
    )
    first, rows = batch, room
    if rng.random() < 0.5:
        rows = rng.choice((1, 3, 8))
        pages = -(-room // rows)
        first = batch * pages + 2
        table = torch.randperm(first)[: batch * pages].view(batch, pages)
        tensors["page_table"] = table.to(rng.choice((torch.int32, torch.int64)))
        features.add("pages")
    for name, columns in (("key_cache", dim), ("value_cache", value_dim)):
        tensors[name] = torch.full((first, heads, rows, columns), FILL, dtype=tensors["key"].dtype)


# ---- one problem on one backend


def call(p: Problem, leaves: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Return the results of the public function, by name."""
    import pytransformer as pt

    keywords: dict[str, Any] = {"backend": backend, "strict": True}
    if {"weight", "q_norm", "k_norm"} & leaves.keys():  # without a norm they have no effect
        keywords |= {n: v for n, v in p.keywords.items() if n in ("eps", "weight_offset")}
    t = turning(p)
    if "cos" in leaves:
        keywords["dims"] = leaves["cos"].shape[-1]
    if p.op == "rotary":
        given: dict[str, Any] = {
            n: leaves.get(n) for n in ("positions", "cos", "sin", "frequencies", "weight")
        }
        if "dims" in p.keywords:
            keywords |= {"base": t.base, "dims": t.dims, "scaling": t.scaling}
        return {"out": pt.rotary(leaves["x"], **given, interleaved=t.interleaved, **keywords)}
    cache = pt.KeyValues(leaves["key_cache"], leaves["value_cache"], leaves.get("page_table"))
    angles: Any = (
        t if "base" in p.keywords else (leaves["cos"], leaves["sin"]) if "cos" in leaves else None
    )
    if angles is not None:
        keywords["interleaved"] = t.interleaved
    out = pt.append_kv(
        leaves["query"], leaves["key"], leaves["value"], cache, leaves["positions"], rotary=angles,
        q_norm=leaves.get("q_norm"), k_norm=leaves.get("k_norm"), **keywords,
    )  # fmt: skip
    return {"out": out, "key_cache": cache.key, "value_cache": cache.value}


def run(
    p: Problem, backend: str, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor | None], list[tuple[str, str]]]:
    """Return (results by name on the CPU, raw ops run), with guarded and poisoned memory."""
    from pytransformer.ops._core.registry import trace

    laid = {n: place(t.to(device), p.layouts[n]) for n, t in p.tensors.items()}
    leaves = {
        n: t.requires_grad_(n in p.wanted) if t.is_floating_point() else t
        for n, t in laid.items()
        if n != "grad_out"
    }
    with poisoned(), trace() as record:
        results: dict[str, Tensor | None] = dict(call(p, leaves, backend))
        if p.wanted:
            out = results["out"]
            assert out is not None
            results |= dict(
                zip(
                    p.wanted,
                    torch.autograd.grad(out, [leaves[n] for n in p.wanted], laid["grad_out"]),
                )
            )
    return {n: None if r is None else r.cpu() for n, r in results.items()}, list(record)


def judge(
    p: Problem, backend: str, repeat: bool, device: str | torch.device = "cpu"
) -> tuple[list[bounds.Check], list[str]]:
    """Check one backend on the problem; `repeat` runs it twice and compares bits."""
    return judge_run(
        lambda: run(p, backend, device),
        lambda results: exact(solve(p)),
        backend,
        repeat,
        dtype=p.dtype,
        data=data_of(p),
        limits=LIMITS,
    )


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem and check every backend on it; `repeat` compares bits of two runs."""
    p = draw(seed, case)
    return p, {backend: judge(p, backend, repeat) for backend in backends}
