# SPDX-License-Identifier: Apache-2.0
"""Caches of sequences of different lengths: each equals the sequence alone; no padding is read."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer import nn
from support.models import assert_same_logits

BATCH, WIDTH, MAX = 4, 16, 24


def layer() -> nn.MultiHeadAttention:
    torch.manual_seed(3)
    return nn.MultiHeadAttention(WIDTH, 4, num_kv_heads=2).eval()


def contiguous() -> nn.DecoderCache:
    return nn.KeyValueCache(1, MAX)


def paged(page_size: int) -> nn.DecoderCache:
    """Return a cache with pages in random order and no spare page."""
    cache = nn.PagedCache(1, 6 * -(-MAX // page_size), page_size)
    torch.manual_seed(7)
    cache.pages._free = torch.randperm(cache.pages.num_pages).tolist()
    return cache


CACHES = {"contiguous": contiguous, **{f"pages of {n}": partial(paged, n) for n in (1, 4, 7, 64)}}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> Any:
    return CACHES[request.param]()


def feed(
    attention: nn.MultiHeadAttention,
    cache: nn.DecoderCache,
    x: torch.Tensor,
    counts: list[int] | None,
) -> torch.Tensor:
    """Append counts[b] of each row's tokens, NaN in the columns behind; None: all columns."""
    if counts is None:
        step = cache.step(x)
    else:
        held = cache.lengths if cache.length else torch.zeros(len(x), dtype=torch.int64)
        step = cache.step(x, held + torch.tensor(counts))
    return attention(x, cache=cache.layers[0], **step.visible)


def tokens(
    attention: nn.MultiHeadAttention, cache: nn.DecoderCache, rounds: list[list[int] | int]
) -> None:
    """Append rounds of new tokens and compare each output with the full row.

    Each sequence is a prefix of its row.
    """
    x = torch.randn(BATCH, MAX, WIDTH, generator=torch.Generator().manual_seed(5))
    whole = attention(x, causal="top_left")
    done = [0] * BATCH
    for counts in rounds:
        each = [counts] * BATCH if isinstance(counts, int) else counts
        piece = torch.full((BATCH, max(each), WIDTH), torch.nan)
        for b, n in enumerate(each):
            piece[b, :n] = x[b, done[b] : done[b] + n]
        out = feed(attention, cache, piece, None if isinstance(counts, int) else each)
        for b, n in enumerate(each):
            if n:
                assert_same_logits(out[b, :n], whole[b, done[b] : done[b] + n])
            done[b] += n
        assert cache.lengths.tolist() == done
        assert cache.length == max(done)


ROUNDS: dict[str, list[list[int] | int]] = {
    "ragged prompts, single steps": [[5, 1, 9, 3], 1, 1, 1, 1],
    "equal, then ragged": [6, [1, 0, 2, 3], 1, [0, 0, 0, 1]],
    "pieces": [[5, 1, 9, 3], [3, 7, 1, 0], [2, 2, 2, 2], [0, 8, 0, 9], 3],
    "nothing at first": [[0, 4, 0, 1], [2, 1, 0, 0], 1, 5],
    "to the brim": [[1, 20, 3, 23], [1, 3, 0, 1], [0, 1, 21, 0]],
}


@torch.no_grad()
@pytest.mark.parametrize("name", ROUNDS)
def test_each_sequence_equals_the_sequence_alone(backend: str, cache: Any, name: str) -> None:
    with pt.use_backend(attention=backend):
        tokens(layer(), cache, ROUNDS[name])


@torch.no_grad()
def test_reordered_and_cropped_caches_equal_new_ones(cache: Any) -> None:
    attention = layer()
    x = torch.randn(BATCH, MAX, WIDTH)
    whole = attention(x, causal="top_left")
    feed(attention, cache, x[:, :9], [5, 1, 9, 3])
    cache.reorder(torch.tensor([2, 2, 0, 1, 3, 2]))
    assert cache.lengths.tolist() == [9, 9, 5, 1, 3, 9]
    cache.crop(torch.tensor([4, 9, 5, 0, 2, 8]))
    at, rows = cache.lengths.clone(), [2, 2, 0, 1, 3, 2]
    assert at.tolist() == [4, 9, 5, 0, 2, 8]
    for _ in range(3):
        out = feed(
            attention,
            cache,
            torch.stack([x[r, n] for r, n in zip(rows, at.tolist())])[:, None],
            None,
        )
        assert_same_logits(out[:, 0], torch.stack([whole[r, n] for r, n in zip(rows, at.tolist())]))
        at += 1
    cache.crop(3)
    assert cache.lengths.tolist() == [3] * 6
    out = feed(attention, cache, x[rows, 3:5], None)
    assert_same_logits(out, whole[rows, 3:5])
    cache.free()
    assert cache.length == 0
    assert_same_logits(feed(attention, cache, x[:, :4], None), whole[:, :4])


@torch.no_grad()
def test_invalid_lengths_are_named(cache: Any) -> None:
    x = torch.randn(BATCH, 9, WIDTH)
    feed(layer(), cache, x, [5, 1, 9, 3])
    with pytest.raises(
        ValueError,
        match=(
            r"sequence 1 holds 1 tokens and 2 columns came; expected a length from 1 to 3, .* got 4"
        ),
    ):
        cache.step(x[:, :2], torch.tensor([5, 4, 9, 3]))
    with pytest.raises(ValueError, match=r"sequence 2 holds 9 tokens.* got 8"):
        cache.step(x[:, :2], torch.tensor([5, 1, 8, 3]))
    with pytest.raises(
        ValueError,
        match=r"differ in length; expected attention_mask as lengths \(4,\).* got shape \(4, 10\)",
    ):
        cache.step(x[:, :1], torch.ones(BATCH, 10))
    with pytest.raises(ValueError, match=r"holds 4 sequences, got 3"):
        cache.step(x[:3, :1])
    with pytest.raises(
        ValueError, match=r"crop: lengths must be from 0 to \[5, 1, 9, 3\], got \[5, 2, 9, 3\]"
    ):
        cache.crop(torch.tensor([5, 2, 9, 3]))


@torch.no_grad()
def test_writes_beyond_max_length_raise() -> None:
    cache: Any = nn.KeyValueCache(1, 10)
    x = torch.randn(BATCH, 9, WIDTH)
    feed(layer(), cache, x, [5, 1, 9, 3])
    feed(layer(), cache, x[:, :1], None)
    with pytest.raises(ValueError, match=r"11 positions, but it was made for max_length=10"):
        feed(layer(), cache, x[:, :1], None)
    cache = contiguous()
    feed(layer(), cache, x, [5, 1, 9, 3])
    layer()(x[:, :1], cache=cache.layers[0], **cache.step(x[:, :1]).visible)
    with pytest.raises(ValueError, match=r"differ in length; call cache.step before its layers"):
        layer()(x[:, :1], cache=cache.layers[0], causal="bottom_right")


@pytest.mark.parametrize("paged", [False, True])
def test_caches_write_with_the_kernel(paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a query needs no rotation but must not use the reference.

    The reference's list of tokens would synchronize with a GPU.
    """
    from pytransformer.nn.cache import write
    from pytransformer.ops.append_kv import append_kv_op

    key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 16)
    shape, table = ((6, 3, 4), torch.tensor([[5, 1], [0, 3]])) if paged else ((2, 3, 8), None)
    cache = pt.KeyValues(torch.zeros(*shape, 8), torch.zeros(*shape, 16), table)
    monkeypatch.setattr(append_kv_op, "reference", lambda a: pytest.fail("on the reference"))
    with pt.use_backend(append_kv="cpu"):
        write(cache, key, value, torch.tensor([[0, 1, 2, -1], [3, 4, 5, 6]]))
    for pool, new in ((cache.key, key), (cache.value, value)):
        rows = pool if table is None else pool[table].transpose(1, 2).flatten(2, 3)
        assert torch.equal(rows[0, :, :3], new[0, :, :3]) and torch.equal(rows[1, :, 3:7], new[1])
        assert rows[0, :, 3:].count_nonzero() == rows[1, :, :3].count_nonzero() == 0
