# SPDX-License-Identifier: Apache-2.0
"""Tiles of boolean masks on the CPU (csrc/cpu/attention/mask.h): empty, full and partial.

A tile is 16 queries x 64 keys. Masks have all three kinds and odd boundaries; sizes cross blocks of
queries (96, 128) and keys (192, 512).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import native
from pytransformer.testing import bounds, oracle

WHY_NOT = native.why_not("attention_fwd")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
B, H, LQ, LK, D = 2, 2, 150, 700, 16


def band(width: int) -> Tensor:
    return (torch.arange(LQ)[:, None] * LK // LQ - torch.arange(LK)).abs() <= width


def blocks(shape: tuple[int, ...], rows: int, keys: int, share: float) -> Tensor:
    """Return random blocks, each fully visible or hidden."""
    *outer, lq, lk = shape
    small = torch.rand(*outer, -(-lq // rows), -(-lk // keys)) < share
    return small.repeat_interleave(rows, -2).repeat_interleave(keys, -1)[..., :lq, :lk]


MASKS: dict[str, Callable[[], Tensor]] = {
    "band": lambda: band(40),
    "band with a hole": lambda: band(200) & ~band(70),
    "aligned blocks by head": lambda: blocks((B, H, LQ, LK), 16, 64, 0.3),
    "odd blocks by batch": lambda: blocks((B, 1, LQ, LK), 23, 90, 0.3),
    "small blocks by head": lambda: blocks((1, H, LQ, LK), 5, 7, 0.1),
    "first keys and rows": lambda: (
        band(30) | (torch.arange(LK) < 3) | (torch.arange(LQ) < 2)[:, None]
    ),
    "one pair in a tile": lambda: torch.rand(B, H, LQ, LK) < 0.002,
    "one pair missing": lambda: torch.rand(B, H, LQ, LK) > 0.002,
    "keys alone": lambda: blocks((B, 1, 1, LK), 1, 50, 0.5),
    "queries alone": lambda: blocks((B, H, LQ, 1), 20, 1, 0.5),
    "keys outermost in memory": lambda: blocks((H, LK, LQ), 30, 20, 0.2).transpose(1, 2),
    "every second key": lambda: blocks((LQ, 2 * LK), 20, 100, 0.4)[:, ::2],
    "expanded": lambda: blocks((H, 1, LK), 1, 64, 0.3).expand(H, LQ, LK),
    "nothing": lambda: torch.zeros(LQ, LK, dtype=torch.bool),
    "other bytes than 0 and 1": (
        lambda: (blocks((LQ, LK), 16, 64, 0.6).to(torch.uint8) * 6).view(torch.bool)
    ),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal lengths": dict(causal="bottom_right", query_lengths=torch.tensor([LQ, 77]),
        key_lengths=torch.tensor([601, 190])),
    "window bias": dict(window=(150, 40), bias=torch.randn(1, H, LQ, LK)),
    "segments softcap": dict(query_segments=torch.arange(LQ).expand(B, LQ) // 40 % 3,
                             key_segments=torch.arange(LK).expand(B, LK) // 90 % 3, softcap=10.0),
    "dropout t5": dict(dropout_p=0.3, dropout_seed=11,
        bias=pt.RelativePositionBias(torch.randn(32, H))),
}  # fmt: skip


def draw(dtype: torch.dtype, rows: int = LQ) -> dict[str, Tensor]:
    sizes = {"query": (B, H, rows, D), "key": (B, 1, LK, D), "value": (B, 1, LK, D)}
    return {name: torch.randn(size).to(dtype) for name, size in sizes.items()}


def run(t: dict[str, Tensor], grad_out: Tensor, **keywords: Any) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in t.items()}
    out, lse = pt.attention(**leaves, return_lse=True, backend="cpu", strict=True, **keywords)
    return {"out": out, "lse": lse} | dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out))
    )


@pytest.mark.parametrize("keywords", KEYWORDS)
@pytest.mark.parametrize("name", MASKS)
def test_tile_lists_change_no_result(name: str, keywords: str) -> None:
    mask = MASKS[name]()
    dtype = torch.bfloat16 if (len(name) + len(keywords)) % 4 == 0 else torch.float32
    t = draw(dtype)
    grad_out = torch.randn(B, H, LQ, D).to(dtype)
    given = dict(KEYWORDS[keywords], attn_mask=mask)
    exact = oracle.solve(**t, grad_out=grad_out, **given)
    wrong = [str(c) for c in bounds.check(exact, run(t, grad_out, **given), dtype) if not c.ok]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("rows", (1, 4, 9))
@pytest.mark.parametrize("name", ("aligned blocks by head", "band", "expanded"))
def test_few_queries_within_the_bound(name: str, rows: int) -> None:
    """Keys are read in place, or packed tile by tile over splits."""
    mask = MASKS[name]()[..., :rows, :]
    t, grad_out = draw(torch.float32, rows), torch.randn(B, H, rows, D)
    exact = oracle.solve(**t, grad_out=grad_out, attn_mask=mask)
    wrong = [
        str(c)
        for c in bounds.check(exact, run(t, grad_out, attn_mask=mask), torch.float32)
        if not c.ok
    ]
    assert not wrong, "; ".join(wrong)


def test_broadcast_masks_equal_their_expanded_copy() -> None:
    t, grad_out = draw(torch.float32), torch.randn(B, H, LQ, D)
    for shape in ((1, 1, LQ, LK), (B, 1, LQ, LK), (1, H, LQ, LK), (B, H, 1, LK), (LQ, 1)):
        mask = blocks(shape, 16, 64, 0.4)
        copy = mask.expand(B, H, LQ, LK).contiguous()
        one, two = (run(t, grad_out, attn_mask=m, causal="bottom_right") for m in (mask, copy))
        assert all(torch.equal(one[n], two[n]) for n in one), shape


def test_bits_do_not_depend_on_threads_or_other_sequences() -> None:
    t, grad_out = draw(torch.float32), torch.randn(B, H, LQ, D)
    keywords: dict[str, Any] = dict(
        attn_mask=blocks((LQ, LK), 23, 90, 0.3), key_lengths=torch.tensor([433, LK])
    )
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            found.append(run(t, grad_out, **keywords))
    finally:
        torch.set_num_threads(threads)
    first = {name: x[:1] for name, x in t.items()}
    alone = run(
        first, grad_out[:1], attn_mask=keywords["attn_mask"], key_lengths=torch.tensor([433])
    )
    for name in alone:
        assert torch.equal(found[0][name], found[1][name]), name
        assert torch.equal(found[0][name][:1], alone[name]), name
