# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the rotary kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from named import Named
from torch import Tensor

from pytransformer.testing.case import Problem
from pytransformer.testing.exact_rotary import FILL
from support import fuzz_rotary

RAW_OP = "rotary_fwd"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def _rows(name: str, dtype: torch.dtype, shape: tuple[int, ...], turned: int, **more: Any) -> Named:
    """Return rotary of x by tables whose halves differ, with every gradient."""
    keywords = {n: more[n] for n in ("interleaved", "eps", "weight_offset") if n in more}
    batch, _, length, dim = shape
    tensors = {"x": _normal(*shape, dtype=dtype)}
    if "weight" in more:
        tensors["weight"] = 1 + _normal(dim, dtype=more["weight"])
    expected = list(tensors)
    for table in ("cos", "sin"):
        tensors[table] = _normal(
            more.get("tables", batch), length, turned, dtype=more.get("table", F32)
        )
    tensors["grad_out"] = _normal(*shape, dtype=dtype)
    layouts = dict.fromkeys(tensors, "contiguous") | more.get("layouts", {})
    return Named(name, Problem("rotary", dtype, "zero_mean", tensors, layouts, keywords, expected))


def _step(
    name: str, dtype: torch.dtype, dims: tuple[int, int], page: int | None, **more: Any
) -> Named:
    """Return append_kv of two sequences, one key of which is padding."""
    batch, heads, kv, length, room = 2, 3, 2, 5, 12
    dim, value_dim = dims
    tensors = {
        "query": _normal(batch, heads, length, dim, dtype=dtype),
        "key": _normal(batch, kv, length, dim, dtype=dtype),
    }
    tensors |= {"value": _normal(batch, kv, length, value_dim, dtype=dtype)}
    tensors |= {
        n: 1 + _normal(dim, dtype=F32) for n in ("q_norm", "k_norm")[: more.get("norms", 0)]
    }
    positions = torch.stack([torch.randperm(room)[:length] for _ in range(batch)])
    positions[1, 2] = -1
    tensors["positions"] = positions
    keywords = (
        {"base": 100.0, "dims": more["turned"], "interleaved": False} if "turned" in more else {}
    )
    first, rows = batch, room
    if page is not None:
        pages = room // page
        first, rows = batch * pages + 1, page
        tensors["page_table"] = (
            torch.randperm(first)[: batch * pages].view(batch, pages).to(more["table"])
        )
    for cache, columns in (("key_cache", dim), ("value_cache", value_dim)):
        tensors[cache] = torch.full((first, kv, rows, columns), FILL, dtype=dtype)
    return Named(
        name,
        Problem(
            "append_kv",
            dtype,
            "zero_mean",
            tensors,
            dict.fromkeys(tensors, "contiguous"),
            keywords,
            [],
        ),
    )


def _normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def problems() -> Iterator[Named]:
    """Yield rows of 4 to 32 lanes, other rows, and caches.

    Both layouts and each dtype have idle lanes and more rows than blocks run at once. Caches are
    contiguous and paged, with tables of both dtypes.
    """
    torch.manual_seed(0)
    yield _rows("halves", F32, (1, 2, 5, 64), 64)
    yield _rows("norm", BF16, (2, 3, 25, 128), 128, weight=F16, table=BF16, eps=0.1)
    yield _rows(
        "interleaved",
        F16,
        (2, 2, 3, 80),
        40,
        weight=F32,
        interleaved=True,
        weight_offset=1.0,
        tables=1,
    )
    yield _rows("wide", F32, (1, 1, 3, 496), 32, weight=F32)
    yield _rows("any", BF16, (2, 2, 9, 66), 10, weight=BF16, eps=0.1, interleaved=True)
    yield _rows("any halves", F32, (1, 3, 4, 130), 86, weight=F32)
    yield _rows("unaligned", F32, (1, 2, 3, 64), 32, weight=F32, layouts={"x": "offset"})
    yield _step("pages", BF16, (64, 24), 4, table=torch.int32, turned=32, norms=2)
    yield _step("pages by int64", F32, (32, 8), 3, table=torch.int64, turned=32, norms=1)
    yield _step("cache", F16, (48, 64), None)
    yield _step("any cache", BF16, (34, 5), 1, table=torch.int64, turned=34, norms=2)
    yield _step("any cache in float32", F32, (34, 5), None)


def drawn(seed: int, count: int) -> Iterator[tuple[int, Problem]]:
    """Yield (number, problem) of the fuzzer, without float64, which the kernels refuse."""
    case = 0
    while count:
        problem = fuzz_rotary.draw(seed, case)
        if problem.dtype != torch.float64:
            yield case, problem
            count -= 1
        case += 1


def wrong(problem: Named | Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        return fuzz_rotary.judge(
            problem.problem if isinstance(problem, Named) else problem, "cuda", False
        )[1]
    except (RuntimeError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
