# SPDX-License-Identifier: Apache-2.0
"""Global keys in the interpreted Triton backend: values, gradients, computed tiles and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import every_third
from kernel_mutants import mutated
from test_attention_blocks import blobs, check
from torch import Tensor

import pytransformer as pt
from pytransformer import BlockMask
from pytransformer.kernels.attention.configs import INTERPRETED, SPLIT_INTERPRETED, plan_forward
from pytransformer.ops.attention import attention_op
from support.attention_check import check_attention, check_packed
from support.guarded import place

LQ, LK = (
    70,
    330,
    # No multiples of a tile; aligned bottom right, some tiles lie between the first keys and the
    # windows.
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    lq: int = LQ, lk: int = LK, batch: int = 1, key_heads: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        draw(batch, 2, lq, 16),
        draw(batch, key_heads, lk, 16, seed=1),
        draw(batch, key_heads, lk, 16, seed=2),
    )


def table() -> pt.RelativePositionBias:
    return pt.RelativePositionBias(draw(16, 2, seed=6), max_distance=400)


def hidden() -> Tensor:
    """Return a mask that hides a pair in seven and full tiles around the first keys."""
    mask = torch.rand(1, 2, LQ, LK, generator=torch.Generator().manual_seed(3)) < 0.85
    mask[:, 1, :40, :64] = False
    mask[:, 0, 64:, 64:320] = False
    return mask


LONG = ("alone", "behind the keys")  # as many queries as keys
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "alone": lambda: dict(global_keys=4, causal=None),
    "causal": lambda: dict(global_keys=4),
    "early": lambda: dict(global_keys=40, causal="top_left", window=(5, 0)),
    "several tiles": lambda: dict(global_keys=150, window=(20, None)),
    "as many as there are": lambda: dict(global_keys=10**12, causal=None),
    "right alone": lambda: dict(global_keys=100, window=(None, 9), causal=None),
    "prefix": lambda: dict(global_keys=70, prefix_lengths=torch.tensor([LK, 0]),
        query_lengths=torch.tensor([LQ, 33])),
    "behind the keys": lambda: dict(global_keys=66, window=(40, 9), causal=None,
        key_lengths=torch.tensor([130, 60])),
    "segments": lambda: dict(
        global_keys=20, query_segments=torch.arange(LQ)[None] // 40,
        key_segments=torch.arange(LK)[None] // 90 % 2
    ),
    "bias of all": lambda: dict(global_keys=3, bias=draw(1, 2, LQ, LK)),
    "bias by key": lambda: dict(global_keys=70, bias=draw(1, 2, 1, LK)),
    "bias by query": lambda: dict(global_keys=70, bias=draw(1, 1, LQ, 1)),
    "large bias": lambda: dict(global_keys=70, bias=draw(1, 1, LQ, LK) + 3000.0),
    "T5": lambda: dict(global_keys=20, bias=table()),
    "ALiBi, dropout, sinks": lambda: dict(
        global_keys=5, bias=pt.AlibiBias(torch.tensor([0.5, 0.02])), dropout_p=0.3, dropout_seed=8,
        sinks=torch.tensor([0.5, -1.0])
    ),
    "mask": lambda: dict(global_keys=70, attn_mask=hidden()),
    "key padding": lambda: dict(global_keys=70, attn_mask=hidden()[:, :1, :1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_global_keys_within_the_bound(name: str) -> None:
    keywords = {"window": (30, 10), "causal": "bottom_right"} | CALLS[name]()
    args = qkv(LK if name in LONG else LQ, batch=2 if name in ("prefix", "behind the keys") else 1)
    check_attention(args, keywords, "triton", poisoned=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_dtypes_within_the_bound(dtype: torch.dtype) -> None:
    args = tuple(t.to(dtype) for t in qkv(key_heads=2))
    check_attention(
        args,
        {"window": (30, 10), "global_keys": 70, "causal": "bottom_right"},
        "triton",
        poisoned=True,
    )


BLOCKS: dict[str, tuple[Any, int, dict[str, Callable[[], Tensor]]]] = {
    "blocks of a tile, T5": (32, 20, {"table": lambda: draw(8, 2)}),
    "both runs in one block, T5": (512, 70, {"table": lambda: draw(8, 2)}),
    "blocks of two tiles, bias": ((32, 128), 70, {"bias": lambda: draw(1, 2, LQ, LK)}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_masks_within_the_bound(name: str) -> None:
    """Block boundaries split the lists at both ends of the gap."""
    size, first, more = BLOCKS[name]
    keywords = {"causal": "bottom_right", "window": (30, 0), "global_keys": first}
    mask = blobs(size, batch=1, heads=1, lq=LQ, lk=LK)
    check(
        mask,
        torch.float32,
        dict(zip(("query", "key", "value"), qkv())),
        {n: f() for n, f in more.items()},
        **keywords,
    )


def test_packed_equals_padded() -> None:
    offsets = torch.tensor([0, 5, 5, 73]), torch.tensor([0, 9, 20, 320])
    args = draw(73, 2, 16), draw(320, 1, 16, seed=1), draw(320, 1, 16, seed=2), *offsets, 68, 300
    check_packed(args, {"window": (9, 0), "global_keys": 70, "causal": "bottom_right"}, "triton")


# ---- decode

MANY = 9 * SPLIT_INTERPRETED.min_keys + 41
DECODED: dict[str, dict[str, Any]] = {
    "one split": dict(window=(20, 0), global_keys=4),
    "several, the gap within one": dict(window=(500, 0), global_keys=200),
    "most of them first": dict(window=(9, 0), global_keys=900),
    "lengths": dict(window=(300, 0), global_keys=130, key_lengths=torch.tensor([MANY, 150])),
    "not causal": dict(window=(100, 1000), global_keys=70, causal=None),
    "dropout, T5": dict(
        window=(300, 0), global_keys=70, bias=table(), dropout_p=0.2, dropout_seed=5
    ),
}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("num_queries", [1, 5])
def test_decode_within_the_bound(name: str, num_queries: int) -> None:
    check_attention(
        qkv(num_queries, MANY, batch=2),
        {"causal": "bottom_right"} | DECODED[name],
        "triton",
        poisoned=True,
    )


def test_splits_cover_visible_keys_only() -> None:
    """The first keys count like those of the window; the keys between do not."""

    def splits(keys: int, **options: Any) -> int:
        a = attention_op.prepare(
            *(torch.empty(1, 1, n, 16) for n in (1, keys, keys)), causal="bottom_right", **options
        )[0]
        return plan_forward(a).split_kv.splits

    assert (
        splits(10000, window=(60, 0), global_keys=4)
        == splits(300, window=(60, 0), global_keys=4)
        < splits(10000)
    )
    assert splits(10000, window=(60, 0), global_keys=9999) == splits(10000)


# ---- cost


def tiles_seen(
    lq: int, lk: int, left: int | None, right: int | None, first: int, causal: str | None, rows: int
) -> int:
    """Return the tiles with a visible pair, by the definition."""
    offset = lk - lq if causal else 0
    distance = torch.arange(lk) - torch.arange(lq)[:, None] - offset
    inside = (distance >= (-lk if left is None else -left)) & (
        distance <= (lk if right is None else right)
    )
    seen = (inside | (torch.arange(lk) < first)) & (distance <= (0 if causal else lk))
    BN = INTERPRETED["forward"].BN
    padded = torch.zeros(-(-lq // rows) * rows, -(-lk // BN) * BN, dtype=torch.bool)
    padded[:lq, :lk] = seen
    return int(padded.unfold(0, rows, rows).unfold(1, BN, BN).any((2, 3)).sum())


WINDOWS = (((50, 20), None), ((50, 0), "bottom_right"), ((None, 9), None))


@pytest.mark.parametrize(
    ("window", "causal", "first", "hidden_by"),
    [
        *((*window, first, "nothing") for window in WINDOWS for first in (4, 70, 300)),
        *(
            (*WINDOWS[0], first, hidden_by)
            for hidden_by in ("blocks", "mask", "bias")
            for first in (4, 70)
        ),
    ],
)
def test_hidden_gap_costs_no_products(
    products: Counter[str], window: Any, causal: Any, first: int, hidden_by: str
) -> None:
    """Each visible tile runs 2 products in forward, 3 in dq, 4 in dkdv and 2 for a bias.

    This holds for every way of listing the tiles.
    """
    lq, lk = 256, 512
    t = [draw(1, 1, n, 16).requires_grad_() for n in (lq, lk, lk)]
    options: dict[str, Any] = {"window": window, "causal": causal, "global_keys": first}
    dense = torch.ones(lq, lk, dtype=torch.bool)
    dense[7, 3] = False
    if hidden_by == "bias":
        options["bias"] = draw(lq, lk).requires_grad_()
        t.append(options["bias"])
    elif hidden_by != "nothing":
        options["attn_mask"] = (
            dense if hidden_by == "mask" else BlockMask.from_dense(dense, block_size=128)
        )
    tiles = tiles_seen(lq, lk, *window, first, causal, INTERPRETED["forward"].BM)
    assert tiles < lq * lk // (32 * 64)
    out = pt.attention(*t[:3], **options, backend="triton", strict=True)
    assert products["tiles"] == 2 * tiles
    torch.autograd.grad(out.sum(), t)
    assert products["tiles"] == (2 + 3 + 4 + 2 * (hidden_by == "bias")) * tiles


def test_decode_computes_visible_tiles_only(products: Counter[str]) -> None:
    for first, window in ((4, 20), (200, 500), (900, 9)):
        products.clear()
        t = [draw(1, 1, n, 16) for n in (1, MANY, MANY)]
        pt.attention(
            *t,
            window=(window, 0),
            global_keys=first,
            causal="bottom_right",
            backend="triton",
            strict=True,
        )
        assert products["tiles"] == 2 * tiles_seen(1, MANY, window, 0, first, "bottom_right", 16)


@pytest.mark.parametrize(
    ("where", "value"), [((0, 0), 10**6), ((0, 0), -(2**31)), ((1, 0), -7), ((2, 0), 10**9)]
)
def test_bad_lists_read_nothing_outside(
    integers_read: list[Tensor], where: tuple[int, int], value: int
) -> None:
    mask = BlockMask.from_dense(torch.ones(70, 400, dtype=torch.bool), block_size=32)
    tensors = {n: t.clone() for n, t in mask.blocks._asdict().items()}
    tensors["entries"][where] = value
    bad = BlockMask(mask.shape, mask.blocks)
    bad.blocks = type(mask.blocks)(**tensors)
    integers_read.extend(tensors.values())
    t = [place(torch.randn(1, 1, n, 16)).requires_grad_() for n in (70, 400, 400)]
    out = pt.attention(
        *t,
        attn_mask=bad,
        causal="bottom_right",
        window=(60, 0),
        global_keys=40,
        backend="triton",
        strict=True,
    )
    assert all(bool(x.isfinite().all()) for x in (out, *torch.autograd.grad(out.sum(), t)))


# ---- faults

# (file, line, replacement), and the entry of CALLS, DECODED or BLOCKS that detects it.
MUTANTS = {
    "first_tiles_skipped": ("mask.py", "jump = tl.maximum(bend - ahead, 0)", "jump = bend",
        "causal"),
    "steps_not_bent": ("mask.py", "tl.where(n < gap[0], n - gap[1], n)", "n", "causal"),
    "last_of_the_first_skipped": ("mask.py", "(near_end - origin + C.BN - 1) // C.BN, 0)",
    "(near_end - origin) // C.BN, 0)", "mask"),
    "first_keys_behind_the_window_skipped": ("mask.py", "tl.maximum(run.last, ahead)",
        "run.last", "as many as there are"),
    "first_keys_tested_away": ("mask.py", "m_s | (of_keys(j, C) < of_queries(bounds[2], C))",
        "m_s", "causal"),
    "first_keys_read_as_zero": ("mask.py", "m_j | ((j >= 0) & (j < seen[2]))", "m_j", "causal"),
    "between_read": ("mask.py", "(j >= 0) & (j < seen[2])", "(j >= 0) & (j < seen[1])",
        "one split"),
    "seen_before_causality": ("mask.py", "tl.minimum(near, p.global_keys - p.key_start)",
        "lo * 0 + p.global_keys", "early"),
    "right_of_the_window_lost": ("mask.py", "hi = tl.maximum(hi, near)", "hi = hi",
        "right alone"),
    "one_key_without_all_queries": ("mask.py", "m_global = j < p.global_keys",
        "m_global = j < -1 + p.global_keys", "causal"),
    "later_queries_of_the_window_alone": ("mask.py", "tl.where(m_global, to_query, hi)", "hi",
        "causal"),
    "earlier_queries_of_the_window_alone": ("mask.py", "tl.where(m_global, from_query, lo)", "lo",
        "right alone"),
    "causality_of_keys_lost": ("mask.py", "tl.where(m_global, from_query, lo)",
        "tl.where(m_global, 0, lo)", "early"),
    "splits_without_the_first_keys": ("fwd.py", "span += p.global_keys + 2 * C.BN", "span += 0",
        "most of them first"),
    "diagonals_across_the_gap": ("bwd.py", "if C.BLOCK_KEYS or C.GAP:", "if C.BLOCK_KEYS:", "T5"),
    "bias_of_the_first_keys_lost": ("mask.py", "tl.maximum(t, tl.minimum(t + gap[1], gap[0]))",
        "t", "bias of all"),
    "listed_first_tiles_lost": ("mask.py", "jump = bend - tl.maximum(near_end, near)",
        "jump = bend - near", "blocks of a tile, T5"),
    "listed_window_misplaced": ("mask.py", "PER) + (behind - entry) * PER", "PER) + 0 * PER",
    "blocks of a tile, T5"),
    "listed_first_step_lost": ("mask.py", "near = tl.minimum(near, PER)", "near = near + 1",
        "both runs in one block, T5"),
}  # fmt: skip


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_faults_are_detected(name: str, tmp_path: Path) -> None:
    *fault, shown = MUTANTS[name]
    with mutated("attention", *fault, tmp_path), pytest.raises(AssertionError, match="WRONG"):
        if shown in DECODED:
            test_decode_within_the_bound(shown, 1)
        else:
            (
                test_block_masks_within_the_bound
                if shown in BLOCKS
                else test_global_keys_within_the_bound
            )(shown)


def test_computing_the_gap_is_detected(products: Counter[str], tmp_path: Path) -> None:
    """Its tiles would change no value; the number of products shows them."""
    with mutated(
        "attention",
        "mask.py",
        "jump = tl.maximum(bend - ahead, 0)",
        "bend *= 0\n        jump = bend",
        tmp_path,
    ):
        test_global_keys_within_the_bound("causal")
        with pytest.raises(AssertionError, match="=="):
            products.clear()
            test_decode_computes_visible_tiles_only(products)
