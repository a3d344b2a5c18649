# SPDX-License-Identifier: Apache-2.0
"""Decode: "cuda" splits KV over blocks, within float64's bound, with equal bits in any batch.

A GPU runs these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attention_problems import Problem as Described
from attention_problems import alibi, arguments, t5
from page_problems import BF16, F16, F32, RAW_OP, Problem, draw
from torch import Tensor

import pytransformer as pt
from pytransformer.testing import bounds, oracle

__all__ = ["RAW_OP", "problems", "wrong"]

# Two and three splits of 256 keys, or of 512 for two tiles of rows, with tails; heads of a group
# with separate score terms. In 16 bits, bounds-only calls have a special kernel: the first three
# problems and the last, but not those with a negative scale or padding.
DESCRIBED = (
    Described(
        "one token", BF16, (2, 4, 2, 1, 600, 64, 48),
        lambda n: {"causal": "bottom_right", "key_lengths": torch.tensor([600, 70])},
    ),
    Described(
        "two tiles of rows, window, sinks", F16, (1, 8, 1, 4, 560, 40, 40),
        lambda n: {"causal": "bottom_right", "window": (540, 0), "sinks": n(8),
            "query_lengths": torch.tensor([3])},
    ),
    Described(
        "group of five, whole head sizes", BF16, (1, 10, 2, 3, 520, 128, 128),
        lambda n: {"causal": "bottom_right", "key_lengths": torch.tensor([513]), "scale": 0.3},
    ),
    Described("scale below zero", BF16, (1, 2, 1, 1, 280, 64, 64), lambda n: {"scale": -0.3}),
    Described("padding with gaps", F16, (1, 4, 2, 2, 280, 64, 64),
        lambda n: {"attn_mask": n(280) > -1}),
    Described(
        "T5, softcap, padding", F32, (1, 4, 2, 3, 530, 24, 32),
        lambda n: {"softcap": 4.0, "bias": t5(n, 4, True, 300, 16), "causal": "bottom_right",
            "attn_mask": n(530) > -1},
    ),
    Described(
        "ALiBi, mask, dropout", BF16, (1, 4, 1, 3, 300, 128, 128),
        lambda n: {"bias": alibi(n, 4), "attn_mask": n(1, 4, 3, 300) > -0.5, "dropout_p": 0.3,
            "dropout_seed": 5},
    ),
    Described(
        "global keys, bias", F32, (1, 4, 2, 2, 620, 16, 16),
        lambda n: {"window": (20, 0), "global_keys": 5, "causal": "bottom_right",
            "bias": n(1, 4, 2, 620)},
    ),
    Described("wide heads, segments", BF16, (1, 2, 2, 3, 290, 200, 256),
              lambda n: {"query_segments": torch.arange(3)[None] // 2,
                  "key_segments": torch.arange(290)[None] // 280}),
    Described("36 splits", F16, (1, 2, 1, 1, 9000, 16, 16), lambda n: {}),
)  # fmt: skip


def right(described: Described, device: str) -> bool:
    """Check the bounds of float64, with NaN in rows without a visible pair."""
    (query, key, value), keywords = arguments(described)
    solution = oracle.solve(query, key, value, **keywords)
    dead = [solution.dead_queries, solution.unseen_keys, solution.unseen_keys]
    given = [
        t.masked_fill(rows[..., None], torch.nan).to(device)
        for t, rows in zip((query, key, value), dead)
    ]
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in keywords.items()}
    if isinstance(bias := keywords.get("bias"), pt.AlibiBias):
        moved["bias"] = pt.AlibiBias(bias.slopes.to(device))
    elif isinstance(bias, pt.RelativePositionBias):
        moved["bias"] = pt.RelativePositionBias(
            bias.table.to(device), bias.bidirectional, bias.max_distance
        )
    out, lse = pt.attention(*given, **moved, return_lse=True, backend="cuda", strict=True)
    checks = bounds.check(
        solution, {"out": out.cpu(), "lse": lse.cpu()}, described.dtype, "zero_mean"
    )
    return all(check.ok for check in checks)


def same_in_any_batch(device: str, dtype: torch.dtype = F32, **options: Any) -> bool:
    """Check that each sequence has the bits of a call alone, without spare capacity.

    Capacity for 16,640 keys makes the splits longer. The second sequence has one split and nothing
    to merge.
    """
    lengths = torch.tensor([600, 33])
    query, key, value = (
        draw(2, h, n, 16, seed=n + h).to(device, dtype) for h, n in ((2, 1), (1, 16640), (1, 16640))
    )
    together = _attend(query, key, value, lengths, **options)
    for b, n in enumerate(lengths.tolist()):
        alone = _attend(
            query[b : b + 1],
            key[b : b + 1, :, :n],
            value[b : b + 1, :, :n],
            lengths[b : b + 1],
            **options,
        )
        if not all(torch.equal(both[b : b + 1], one) for both, one in zip(together, alone)):
            return False
    return True


def same_in_any_order(device: str) -> bool:
    """Check that ten splits give the same bits in every call, whichever block merges them."""
    args = [draw(1, h, n, 16, seed=n + h).to(device) for h, n in ((4, 1), (2, 2500), (2, 2500))]
    first, *others = (_attend(*args, torch.tensor([2500])) for _ in range(4))
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def _attend(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    *inputs, lengths = tensors
    keywords: dict[str, Any] = {
        "key_lengths": lengths.to(inputs[0].device),
        "causal": "bottom_right",
        "return_lse": True,
    }
    return pt.attention(*inputs, **keywords, **options, backend="cuda", strict=True)


def problems(device: str = "cpu") -> Iterator[Problem]:
    for described in DESCRIBED:
        yield Problem(described.name, lambda described=described: right(described, device))
    yield Problem("in any batch", lambda: same_in_any_batch(device))
    yield Problem("in any order of blocks", lambda: same_in_any_order(device))
    yield Problem("in any batch, streams of warps", lambda: same_in_any_batch(device, BF16))
    yield Problem(
        "in any batch, streams of warps, softcap",
        lambda: same_in_any_batch(device, BF16, softcap=5.0),
    )


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        return [] if problem.check() else ["beyond the bounds, or other bits"]
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
