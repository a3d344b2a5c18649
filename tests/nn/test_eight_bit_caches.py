# SPDX-License-Identifier: Apache-2.0
"""8-bit caches, paged or not, in chunks or not, alone or in a batch, give equal values.

Forks and copies include the scales.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer import nn
from pytransformer.models import GPT, T5, GPTConfig, T5Config
from pytransformer.models.generation import Decoding, generate
from pytransformer.models.serving import Batcher
from support.models import assert_same_logits
from support.pages import poison_free_rows

EIGHT = [torch.float8_e4m3fn, torch.int8]
WIDTH = 32


def layer() -> nn.MultiHeadAttention:
    torch.manual_seed(3)
    return nn.MultiHeadAttention(WIDTH, 4, num_kv_heads=2).eval()


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(5)
    model = GPT(
        GPTConfig(
            vocab_size=23,
            d_model=32,
            num_layers=2,
            num_heads=4,
            max_length=48,
            tied=False,
            **changes,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


def feed(
    attention: nn.MultiHeadAttention, cache: nn.DecoderCache, x: torch.Tensor, lengths: Any = None
) -> torch.Tensor:
    return attention(x, cache=cache.layers[0], **cache.step(x, lengths).visible)


def caches(dtype: torch.dtype, length: int = 40) -> dict[str, nn.DecoderCache]:
    return {
        "contiguous": nn.KeyValueCache(1, length, dtype),
        "paged": nn.PagedCache(1, 40, 4, dtype),
    }


@torch.no_grad()
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_cached_rows_equal_quantize_kv(kind: str, dtype: torch.dtype) -> None:
    """Attention reads each appended row as quantized alone."""
    attention, cache = layer(), caches(dtype)[kind]
    x = torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(1))
    held: list[list[torch.Tensor]] = [[], []]
    inner = cache.layers[0].append
    cache.layers[0].append = lambda k, v: (held[0].append(k), held[1].append(v), inner(k, v))[2]  # type: ignore[method-assign]
    found = torch.cat(
        [feed(attention, cache, x[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 16), (16, 17))], 1
    )
    plain = [pt.dequantize_kv(*pt.quantize_kv(torch.cat(t, 2), dtype)) for t in held]
    query = attention.qkv(x)[..., : 4 * 8].unflatten(-1, (4, 8)).transpose(1, 2)
    want = pt.attention(
        query, *plain, causal="top_left", scale=attention.scale, backend="reference"
    )
    assert_same_logits(found, attention.out(want.transpose(1, 2).flatten(2)))
    assert cache.layers[0].stored.key.dtype == dtype  # type: ignore[attr-defined]


@torch.no_grad()
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_forks_and_copies_equal_contiguous_caches(dtype: torch.dtype) -> None:
    """Every free row is NaN before every call.

    Each sequence equals a contiguous cache of the sequence alone.
    """
    attention, rng = layer(), random.Random(3)
    cache = nn.PagedCache(1, 24, 4, dtype)
    words = torch.randn(3, 40, WIDTH, generator=torch.Generator().manual_seed(2))
    alive: dict[int, list[int]] = {}
    forks = 0
    for _ in range(60):
        if len(alive) < 4 and rng.random() < 0.6:
            if alive and rng.random() < 0.5:
                name = rng.choice(list(alive))
                alive[cache.fork(name)] = list(alive[name])
                forks += 1
            else:
                alive[cache.open()] = []
        names = list(alive)
        new = {
            name: [rng.choice([0, 1, 2]) for _ in range(rng.choice([1, 1, 1, 3]))] for name in names
        }
        if not names:
            continue
        cache.select(names)
        x = torch.full((len(names), max(map(len, new.values())), WIDTH), torch.nan)
        for b, name in enumerate(names):
            for i, token in enumerate(new[name]):
                x[b, i] = words[token, len(alive[name]) + i]
        poison_free_rows(cache)
        out = feed(
            attention, cache, x, cache.lengths + torch.tensor([len(new[name]) for name in names])
        )
        for b, name in enumerate(names):
            held, alive[name] = len(alive[name]), alive[name] + new[name]
            alone = nn.KeyValueCache(1, 40, dtype)
            whole = feed(
                attention,
                alone,
                torch.stack([words[t, i] for i, t in enumerate(alive[name])])[None],
            )
            assert_same_logits(out[b, : len(new[name])], whole[0, held:])
            if len(alive[name]) > 12 or rng.random() < 0.1:
                cache.close(name)
                del alive[name]
    assert forks > 3


@torch.no_grad()
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_reordered_and_cropped_caches_equal_new_ones(kind: str, dtype: torch.dtype) -> None:
    attention, cache, other = layer(), caches(dtype)[kind], caches(dtype)["contiguous"]
    x = torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(4))
    feed(attention, cache, x[:, :6])
    rows = torch.tensor([2, 0, 2, 1])
    cache.reorder(rows)
    cache.crop(5)
    feed(attention, other, x[rows, :5])
    assert_same_logits(feed(attention, cache, x[rows, 6:]), feed(attention, other, x[rows, 6:]))


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("name", ["gpt", "grouped", "t5"])
@pytest.mark.parametrize("how", [{}, {"beams": 3}], ids=["greedy", "beams"])
def test_paged_generate_equals_contiguous(
    how: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    """Prompts have different lengths and left padding; tokens and scores are compared."""
    if name == "t5":
        torch.manual_seed(8)
        shape: dict[str, Any] = dict(
            vocab_size=23, d_model=32, head_dim=8, hidden=64, num_heads=4, num_layers=2
        )
        model: Any = T5(T5Config(start_token_id=2, max_distance=32, **shape)).eval()
    else:
        model = gpt(**({"num_kv_heads": 2, "window": 6} if name == "grouped" else {}))
    prompts = torch.randint(4, 23, (3, 7), generator=torch.Generator().manual_seed(6))
    mask = torch.arange(7) >= torch.tensor([[0], [3], [6]])
    decoding = Decoding(max_new_tokens=12, stop=(3,), **how)
    found = [
        generate(model, prompts, mask.long(), decoding=decoding, cache=cache)
        for cache in (model.make_cache(40, dtype), model.make_paged_cache(60, 4, dtype))
    ]
    assert found[0].lists() == found[1].lists()
    assert_same_logits(found[0].scores, found[1].scores)


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_batcher_equals_requests_alone(dtype: torch.dtype) -> None:
    """Requests come in chunks and share pages; free rows are NaN before each step."""
    model, rng = gpt(), random.Random(1)
    cache = model.make_paged_cache(20, 4, dtype)
    batcher = Batcher(model, cache, slots=4, piece=5)
    asked: dict[int, tuple[list[int], Decoding]] = {}
    while batcher.busy or len(asked) < 10:
        if len(asked) < 10:
            prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15][: rng.randint(0, 9)] + [
                rng.randrange(4, 23) for _ in range(rng.randint(1, 8))
            ]
            how = Decoding(max_new_tokens=rng.randint(1, 9), stop=(3,))
            asked[batcher.submit(prompt, how)] = prompt, how
        poison_free_rows(cache)
        for finished in batcher.step():
            prompt, how = asked[finished.request]
            alone = generate(
                model, torch.tensor([prompt]), decoding=how, cache=model.make_cache(48, dtype)
            )
            assert alone.lists() == [finished.tokens]
            assert_same_logits(torch.tensor([finished.score]), alone.scores)
    assert cache.pages.available == 20


@torch.no_grad()
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_taps_see_dequantized_values(kind: str) -> None:
    model, ids = gpt(), torch.randint(4, 23, (2, 9), generator=torch.Generator().manual_seed(2))
    cache = (
        model.make_cache(9, torch.int8)
        if kind == "contiguous"
        else model.make_paged_cache(6, 4, torch.int8)
    )
    with nn.taps(model) as seen:
        model(ids, past_key_values=cache)
    weights = next(iter(seen.values())).weights()
    assert bool(((weights.sum(-1) - 1).abs() < 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    for make in (lambda: gpt().make_cache(8, dtype), lambda: gpt().make_paged_cache(8, 4, dtype)):
        with pytest.raises(TypeError, match=r"must be torch.float8_e4m3fn, torch.int8 or None"):
            make()


def test_8_bit_caches_need_less_memory() -> None:
    """A head of 32 numbers needs 36 bytes per key in int8, 128 in float32."""
    model = gpt(num_kv_heads=1)
    sizes = {}
    for dtype in (None, torch.int8):
        cache = model.make_cache(48, dtype)
        with torch.no_grad():
            model(torch.full((1, 4), 5), past_key_values=cache)
        stored = cache.layers[0].stored
        assert stored is not None
        sizes[dtype] = sum(t.numel() * t.element_size() for t in stored.stored)
    assert sizes[None] / sizes[torch.int8] == pytest.approx(8 * 4 / (8 + 4))
