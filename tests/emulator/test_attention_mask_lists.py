# SPDX-License-Identifier: Apache-2.0
"""Dense boolean masks on the emulated backend "cuda": block lists, their cost, strides.

attention_problems.py has values and gradients of chosen problems.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_problems import by_blocks, t5
from run_problems import Share
from test_attention_blocks import BF16, normal, products, results
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._backends.cuda import attention as cuda_attention
from pytransformer.ops._problem.attention import LISTING
from pytransformer.ops.attention import attention_op
from support.attention_check import check_attention

FUZZ_CASES = 4
SHAPE = (300, 410)

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


@pytest.fixture
def draw() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def unlisted() -> Iterator[pytest.MonkeyPatch]:
    """Disable lists, as on a GPU for masks of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_attention, "LISTING_EMULATED", LISTING)
        yield patch


def inputs(*shape: int, heads: int = 2, dtype: torch.dtype = BF16) -> list[Tensor]:
    return [normal(1, heads, n, 64, dtype=dtype) for n in (shape[0], shape[1], shape[1])]


# ---- cost


def test_dense_mask_costs_its_visible_blocks(draw: Any, unlisted: pytest.MonkeyPatch) -> None:
    """Products and bits equal those of the block mask.

    Without lists the bits are equal and the products more.
    """
    mask, given = by_blocks(draw, (1, 1, *SHAPE)), inputs(*SHAPE)
    blocks = pt.BlockMask.from_dense(mask, block_size=128)
    assert 0 < blocks.share < 0.7
    found, most = products(given, attn_mask=mask)
    unlisted.undo()
    want, fewest = products(given, attn_mask=blocks)
    listed, made = products(given, attn_mask=mask)
    assert made == fewest < 0.8 * most
    for one, two, three in zip(want, listed, found):
        assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_empty_blocks_do_not_affect_results(draw: Any, dtype: torch.dtype) -> None:
    """NaN in keys, values, queries and upstream gradients of empty blocks changes no bit."""
    mask = by_blocks(draw, (1, 1, *SHAPE))
    mask[..., 128:256], mask[..., 128:256, :] = False, False  # a block of keys and one of queries
    clean, other = inputs(*SHAPE, dtype=dtype), []
    for t in clean:
        other.append(t.clone())
        other[-1][..., 128:256, :] = torch.nan
    for one, two in zip(results(clean, attn_mask=mask), results(other, attn_mask=mask)):
        two = two.where(one != 0, 0.0)  # the NaN rows give zeros
        assert torch.equal(one, two) and not one[..., 128:256, :].count_nonzero()


def test_empty_masks_give_zeros() -> None:
    found, made = products(inputs(*SHAPE), attn_mask=torch.zeros(*SHAPE, dtype=torch.bool))
    assert made == 0 and all(not t.count_nonzero() for t in found)


def test_full_blocks_read_no_mask(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask of ones has the bits of no mask by the same kernels."""
    given, mask = inputs(*SHAPE), torch.ones(*SHAPE, dtype=torch.bool)
    # A stride of 0 would make it key padding.
    mask = mask.mT.contiguous().mT
    zero = pt.AlibiBias(torch.zeros(2))  # the kernels with score_mod
    for one, two in zip(results(given, attn_mask=mask, bias=zero), results(given, bias=zero)):
        assert torch.equal(one, two)


# ---- strides


def strided(mask: Tensor, how: str) -> Tensor:
    """Return the same mask in another memory layout."""
    rows, keys = mask.shape[-2:]
    if how == "every second key":
        wide = torch.ones(*mask.shape[:-1], 2 * keys, dtype=torch.bool)
        wide[..., ::2] = mask
        return wide[..., ::2]
    if how == "in longer rows":
        wide = torch.ones(*mask.shape[:-1], keys + 7, dtype=torch.bool)
        wide[..., 3 : 3 + keys] = mask
        return wide[..., 3 : 3 + keys]
    if how == "queries side by side":
        return mask.mT.contiguous().mT
    assert how == "expanded"
    return mask.expand(1, 2, rows, keys)


@pytest.mark.parametrize("shape", [SHAPE, (260, 400)])  # rows of 400 keys are 25 words of 16
@pytest.mark.parametrize(
    "how", ["every second key", "in longer rows", "queries side by side", "expanded"]
)
def test_strides_change_no_bit(how: str, shape: tuple[int, int], draw: Any) -> None:
    mask, given = by_blocks(draw, (1, 1, *shape)), inputs(*shape)
    want, least = products(given, attn_mask=mask)
    found, made = products(given, attn_mask=strided(mask, how))
    assert made == least
    assert all(torch.equal(*both) for both in zip(want, found))


# ---- selection


def test_lists_follow_the_rule_of_the_backend() -> None:
    """Triton has the same rule."""

    def listed(heads: int, mask: Tensor, **changes: Any) -> bool:
        q, k = (
            torch.empty(2, heads, n, 16, device="meta") for n in (mask.shape[-2], mask.shape[-1])
        )
        return (
            attention_op.prepare(q, k, k, attn_mask=mask)[0]._replace(**changes).lists_mask(LISTING)
        )

    empty = lambda *shape: torch.empty(*shape, dtype=torch.bool, device="meta")
    assert listed(4, empty(1024, 1024)) and listed(8, empty(2, 1, 1024, 1024))
    assert (
        not listed(4, empty(896, 896))
        and not listed(4, empty(2, 1, 1024, 1024))
        and not listed(3, empty(1024, 1024))
    )
    assert not listed(4, empty(1024, 1024), key_start=7)
    assert not listed(4, torch.empty(1024, 1024, device="meta"))


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_sm90_and_portable_kernels_walk_lists(dropout: float, draw: Any) -> None:
    """Both walk lists in forward, and the portable kernels in backward.

    Wide heads with dropout are included.
    """
    shape = (140, 260)
    mask, query = by_blocks(draw, (1, 1, *shape)), draw(1, 2, shape[0], 160).to(BF16)
    keys = [draw(1, 1, shape[1], 160).to(BF16) for _ in range(2)]
    keywords = {"dropout_p": dropout, "dropout_seed": 3} if dropout else {}
    check_attention((query, *keys), {"attn_mask": mask, **keywords}, "cuda", poisoned=True)
    notes = pt.explain("attention", query, *keys, attn_mask=mask, **keywords, backend="cuda").notes
    (note,) = (note for note in notes if note.startswith("cuda:"))
    assert "blocks of 128 x 128 pairs run" in note and ("portable kernels" in note) == bool(dropout)


def test_explain_reports_the_share(draw: Any, unlisted: pytest.MonkeyPatch) -> None:
    mask, given = by_blocks(draw, (1, 1, *SHAPE)), inputs(*SHAPE)
    output = lambda: pt.explain("attention", *given, attn_mask=mask, backend="cuda")
    without = output()
    assert not any("blocks" in note for note in without.notes)
    unlisted.undo()
    blocks = pt.BlockMask.from_dense(mask, block_size=128)
    with_lists = output()
    (note,) = (note for note in with_lists.notes if "attn_mask" in note)
    assert f"{blocks.share:.1%} of the 12 blocks of 128 x 128 pairs run" in note
    assert with_lists.extra_bytes["cuda"] - without.extra_bytes["cuda"] == 4 * (
        5 * 12 + 2 * (3 + 4)
    )


# ---- random problems


def random_problem(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    batch, heads, lq, lk = (
        r.choice((1, 2)),
        r.choice((1, 2)),
        r.randrange(2, 290),
        r.randrange(129, 420),
    )
    d, dv = (r.choice((16, 24, 64, 72, 128, 160)) for _ in range(2))
    dtype = r.choice((BF16, torch.float16, torch.float32))
    mask = by_blocks(draw, (r.choice((1, batch)), r.choice((1, heads)), lq, lk))
    keywords: dict[str, Any] = {
        "attn_mask": strided(mask, "queries side by side") if r.random() < 0.3 else mask
    }
    if r.random() < 0.4:
        keywords["causal"] = r.choice(("top_left", "bottom_right"))
    if r.random() < 0.4:
        keywords["window"] = (r.randrange(lk), r.choice((None, r.randrange(lk))))
        if r.random() < 0.5:
            keywords["global_keys"] = r.randrange(1, 150)
    if r.random() < 0.4:
        keywords["key_lengths"] = torch.tensor([r.randrange(lk + 1) for _ in range(batch)])
    if r.random() < 0.4:
        keywords["bias"] = r.choice(
            (t5(draw, heads, True), pt.AlibiBias(draw(heads).abs()), draw(1, heads, lq, lk))
        )
    if r.random() < 0.3:
        keywords |= {"dropout_p": 0.3, "dropout_seed": seed}
    if r.random() < 0.3:
        keywords["sinks"] = draw(heads)
    shapes = ((batch, heads, lq, d), (batch, 1, lk, d), (batch, 1, lk, dv))
    return tuple(draw(*shape).to(dtype) for shape in shapes), keywords


def test_random_problems(schedule: int, share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a visible pair contain NaN; float64 is the reference; all problems use lists."""
    listed: list[bool] = []
    inner = type(attention_op.prepare(*inputs(1, 1))[0]).lists_mask
    monkeypatch.setattr(
        attention_op.Arguments,
        "lists_mask",
        lambda a, how: (listed.append(inner(a, how)), listed[-1])[1],
    )
    for seed in share(range(schedule * 100, schedule * 100 + FUZZ_CASES)):
        args, keywords = random_problem(seed)
        print(seed, [tuple(t.shape) for t in args], args[0].dtype, sorted(keywords))
        check_attention(args, keywords, "cuda", poisoned=True)
    assert listed and all(listed)
