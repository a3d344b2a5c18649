# SPDX-License-Identifier: Apache-2.0
"""Block masks in the interpreted Triton backend: values, gradients, cost and bad lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import every_third
from kernel_mutants import mutated
from torch import Tensor

import pytransformer as pt
from pytransformer import BlockMask
from pytransformer.kernels.attention import configs
from pytransformer.kernels.attention.configs import Config, plan_backward, plan_forward, within
from pytransformer.ops._problem.blocks import SIZES
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds, oracle
from support.guarded import place

LQ, LK = 150, 170  # no multiples of a block or tile


def blobs(
    block_size: int | tuple[int, int], batch: int = 2, heads: int = 2, lq: int = LQ, lk: int = LK
) -> BlockMask:
    """Return a mask of blocks of 32: most empty, some full, some random.

    The first queries have no visible keys.
    """
    generator = torch.Generator().manual_seed(5)
    kind = torch.rand(batch, heads, -(-lq // 32), -(-lk // 32), generator=generator)
    kind = kind.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :lq, :lk]
    dense = (kind < 0.2) | (
        (kind > 0.8) & (torch.rand(batch, heads, lq, lk, generator=generator) < 0.3)
    )
    dense[:, :, :5] = False
    return BlockMask.from_dense(dense, block_size=block_size)


def inputs(
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    key_heads: int = 1,
    lq: int = LQ,
    lk: int = LK,
) -> dict[str, Tensor]:
    torch.manual_seed(1)
    sizes = {"query": (heads, lq), "key": (key_heads, lk), "value": (key_heads, lk)}
    return {name: torch.randn(2, h, n, 16).to(dtype) for name, (h, n) in sizes.items()}


def run(
    t: dict[str, Tensor], more: dict[str, Tensor], grads: tuple[Tensor, ...], **keywords: Any
) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in (t | more).items()}
    keywords |= {name: leaves[name] for name in more.keys() & {"bias", "sinks"}}
    if "table" in more:
        keywords["bias"] = pt.RelativePositionBias(leaves["table"], max_distance=40)
    if "slopes" in more:
        keywords["bias"] = pt.AlibiBias(leaves["slopes"])
    out, lse = pt.attention(
        *(leaves[n] for n in t), return_lse=True, backend="triton", strict=True, **keywords
    )
    return {"out": out, "lse": lse} | dict(
        zip(leaves, torch.autograd.grad([out, lse], list(leaves.values()), grads))
    )


def check(
    mask: BlockMask | Tensor,
    dtype: torch.dtype,
    t: dict[str, Tensor],
    more: dict[str, Tensor],
    **keywords: Any,
) -> None:
    shape = (*t["query"].shape[:3], t["value"].shape[3])
    grads = torch.randn(shape).to(dtype), torch.randn(shape[:3])
    found = run(t, more, grads, attn_mask=mask, **keywords)
    known = {n: x for n, x in more.items() if n in ("bias", "sinks")}
    if "table" in more:
        known["bias"] = pt.RelativePositionBias(more["table"], max_distance=40)
    if "slopes" in more:
        known["bias"] = pt.AlibiBias(more["slopes"])
    dense = mask.to_dense() if isinstance(mask, BlockMask) else mask
    exact = oracle.solve(*t.values(), *grads, attn_mask=dense, **keywords, **known)
    wrong = [str(c) for c in bounds.check(exact, found, dtype) if not c.ok]
    assert not wrong, "; ".join(wrong)


KEYWORDS: dict[str, tuple[Any, dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "alone, 32": (32, {}, {}),
    "alone, 512": (512, {}, {}),
    "keys longer": ((32, 128), {}, {}),
    "causal, lengths": (
        64,
        dict(causal="bottom_right", query_lengths=torch.tensor([LQ, 77]),
            key_lengths=torch.tensor([101, LK])),
        {},
    ),
    "window, bias": (32, dict(window=(60, 20)), {"bias": lambda: torch.randn(1, 2, LQ, LK)}),
    "bias of all heads": (64, {}, {"bias": lambda: torch.randn(1, 1, LQ, 1)}),
    "prefix, segments, softcap": (
        (128, 64),
        dict(causal="top_left", prefix_lengths=torch.tensor([90, 3]), softcap=10.0,
             query_segments=torch.arange(LQ).expand(2, LQ) // 40 % 3,
             key_segments=torch.arange(LK).expand(2, LK) // 90 % 3),
        {},
    ),
    "dropout, sinks": (32, dict(dropout_p=0.3, dropout_seed=11), {"sinks": lambda: torch.randn(2)}),
    "T5": (32, {}, {"table": lambda: torch.randn(8, 2)}),
    "ALiBi, dropout": ((64, 32), dict(dropout_p=0.5, dropout_seed=3),
        {"slopes": lambda: torch.tensor([0.1, 0.01])}),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYWORDS)
def test_block_masks_within_the_bound(name: str) -> None:
    size, keywords, more = KEYWORDS[name]
    number = list(KEYWORDS).index(name)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
    mask = blobs(size, batch=1 + number % 2, heads=1 + number // 2 % 2)
    check(
        mask,
        dtype,
        inputs(dtype, key_heads=1 + number % 2),
        {n: f() for n, f in more.items()},
        **keywords,
    )


def test_few_queries_of_grouped_heads_ignore_hidden_nan() -> None:
    """Without a block mask decode would run; here each head walks its own list."""
    mask = blobs(32, heads=4, lq=3, lk=300) | BlockMask.from_dense(
        torch.arange(300).expand(3, 300) < 3, block_size=32
    )
    hidden = ~mask.to_dense().any((1, 2))  # for both sequences: (2, keys)
    assert bool(hidden.any(1).all())
    t = inputs(heads=4, key_heads=2, lq=3, lk=300)
    a = attention_op.prepare(*t.values(), attn_mask=mask)[0]
    assert (
        plan_forward(a).decode is None
        and plan_forward(a._replace(**dict.fromkeys(a._fields[14:19]))).decode is not None
    )
    grads = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3)
    expected = run(t, {}, grads, attn_mask=mask)
    check(mask, torch.float32, t, {})
    for name in ("key", "value"):
        t[name] = torch.where(hidden[:, None, :, None], torch.nan, t[name])
    for name, found in run(t, {}, grads, attn_mask=mask).items():
        assert torch.equal(found, expected[name]), name


DENSE: dict[str, tuple[tuple[int, int], dict[str, Any], dict[str, Callable[[], Tensor]]]] = {
    "for all": ((1, 1), {}, {}),
    "by head, causal, bias": (
        (1, 2),
        dict(causal="bottom_right"),
        {"bias": lambda: torch.randn(2, 1, LQ, LK)},
    ),
    "by sequence, T5": (
        (2, 1),
        dict(key_lengths=torch.tensor([LK, 60])),
        {"table": lambda: torch.randn(8, 2)},
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_listed_dense_masks_within_the_bound(name: str) -> None:
    """Masks are expanded over their broadcast dimensions, with non-contiguous strides."""
    shape, keywords, more = DENSE[name]
    mask = blobs(64, *shape).to_dense()
    mask = (
        place(mask.mT.contiguous().mT, fill=True)
        if name == "for all"
        else mask.expand(2, 2, LQ, LK)
    )
    a = attention_op.prepare(*inputs().values(), attn_mask=mask)[0]
    assert plan_forward(a).prefill.kind.BLOCK_KEYS == 64
    check(mask, torch.float32, inputs(), {n: f() for n, f in more.items()}, **keywords)


def test_dense_masks_are_listed_from_64_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, blocks are 128 x 128 and every pair must serve 8 heads.

    Masks read once per key have no lists.
    """
    monkeypatch.setattr(configs, "capability", lambda device: 90)

    def size(heads: int, length: int, *shape: int, **changes: Any) -> tuple[int, int]:
        q = torch.empty(2, heads, length, 16, device="meta")
        mask = torch.empty(*shape, dtype=torch.bool, device="meta")
        return configs.block_size(
            attention_op.prepare(q, q, q, attn_mask=mask)[0]._replace(**changes)
        )

    assert size(4, 1024, 1024, 1024) == size(8, 1024, 2, 1, 1024, 1024) == (128, 128)
    assert (
        size(4, 896, 896, 896)
        == size(4, 1024, 2, 1, 1024, 1024)
        == size(4, 1024, 1, 1024)
        == (0, 0)
    )
    assert size(4, 1024, 1024, 1024, key_start=7) == (0, 0)


# ---- cost


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_empty_blocks_cost_no_products(products: Counter[str], causal: Any, listed: bool) -> None:
    """The mask is a block mask or a listed dense one.

    Its 8 x 8 blocks show the diagonal and the block beside it, and causality hides all above. With
    tiles of 32 queries and 64 keys, each runs 2 products in forward, 3 in dq and 4 in dkdv.
    """
    length = 512
    block = torch.arange(length) // 64
    dense = (block[:, None] - block) % 8 < 2
    dense[0, 0] = False
    mask = dense if listed else BlockMask.from_dense(dense, block_size=64)
    t = [torch.randn(1, 1, length, 16).requires_grad_() for _ in range(3)]
    out = pt.attention(*t, attn_mask=mask, causal=causal, backend="triton", strict=True)
    tiles = 2 * (16 - (causal is not None))
    assert products["tiles"] == 2 * tiles
    torch.autograd.grad(out.sum(), t)
    assert products["tiles"] == (2 + 3 + 4) * tiles


def test_tiles_lie_within_blocks() -> None:
    for queries in SIZES:
        for keys in SIZES:
            for by_keys in (False, True):
                tile = within(Config(128, 64, 8, 3), queries, keys, by_keys=by_keys)
                assert queries % tile.BM == 0 and keys % tile.BN == 0 and tile.warps >= 4
    assert within(Config(128, 64, 8, 3), 64, 64, by_keys=False) == Config(64, 64, 4, 3)
    assert within(Config(64, 64, 4, 2), 64, 32, by_keys=False) == Config(
        32, 32, 4, 2
    )  # for T5's gradient BM is at most BN
    assert within(Config(16, 128, 8, 2), 64, 64, by_keys=True) == Config(16, 64, 4, 2)
    a = attention_op.prepare(*inputs().values(), attn_mask=blobs(32))[0]
    plan = plan_backward(a, ("query", "key", "value"))
    assert all(
        step.tile.BN == 32 and step.kind.BLOCK_KEYS == 32
        for step in (plan_forward(a).prefill, plan.dq, plan.dkdv)
    )


def test_explain_reports_the_share() -> None:
    mask = blobs(32)
    output = str(pt.explain("attention", *inputs().values(), attn_mask=mask, backend="triton"))
    assert (
        "by tiles of 32 queries and 32 keys, in the visible blocks of 32 x 32" in output
        and "blocks of 32 x 32 pairs run" in output
    )
    a = attention_op.prepare(*inputs().values(), attn_mask=mask)[0]
    reason = attention_op.backends["triton"].why_not
    assert reason(a._replace(key_start=32)) is None and "multiple of 32, got 5" in str(
        reason(a._replace(key_start=5))
    )


# ---- lists changed after the check


@pytest.mark.parametrize("side", ["", "key_"])
@pytest.mark.parametrize(
    ("name", "where", "value"),
    [
        ("entries", (0, 0), 10**6),
        ("entries", (1, 0), -7),
        ("entries", (2, 1), 10**6),
        ("entries", (0, 1), -(2**31)),
        ("offsets", (0, 0, 1), 10**9),
        ("offsets", (0, 0, 0), -5),
        ("offsets", (0, 0, 2), 0),
    ],
)
def test_bad_lists_read_nothing_outside(
    integers_read: list[Tensor], side: str, name: str, where: tuple[int, ...], value: int
) -> None:
    lq, lk = 70, 100
    mask = blobs(32, batch=1, heads=1, lq=lq, lk=lk) | BlockMask.from_dense(
        torch.eye(lq, lk) > 0, block_size=32
    )
    assert mask.blocks.bits.shape[0] and mask.blocks.entries.shape[0] > 3
    tensors = {n: t.clone() for n, t in mask.blocks._asdict().items()}
    tensors[side + name][where] = value
    bad = BlockMask(mask.shape, mask.blocks)
    bad.blocks = type(mask.blocks)(**tensors)
    integers_read.extend(tensors.values())
    t = [place(torch.randn(1, 1, n, 16)).requires_grad_() for n in (lq, lk, lk)]  # in NaN
    out = pt.attention(*t, attn_mask=bad, backend="triton", strict=True)
    assert all(bool(x.isfinite().all()) for x in (out, *torch.autograd.grad(out.sum(), t)))


# ---- faults

# (file, line, replacement), and the entry of KEYWORDS that detects it.
MUTANTS = {
    "last_tile_skipped": ("mask.py", "count * PER - tl", "count * PER - 1 - tl", "alone, 32"),
    "first_tile_skipped": ("mask.py", "tl.maximum(first - from", "1 + tl.maximum(first - from",
        "alone, 32"),
    "lists_not_transposed": ("bwd.py", "_replace(blocks=by_keys)", "_replace(blocks=by_queries)",
        "alone, 32"),
    "partial_block_lost": ("mask.py", "(word, p_words), other=-1)  # [BM",
        "(word - 1, p_words), other=0)  # [BM", "alone, 512"),
    "partial_block_taken_whole": ("mask.py", "(word, p_words), other=-1)  # [BM",
        "(word - 1, p_words), other=-1)  # [BM", "alone, 512"),
    "bits_off_by_one_word": ("mask.py", "key_tile * C.BN %", "(key_tile * C.BN + 32) %",
        "keys longer"),
    "rows_of_the_first_tile": ("mask.py", "(i % C.BLOCK_QUERIES) *", "(i % C.BM) *",
        "prefix, segments, softcap"),
    "rows_that_see_nothing_hide_a_block": ("mask.py", "tl.max(tl.max(", "tl.min(tl.max(",
        "for all"),
    "dense_list_without_its_last": ("mask.py", "+ 1, start + count)",
    "+ 1, start + count - 1)", "for all"),
    "dense_lists_not_transposed": ("mask.py", "(self.across, 1) if by_keys",
        "(1, self.down) if by_keys", "for all"),
    "lists_of_the_first_head": ("mask.py", "i_h * p.blocks.head", "i_h * 0 * p.blocks.head",
        "causal, lengths"),
    "diagonals_across_a_gap": ("bwd.py", "if t != left + 1:", "if t == left + 1:", "T5"),
}  # fmt: skip


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_faults_are_detected(name: str, tmp_path: Path) -> None:
    *fault, shown = MUTANTS[name]
    with mutated("attention", *fault, tmp_path), pytest.raises(AssertionError, match="WRONG"):
        (
            test_listed_dense_masks_within_the_bound
            if shown in DENSE
            else test_block_masks_within_the_bound
        )(shown)
