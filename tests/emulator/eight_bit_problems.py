# SPDX-License-Identifier: Apache-2.0
"""8-bit keys and values on "cuda" against float64 on dequantized values; a GPU runs these too.

Paged results have the bits of contiguous ones. Hidden rows and their scales are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attention_problems import Problem as Described
from attention_problems import alibi, arguments, t5
from page_problems import BF16, F16, F32, RAW_OP, Problem
from torch import Tensor

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from support.pages import in_pages

__all__ = ["RAW_OP", "problems", "wrong"]

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
# Each kernel: with and without split KV, per dtype and class of head dims; several tiles, some
# partial or skipped. Each problem has the dtype of keys and values, and a page size or 0.
DESCRIBED = (
    (INT8, 16, Described("one token in pages", BF16, (2, 4, 2, 1, 600, 64, 48),
                         lambda n: {"causal": "bottom_right",
                             "key_lengths": torch.tensor([600, 70])})),
    (E4M3, 0, Described("two tiles of rows, ALiBi, mask, dropout", F16, (1, 8, 2, 5, 300, 128, 128),
                        lambda n: {"bias": alibi(n, 8), "attn_mask": n(1, 8, 5, 300) > -0.5,
                            "dropout_p": 0.3, "dropout_seed": 5})),
    (E4M3, 7, Described("float32, T5, softcap, sinks", F32, (1, 4, 1, 3, 290, 24, 40),
                        lambda n: {"softcap": 4.0, "bias": t5(n, 4, True, 300, 16), "sinks": n(4),
                            "key_lengths": torch.tensor([283])})),
    (INT8, 0, Described("wide heads, segments", BF16, (1, 2, 2, 3, 290, 200, 256),
                        lambda n: {"query_segments": torch.arange(3)[None] // 2,
                            "key_segments": torch.arange(290)[None] // 280})),
    (E4M3, 0, Described("wide heads, padding", F16, (2, 1, 1, 2, 100, 256, 160),
                        lambda n: {"attn_mask": (n(2, 1, 1, 100) < 1) & (torch.arange(100) > 20)})),
    (E4M3, 16, Described("tiles of queries in pages", BF16, (2, 2, 1, 50, 100, 64, 128),
                         lambda n: {"causal": "bottom_right", "window": (60, 0),
                             "key_lengths": torch.tensor([100, 33])})),
    (INT8, 0, Described("tiles of queries, global keys, bias", F16, (1, 2, 1, 40, 130, 96, 64),
                        lambda n: {"window": (10, 3), "global_keys": 5, "bias": n(1, 2, 40, 130)})),
    (INT8, 0, Described("tiles of float32 queries", F32, (1, 2, 2, 40, 70, 40, 24),
        lambda n: {"causal": "top_left"})),
    (E4M3, 0, Described("tiles of queries, wide heads", BF16, (1, 1, 1, 40, 70, 160, 256),
        lambda n: {"window": (20, 40)})),
    (INT8, 16, Described("tiles of queries, wide heads, float16", F16, (1, 1, 1, 40, 70, 256, 200),
                         lambda n: {"key_lengths": torch.tensor([61]), "softcap": 5.0})),
)  # fmt: skip


def spread(value: Tensor) -> Tensor:
    """Return rows whose magnitudes differ by 1000.

    A weight times a small scale must keep its bits.
    """
    return (
        value.float()
        * torch.logspace(-3, 0, value.shape[2])[
            torch.arange(value.shape[2]) * 37 % value.shape[2], None
        ]
    )


def stored(rows: Tensor, eight: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (values, scales) of rows; a row with a NaN contains nothing else."""
    numbers, scale = pt.quantize_kv(rows, eight)
    nobody = scale.isnan()[..., None].expand(numbers.shape)
    return numbers.view(torch.uint8).masked_fill(nobody, 0x7F).view(eight), scale


def right(eight: torch.dtype, page_size: int, described: Described, device: str) -> bool:
    (query, key, value), keywords = arguments(described)
    key, value = key.float(), spread(value)
    exact = [pt.dequantize_kv(*pt.quantize_kv(t, eight), torch.float64) for t in (key, value)]
    solution = oracle.solve(query, *exact, **keywords)
    query = query.masked_fill(solution.dead_queries[..., None], torch.nan)
    rows = tuple(t.masked_fill(solution.unseen_keys[..., None], torch.nan) for t in (key, value))
    found = [attend(query, rows, eight, keywords, device)]
    if page_size:
        pools = in_pages(*rows, keywords["key_lengths"], page_size, seed=page_size)
        found.append(
            attend(query, pools.tensors, eight, keywords | {"page_table": pools.table}, device)
        )
    checks = bounds.check(
        solution, dict(zip(("out", "lse"), found[-1])), described.dtype, "zero_mean"
    )
    return all(check.ok for check in checks) and all(map(torch.equal, found[0], found[-1]))


def attend(
    query: Tensor,
    rows: tuple[Tensor, ...],
    eight: torch.dtype,
    keywords: dict[str, Any],
    device: str,
) -> list[Tensor]:
    """Return out and lse."""
    (key, key_scale), (value, value_scale) = (stored(t, eight) for t in rows)
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in keywords.items()}
    if isinstance(bias := keywords.get("bias"), pt.AlibiBias):
        moved["bias"] = pt.AlibiBias(bias.slopes.to(device))
    elif isinstance(bias, pt.RelativePositionBias):
        moved["bias"] = pt.RelativePositionBias(
            bias.table.to(device), bias.bidirectional, bias.max_distance
        )
    moved |= {
        "key_scale": key_scale.to(device),
        "value_scale": value_scale.to(device),
        "return_lse": True,
    }
    found = pt.attention(
        *(t.to(device) for t in (query, key, value)), **moved, backend="cuda", strict=True
    )
    return [t.cpu() for t in found]


def every_number(eight: torch.dtype, query_dtype: torch.dtype, device: str) -> bool:
    """Use all codes of the dtype as values that one query reads, then a hidden NaN scale.

    Subnormals and both zeros are included.
    """
    every = torch.arange(256, dtype=torch.uint8).view(eight)
    numbers = every.float().nan_to_num(0)
    rows = numbers.to(eight).view(1, 1, 256, 1).expand(1, 1, 256, 64).contiguous().to(device)
    query, only = (
        torch.zeros(1, 1, 256, 64, dtype=query_dtype, device=device),
        torch.eye(256, dtype=torch.bool, device=device),
    )
    scale = torch.ones(256, device=device)
    options: dict[str, Any] = {"key_scale": scale, "backend": "cuda", "strict": True}
    out = pt.attention(query, rows, rows, attn_mask=only[None, None], value_scale=scale, **options)
    hidden = scale.clone()
    hidden[100] = torch.nan
    but = pt.attention(query, rows, rows, attn_mask=only[None, None], value_scale=hidden, **options)
    same = torch.equal(but[0, 0, torch.arange(256) != 100], out[0, 0, torch.arange(256) != 100])
    return (
        torch.equal(out[0, 0].cpu().float(), numbers[:, None].expand(256, 64))
        and same
        and bool(but[0, 0, 100].isnan().all())
    )


def problems(device: str = "cpu") -> Iterator[Problem]:
    for eight, page_size, described in DESCRIBED:
        check = lambda eight=eight, page_size=page_size, described=described: right(
            eight, page_size, described, device
        )
        yield Problem(described.name, check)
    for eight, dtype in ((E4M3, F16), (INT8, BF16), (E4M3, F32)):
        name = (
            f"every number of {str(eight).removeprefix('torch.')},"
            f" {str(dtype).removeprefix('torch.')}"
        )
        yield Problem(name, lambda eight=eight, dtype=dtype: every_number(eight, dtype, device))


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        return [] if problem.check() else ["beyond the bounds, or other bits"]
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
