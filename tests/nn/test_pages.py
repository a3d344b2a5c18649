# SPDX-License-Identifier: Apache-2.0
"""Pages against a model with separate contents per sequence; caches read no other page."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer import nn
from support.models import assert_same_logits
from support.pages import check_pages, poison_free_rows


class Contents:
    """The real contents of pages beside :class:`nn.Pages`.

    Each written position is a token, and copies follow its instructions.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.pages, self.size = nn.Pages(num_pages, page_size), page_size
        self.slots: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.truth: dict[int, list[int]] = {}

    def grow(self, new: dict[int, list[int]]) -> None:
        held = {name: self.pages.lengths[name] for name in new}
        for source, to in self.pages.grow({name: len(tokens) for name, tokens in new.items()}):
            self.slots[to] = list(self.slots[source])
        for name, tokens in new.items():
            for at, token in enumerate(tokens, held[name]):
                self.slots[self.pages.tables[name][at // self.size]][at % self.size] = token
            self.truth[name] += tokens

    def open(self, tokens: list[int]) -> int:
        name = self.pages.open(tokens)
        self.truth[name] = tokens[: self.pages.lengths[name]]
        return name

    def check(self) -> None:
        pages, size = self.pages, self.size
        assert pages.tables.keys() == self.truth.keys()
        for name, truth in self.truth.items():
            table = pages.tables[name]
            assert pages.lengths[name] == len(truth)
            assert [self.slots[table[i // size]][i % size] for i in range(len(truth))] == truth
        check_pages(pages)
        for page, (key, _) in pages._known.items():
            assert self.slots[page] == list(key[1]), "a known page holds what it is known by"


@pytest.mark.parametrize("seed", range(8))
def test_random_histories_equal_a_model(seed: int) -> None:
    """Sequences of two tokens share prefixes often; few pages cause evictions and shortages."""
    rng = random.Random(seed)
    c = Contents(rng.choice([7, 16, 31]), rng.choice([1, 2, 3, 8]))
    lacking = shared = 0
    for _ in range(1500):
        names = list(c.truth)
        act = (
            rng.choice(["open", "grow", "grow", "grow", "fork", "crop", "close", "know"])
            if names
            else "open"
        )
        if act == "open":
            expected = [rng.randrange(2) for _ in range(rng.randrange(4 * c.size))]
            name = c.open(expected)
            assert c.truth[name] == expected[: len(c.truth[name])]
            assert not expected or len(c.truth[name]) < len(expected)
            shared += bool(c.truth[name])
        elif act == "grow":
            some = rng.sample(names, rng.randint(1, min(4, len(names))))
            new = {
                name: [rng.randrange(2) for _ in range(rng.randrange(2 * c.size + 1))]
                for name in some
            }
            before = c.pages.available
            try:
                c.grow(new)
            except nn.OutOfPages:
                lacking += 1
                assert c.pages.available == before
        elif act == "fork":
            name = rng.choice(names)
            c.truth[c.pages.fork(name)] = list(c.truth[name])
        elif act == "crop":
            name = rng.choice(names)
            length = rng.randint(0, len(c.truth[name]))
            c.pages.crop(name, length)
            del c.truth[name][length:]
        elif act == "close":
            name = rng.choice(names)
            c.pages.close(name)
            del c.truth[name]
        else:
            name = rng.choice(names)
            c.pages.know(name, c.truth[name])
        c.check()
    assert lacking, "pages were never short, which proves little"
    assert shared or c.size == 8, "no prefix was ever found"
    for name in list(c.truth):
        c.pages.close(name)
    assert c.pages.available == c.pages.num_pages


def test_grow_needs_no_more_pages_than_reported() -> None:
    """One page is free and three beams share another.

    Growing two of them alone needs a copy each; growing all three needs two.
    """
    pages = nn.Pages(3, 4)
    first = pages.open()
    pages.grow({first: 2})
    beams = [first, pages.fork(first), pages.fork(first)]
    assert pages.grow(dict.fromkeys(beams, 1)) == [(0, 1), (0, 2)]
    assert sorted(page for name in beams for page in pages.tables[name]) == [0, 1, 2]
    with pytest.raises(
        nn.OutOfPages,
        match=r"3 more pages of 4 .* and 0 of 3 are without a sequence; .* num_pages=6 or more",
    ):
        pages.grow(dict.fromkeys(beams, 2))
    assert [pages.lengths[name] for name in beams] == [3, 3, 3]


def test_lru_page_is_evicted_first() -> None:
    pages = nn.Pages(4, 2)
    texts = {"a": [1, 1, 9], "b": [2, 2, 9], "c": [3, 3, 9]}
    for text in texts.values():
        name = pages.open(text)
        pages.grow({name: 2})
        pages.know(name, text)
        pages.close(name)
    found = lambda text: (
        pages.lengths[opened[-1]] if opened.append(pages.open(texts[text])) is None else 0
    )
    opened: list[int] = []
    assert found("a") == 2
    pages.close(opened[0])  # now b is the least recently used
    long = pages.open()
    pages.grow({long: 4})  # the free page, and b's
    assert [found(text) for text in "bca"] == [0, 2, 2]


def test_ten_thousand_requests_leak_no_page() -> None:
    rng, pages = random.Random(1), nn.Pages(256, 16)
    alive: dict[int, list[int]] = {}
    joined = found = 0
    while joined < 10_000 or alive:
        if joined < 10_000 and len(alive) < 24:
            prompt = [rng.randrange(3)] * rng.choice([16, 32, 48]) + [joined]
            name = pages.open(prompt)
            found += pages.lengths[name] > 0
            pages.grow({name: len(prompt) - pages.lengths[name]})
            pages.know(name, prompt)
            alive[name] = prompt
            joined += 1
        for name in list(alive):
            pages.grow({name: rng.choice([1, 1, 20])})  # rejected drafts, unused reservations
            alive[name].append(rng.randrange(100))
            pages.crop(name, len(alive[name]))
            if rng.random() < 0.1 or len(alive[name]) > 140:
                pages.know(name, alive[name])
                pages.close(name)
                del alive[name]
    assert found > 5_000
    assert pages.available == 256
    assert pages.counts == [0] * 256
    assert not pages.tables
    assert not pages.lengths
    assert len(pages._known) == len(pages._pages) == len(pages._idle) <= 256


def test_ten_thousand_requests_read_their_own_tokens() -> None:
    """Requests share and reuse pages in random order.

    With keys of zero, attention returns the mean of the request's tokens.
    """
    rng, cache = random.Random(2), nn.PagedCache(1, 160, 4)
    rng.shuffle(cache.pages._free)
    held, texts, joined, shared = cache.pages.lengths, dict[int, list[int]](), 0, 0
    while joined < 10_000 or texts:
        for name in texts:
            texts[name].append(rng.randrange(1000))
        while joined < 10_000 and len(texts) < 32 and cache.pages.available > 40:
            prompt = [rng.randrange(5)] * rng.choice([4, 8, 9]) + [joined % 1000]
            name = cache.open(prompt)
            texts[name], joined, shared = prompt, joined + 1, shared + (held[name] > 0)
        cache.select(list(texts))
        numbers = [
            [token + 1000 * i for i, token in enumerate(text)] for text in texts.values()
        ]  # distinct by position too
        pieces = [number[held[name] :] for name, number in zip(texts, numbers)]
        width = max(map(len, pieces))
        output = torch.tensor(
            [piece + [0] * (width - len(piece)) for piece in pieces], dtype=torch.float64
        )[:, None, :, None]
        lengths = torch.tensor([len(text) for text in texts.values()])
        step = cache.step(output[:, 0, :, 0], lengths)
        zeros = torch.zeros_like(output)
        found = pt.attention(zeros, *cache.layers[0].append(zeros, output), **step.visible)
        last = found[:, 0, :, 0].gather(1, torch.tensor([[len(piece) - 1] for piece in pieces]))
        want = torch.tensor(
            [[sum(number) / len(number)] for number in numbers], dtype=torch.float64
        )
        torch.testing.assert_close(last, want, rtol=1e-9, atol=1e-9)
        for name in [name for name in texts if rng.random() < 0.2 or len(texts[name]) > 18]:
            cache.know(name, texts.pop(name))
            cache.close(name)
    assert shared > 5_000
    assert cache.pages.available == 160 and cache.pages.counts == [0] * 160


# ---- with tensors

WIDTH = 16


def attention() -> nn.MultiHeadAttention:
    torch.manual_seed(3)
    return nn.MultiHeadAttention(WIDTH, 4, num_kv_heads=2).eval()


def feed(
    layer: nn.MultiHeadAttention, cache: nn.PagedCache, x: torch.Tensor, lengths: Any = None
) -> torch.Tensor:
    return layer(x, cache=cache.layers[0], **cache.step(x, lengths).visible)


@torch.no_grad()
def test_shared_and_forked_sequences_read_no_other_page() -> None:
    """Every free row is NaN before every call; each sequence equals the sequence alone."""
    layer, rng = attention(), random.Random(3)
    cache = nn.PagedCache(1, 24, page_size=4)
    words = torch.randn(
        3, 40, WIDTH
    )  # token t at position i is words[t, i], so tokens and position determine a page
    alive: dict[int, list[int]] = {}
    found = forks = 0
    for _ in range(150):
        if len(alive) < 5 and rng.random() < 0.6:
            if alive and rng.random() < 0.4:
                name = rng.choice(list(alive))
                alive[cache.fork(name)] = list(alive[name])
                forks += 1
            else:
                prompt = [0] * rng.randrange(1, 10)
                name = cache.open(prompt)
                found += cache.pages.lengths[name] > 0
                alive[name] = prompt[: cache.pages.lengths[name]]
        names = rng.sample(list(alive), len(alive))
        new = {
            name: [rng.choice([0, 0, 0, 1, 2]) for _ in range(rng.choice([0, 1, 1, 1, 3]))]
            for name in names
        }
        if not names or not any(new.values()):
            continue
        cache.select(names)
        x = torch.full((len(names), max(map(len, new.values())), WIDTH), torch.nan)
        for b, name in enumerate(names):
            for i, token in enumerate(new[name]):
                x[b, i] = words[token, len(alive[name]) + i]
        poison_free_rows(cache)
        out = feed(
            layer, cache, x, cache.lengths + torch.tensor([len(new[name]) for name in names])
        )
        for b, name in enumerate(names):
            held, alive[name] = len(alive[name]), alive[name] + new[name]
            if new[name]:
                whole = layer(
                    torch.stack([words[t, i] for i, t in enumerate(alive[name])])[None],
                    causal="top_left",
                )
                assert_same_logits(out[b, : len(new[name])], whole[0, held:])
            cache.know(name, alive[name])
            if len(alive[name]) > 14 or rng.random() < 0.1:
                cache.close(name)
                del alive[name]
    assert found > 5
    assert forks > 5
    for name in alive:
        cache.close(name)
    assert cache.pages.available == 24


@torch.no_grad()
def test_tables_with_invalid_pages_are_refused() -> None:
    layer, cache = attention(), nn.PagedCache(1, 6, page_size=4)
    feed(layer, cache, torch.randn(2, 6, WIDTH))
    cache.pages.tables[cache.rows[1]][0] = 6
    with pytest.raises(ValueError, match=r"page_table\[1, 0\] must be a page from 0 to 5, got 6"):
        feed(layer, cache, torch.randn(2, 1, WIDTH))


@torch.no_grad()
def test_full_pool_raises_with_the_number_of_pages() -> None:
    layer, cache = attention(), nn.PagedCache(1, 6, page_size=4)
    with pytest.raises(
        nn.OutOfPages,
        match=r"8 more pages of 4 .* and 6 of 6 are without a sequence.* num_pages=8 or",
    ):
        feed(layer, cache, torch.randn(2, 13, WIDTH))
    assert cache.pages.available == 6
    assert not cache.rows, "a batch that was refused has not begun"
    feed(layer, cache, torch.randn(2, 12, WIDTH))
    with pytest.raises(nn.OutOfPages, match="2 more pages"):
        feed(layer, cache, torch.randn(2, 1, WIDTH))
    assert cache.lengths.tolist() == [12, 12]


@torch.no_grad()
def test_masks_with_left_padding_equal_full_attention() -> None:
    layer, x = attention(), torch.randn(2, 9, WIDTH)
    mask = torch.arange(9) >= torch.tensor([0, 4])[:, None]
    whole = layer(x, **nn.causal(nn.padding(mask, 2, 9), 0, 9))
    cache = nn.PagedCache(1, 6, page_size=4)
    pieces = [feed(layer, cache, x[:, a:b], mask[:, :b]) for a, b in ((0, 5), (5, 6), (6, 9))]
    assert_same_logits(torch.cat(pieces, 1)[mask], whole[mask])


@torch.no_grad()
def test_taps_see_the_keys_of_pages() -> None:
    layer, x = attention(), torch.randn(2, 9, WIDTH)
    caches = nn.PagedCache(1, 8, page_size=4), nn.KeyValueCache(1, 16)
    seen = []
    for cache in caches:
        layer(x[:, :8], cache=cache.layers[0], **cache.step(x[:, :8], torch.tensor([8, 3])).visible)
        with nn.taps(layer) as record:
            layer(x[:, 8:], cache=cache.layers[0], **cache.step(x[:, 8:]).visible)
        seen.append(record[""].weights())
    assert_same_logits(seen[0][..., :9], seen[1])
    assert not seen[0][..., 9:].any()


def test_invalid_paged_updates_are_refused() -> None:
    layer, x = attention(), torch.randn(2, 3, WIDTH)
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        nn.PagedCache(1, 0)
    cache = nn.PagedCache(1, 4, page_size=4)
    with pytest.raises(ValueError, match="PagedCache is for inference"):
        feed(layer, cache, x)
    with torch.no_grad():
        cache.free()
        feed(layer, cache, x)
        with pytest.raises(ValueError, match=r"call cache\.step before its layers"):
            layer(x, cache=cache.layers[0])
        with pytest.raises(ValueError, match="expected different open sequences"):
            cache.select([cache.rows[0]] * 2)
        with pytest.raises(ValueError, match="expected different open sequences"):
            cache.select([99])
        cache.layers[0].cross = (x, x)
        with pytest.raises(ValueError, match=r"follow reorder\(\) alone"):
            cache.select(cache.rows)
        cache.reset()
        with pytest.raises(
            ValueError, match=r"key must be \(1, 2, 3, 4\) as before, got \(2, 2, 3, 4\)"
        ):
            cache.step(x[:1])
            layer(x, cache=cache.layers[0])
