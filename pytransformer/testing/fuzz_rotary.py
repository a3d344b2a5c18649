# SPDX-License-Identifier: Apache-2.0
"""Random problems of rotary and append_kv against float64, for `fuzz`.

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

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .fuzz_layer_norm import _values
from .guarded import place, random_layout
from .judge import data_of, exact
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("rotary", "append_kv")
LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.bfloat16: {"zero_mean": (1.0, 1.0), "any": (1.0, 1.0)},
    torch.float16: {"zero_mean": (1.0, 1.0), "any": (1.0, 1.0)},
    torch.float32: {"zero_mean": (4.0, 4.0), "any": (4.0, 6.0)},
}
FILL = 7.0  # initial contents of caches


@dataclass
class Problem:
    """One call, its upstream gradient, and its features."""

    op: str
    dtype: torch.dtype
    data: str
    tensors: dict[str, Tensor]  # the arguments; key_cache, value_cache, page_table; grad_out
    layouts: dict[str, str]
    keywords: dict[str, Any]
    wanted: list[str]
    features: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{n} {str(t.dtype)[6:]} {tuple(t.shape)} {self.layouts[n]}"
            for n, t in self.tensors.items()
        )
        return f"{self.op}, {self.data} data, {self.keywords}, gradients of {self.wanted}: {shapes}"


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


# ---- the exact solution


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
