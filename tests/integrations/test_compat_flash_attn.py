# SPDX-License-Identifier: Apache-2.0
"""compat.flash_attn against flash-attn's definition, per sequence in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer.compat.flash_attn as flash_attn
from pytransformer.compat.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from pytransformer.ops._core.registry import trace
from pytransformer.testing.bounds import agree

CASES = 30  # per function; each draws every argument
pytestmark = pytest.mark.usefixtures("one_thread")


def formula(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, softmax_scale: float | None = None, hidden: int = 0,
    **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out (Lq, H, D) and lse (H, Lq) of one sequence: q (Lq, H, D), k and v (Lk, Hkv, D).

    The first ``hidden`` keys are padding at the left.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(len(q))[:, None] + len(k) - len(q)
    j = torch.arange(len(k))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
    visible = (j >= hidden).expand(len(q), -1)
    if causal:
        visible = visible & (j <= i)
    left, right = window_size
    if left >= 0:
        visible = visible & (j >= i - left)
    if right >= 0:
        visible = visible & (j <= i + right)
    lse = scores.masked_fill(~visible, -torch.inf).logsumexp(-1)
    alive = visible.any(-1, keepdim=True)
    weights = (
        torch.where(alive, scores.masked_fill(~visible & alive, -torch.inf), 0.0).softmax(-1)
        * visible
    )
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def row_of(slopes: Tensor | None, b: int) -> Tensor | None:
    return slopes[b] if slopes is not None and slopes.dim() == 2 else slopes


def draw_scores(rng: random.Random, batch: int, heads: int) -> dict[str, Any]:
    """Draw the score arguments; None is the default."""
    slopes = rng.choice((None, None, torch.rand(heads), torch.rand(batch, heads)))
    drawn = {
        "causal": rng.random() < 0.5,
        "window_size": rng.choice(((-1, -1), (rng.choice((-1, 0, 3, 9)), rng.choice((-1, 0, 2))))),
        "softcap": rng.choice((0.0, 0.0, 2.5)), "alibi_slopes": slopes,
        "softmax_scale": rng.choice((None, 0.3)),
        "deterministic": rng.random() < 0.5,
    }  # fmt: skip
    return {name: value for name, value in drawn.items() if rng.random() < 0.8}


def draw_sizes(rng: random.Random) -> tuple[int, int, int, int]:
    """Draw sequences, numbers of query and key heads, and the head dim."""
    groups = rng.choice((1, 1, 2, 3))
    heads = rng.choice((1, 2))
    return rng.choice((1, 2, 3)), heads * groups, heads, rng.choice((8, 16, 20))


def compare(ours: Tensor, expected: Tensor, what: str) -> None:
    assert ours.shape == expected.shape and agree(ours, expected), what


def compare_lse(ours: Tensor, expected: Tensor, what: str) -> None:
    """Compare the sums: a logarithm near 0 has no relative error."""
    assert ours.dtype == torch.float32 and torch.equal(ours.isneginf(), expected.isneginf())
    compare(ours.exp(), expected.exp(), what)


def check(
    result: Any,
    expected: tuple[Tensor, Tensor],
    leaves: list[Tensor],
    copies: list[Tensor],
    what: str,
) -> None:
    """Compare out, lse and, from a random gradient of out, the gradients of the leaves."""
    out, lse, probabilities = result
    assert probabilities is None
    compare(out, expected[0], f"out of {what}")
    compare_lse(lse, expected[1], f"lse of {what}")
    grad = torch.randn(out.shape).to(out.dtype)
    ours = torch.autograd.grad(out, leaves, grad)
    exact = torch.autograd.grad(expected[0], copies, grad.double())
    # Compare one vector: the gradient of a query with one visible key is 0 up to rounding.
    compare(
        *(torch.cat([t.flatten() for t in grads]) for grads in (ours, exact)),
        f"gradients of {what}",
    )


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return a random leaf and its copy in float64."""
    x = torch.randn(*shape).to(dtype)
    return x.requires_grad_(), x.detach().double().requires_grad_()


@pytest.mark.parametrize("layout", ["separate", "kvpacked", "qkvpacked"])
def test_padded_functions_equal_the_formula(layout: str) -> None:
    rng = random.Random(layout)
    for case in range(CASES):
        batch, heads, kv_heads, width = draw_sizes(rng)
        length = rng.choice((1, 7, 13))
        keys = length if layout == "qkvpacked" else rng.choice((1, 7, 18))
        options = draw_scores(rng, batch, heads)
        what = f"case {case}: {layout} {batch, heads, kv_heads, width, length, keys} {options}"
        if layout == "qkvpacked":
            qkv, copy = leaf(batch, length, 3, heads, width)
            leaves, copies = [qkv], [copy]
            result = flash_attn.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True)
            q, k, v = copy.unbind(2)
        elif layout == "kvpacked":
            leaves, copies = map(
                list, zip(leaf(batch, length, heads, width), leaf(batch, keys, 2, kv_heads, width))
            )
            result = flash_attn.flash_attn_kvpacked_func(*leaves, **options, return_attn_probs=True)
            q, (k, v) = copies[0], copies[1].unbind(2)
        else:
            dtype = rng.choice((torch.float32, torch.bfloat16))
            shapes = ((batch, length, heads, width), *[(batch, keys, kv_heads, width)] * 2)
            leaves, copies = map(list, zip(*(leaf(*shape, dtype=dtype) for shape in shapes)))
            result = flash_attn.flash_attn_func(*leaves, **options, return_attn_probs=True)
            q, k, v = copies
        slopes = options.pop("alibi_slopes", None)
        parts = [
            formula(q[b], k[b], v[b], **options, alibi_slopes=row_of(slopes, b))
            for b in range(batch)
        ]
        check(result, tuple(map(torch.stack, zip(*parts))), leaves, copies, what)


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("layout", ["separate", "kvpacked", "qkvpacked"])
def test_packed_functions_equal_the_formula(layout: str) -> None:
    rng = random.Random(layout)
    for case in range(CASES):
        batch, heads, kv_heads, width = draw_sizes(rng)
        lengths, keys = ([rng.choice((0, 1, 5, 11)) for _ in range(batch)] for _ in range(2))
        keys = lengths if layout == "qkvpacked" or rng.random() < 0.3 else keys
        options = draw_scores(rng, batch, heads)
        what = f"case {case}: {layout} {heads, kv_heads, width, lengths, keys} {options}"
        ends = (offsets_of(lengths), offsets_of(keys), max(lengths), max(keys))
        if layout == "qkvpacked":
            qkv, copy = leaf(sum(lengths), 3, heads, width)
            leaves, copies = [qkv], [copy]
            arguments = (qkv, ends[0], ends[2])
            result = flash_attn.flash_attn_varlen_qkvpacked_func(
                *arguments, **options, return_attn_probs=True
            )
            q, k, v = copy.unbind(1)
        elif layout == "kvpacked":
            leaves, copies = map(
                list, zip(leaf(sum(lengths), heads, width), leaf(sum(keys), 2, kv_heads, width))
            )
            result = flash_attn.flash_attn_varlen_kvpacked_func(
                *leaves, *ends, **options, return_attn_probs=True
            )
            q, (k, v) = copies[0], copies[1].unbind(1)
        else:
            shapes = ((sum(lengths), heads, width), *[(sum(keys), kv_heads, width)] * 2)
            leaves, copies = map(list, zip(*(leaf(*shape) for shape in shapes)))
            result = flash_attn.flash_attn_varlen_func(
                *leaves, *ends, **options, return_attn_probs=True
            )
            q, k, v = copies
        slopes = options.pop("alibi_slopes", None)
        split = zip(q.split(lengths), k.split(keys), v.split(keys))
        parts = [
            formula(*rows, **options, alibi_slopes=row_of(slopes, b))
            for b, rows in enumerate(split)
        ]
        outs, lses = zip(*parts)
        check(result, (torch.cat(outs), torch.cat(lses, 1)), leaves, copies, what)


def test_packed_function_ignores_rows_outside_every_sequence() -> None:
    """It pads for a window without causality and for other key lengths."""
    for window in ((-1, -1), (2, 1)):
        q, k, v = (torch.randn(n, 2, 8) for n in (9, 12, 12))
        ends = (offsets_of([3, 4]), offsets_of([5, 6]), 4, 6)
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, *ends, window_size=window, return_attn_probs=True
        )
        expected = [
            formula(*rows, window_size=window)[0]
            for rows in zip(q.split([3, 4, 2]), *(t.split([5, 6, 1]) for t in (k, v)))
        ]
        compare(out[:7], torch.cat(expected[:2]), "rows in sequences")
        assert not out[7:].any() and lse[:, 7:].isneginf().all()


def paged(cache: Tensor, table: Tensor, size: int) -> Tensor:
    """Return a pool of pages with a cache (B, capacity, H, D); other pages are random."""
    pool = torch.randn(int(table.max()) + 3, size, *cache.shape[2:])
    for b, n in ((b, n) for b in range(table.shape[0]) for n in range(table.shape[1])):
        pool[table[b, n]] = cache[b, n * size : (n + 1) * size]
    return pool


def draw_table(rng: random.Random, batch: int, pages: int) -> Tensor:
    numbers = rng.sample(range(batch * pages + 2), batch * pages)
    return torch.tensor(numbers, dtype=torch.int32).view(batch, pages)


def test_packed_queries_over_pages_equal_the_formula() -> None:
    rng = random.Random(3)
    for case in range(CASES // 2):
        batch, heads, kv_heads, width = draw_sizes(rng)
        lengths, keys = (
            [rng.choice(sizes) for _ in range(batch)] for sizes in ((0, 1, 5), (1, 7, 12))
        )
        options = draw_scores(rng, batch, heads)
        q, caches = (
            torch.randn(sum(lengths), heads, width),
            [torch.randn(batch, 12, kv_heads, width) for _ in range(2)],
        )
        table = draw_table(rng, batch, 3)
        pools = (paged(cache, table, 4) for cache in caches)
        ends = (offsets_of(lengths), offsets_of(keys), max(lengths), max(keys))
        out = flash_attn.flash_attn_varlen_func(q, *pools, *ends, **options, block_table=table)
        slopes = options.pop("alibi_slopes", None)
        expected = [
            formula(
                rows, *(cache[b, :n] for cache in caches), **options, alibi_slopes=row_of(slopes, b)
            )[0]
            for b, (rows, n) in enumerate(zip(q.split(lengths), keys))
        ]
        compare(out, torch.cat(expected), f"case {case}: {lengths, keys} {options}")


def test_packed_queries_over_pages_are_not_padded() -> None:
    q, pools = torch.randn(6, 4, 8), [torch.randn(5, 4, 2, 8) for _ in range(2)]
    ends = (offsets_of([1, 5]), offsets_of([7, 12]), 5, 12)
    with trace() as ran:
        flash_attn.flash_attn_varlen_func(
            q, *pools, *ends, causal=True, window_size=(3, 0), alibi_slopes=torch.rand(4),
            block_table=draw_table(random.Random(4), 2, 3) % 5,
        )  # fmt: skip
    assert [op for op, _ in ran] == ["attention_varlen_fwd"]


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first columns of x (L, H, D) by cos and sin (L, pairs)."""
    pairs = cos.shape[-1]
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    both = (a * cos - b * sin, a * sin + b * cos)
    return torch.cat(
        (torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1), rest), -1
    )


@torch.no_grad()
def test_cache_function_equals_the_formula() -> None:
    """Cases have new keys, rotary, pages, rows of a larger cache and left padding, or not."""
    rng = random.Random(4)
    for case in range(2 * CASES):
        batch, heads, kv_heads, width = draw_sizes(rng)
        length, new, place = (
            rng.choice((1, 1, 4)),
            rng.choice((0, 1, 4)),
            rng.choice(("rows", "pages", "chosen rows")),
        )
        used = [rng.choice((1, 5, 8)) for _ in range(batch)]
        options = {**draw_scores(rng, batch, heads), "num_splits": rng.choice((0, 1))}
        options.pop("deterministic", None)
        q, caches = (
            torch.randn(batch, length, heads, width),
            [torch.randn(batch, 12, kv_heads, width) for _ in range(2)],
        )
        fresh = [torch.randn(batch, new, kv_heads, width) for _ in range(2)]
        # Rows behind the keys in use must not affect the result.
        behind = torch.arange(12)[:, None, None] >= torch.tensor(used)[:, None, None, None]
        stored = [cache.masked_fill(behind, torch.nan) for cache in caches]
        table = draw_table(rng, batch, 3 if place == "pages" else 1)
        call = dict(options)
        if place == "pages":
            stored, call["block_table"] = [paged(cache, table, 4) for cache in stored], table
        elif place == "chosen rows":
            stored, call["cache_batch_idx"] = (
                [paged(cache, table, 12) for cache in stored],
                table[:, 0],
            )
        hidden = [rng.choice((0, 1)) for _ in range(batch)] if rng.random() < 0.3 else [0] * batch
        if any(hidden):
            call["cache_leftpad"] = torch.tensor(hidden, dtype=torch.int32)
        call["cache_seqlens"] = (
            used[0] if len(set(used)) == 1 else torch.tensor(used, dtype=torch.int32)
        )
        rotate = new and rng.random() < 0.6
        if rotate:
            angles = torch.rand(16, rng.choice((2, 4))) * 6
            interleaved = rng.random() < 0.5
            call |= {
                "rotary_cos": angles.cos(),
                "rotary_sin": angles.sin(),
                "rotary_interleaved": interleaved,
            }
        if new:
            call |= dict(zip("kv", fresh))
        what = (
            f"case {case}: {place} {batch, heads, kv_heads, width, length, new, used, hidden}"
            f" {call.keys()} {options}"
        )
        out, lse = flash_attn.flash_attn_with_kvcache(q, *stored, **call, return_softmax_lse=True)

        slopes, expected = options.pop("alibi_slopes", None), []
        by_row = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
        for b in range(batch):
            query, key = q[b].double(), fresh[0][b].double()
            if rotate:
                at = used[b] + torch.arange(max(length, new))
                places = at[:length] if by_row else at[:1].expand(length)
                key = turn(key, angles.cos()[at[:new]], angles.sin()[at[:new]], interleaved)
                query = turn(query, angles.cos()[places], angles.sin()[places], interleaved)
            keys = torch.cat((caches[0][b, : used[b]].double(), key))
            values = torch.cat((caches[1][b, : used[b]], fresh[1][b]))
            expected.append(
                formula(
                    query, keys, values, **options, alibi_slopes=row_of(slopes, b), hidden=hidden[b]
                )
            )
            pages = [
                cache[table[b].long()].flatten(0, 1) if place != "rows" else cache[b]
                for cache in stored
            ]
            compare(pages[0][: used[b] + new], keys, f"written keys of {what}")
            compare(pages[1][: used[b] + new], values.double(), f"written values of {what}")
        outs, lses = zip(*expected)
        compare(out, torch.stack(outs), f"out of {what}")
        compare_lse(lse, torch.stack(lses), f"lse of {what}")


def test_full_cache_is_read_without_cache_seqlens() -> None:
    q, k, v = (torch.randn(2, n, 2, 8) for n in (3, 9, 9))
    expected = torch.stack([formula(*rows, causal=True)[0] for rows in zip(q, k, v)])
    compare(flash_attn.flash_attn_with_kvcache(q, k, v, causal=True), expected, "out")
    table = torch.tensor([[1, 2, 0], [4, 3, 5]])
    out = flash_attn.flash_attn_with_kvcache(
        q, paged(k, table, 3), paged(v, table, 3), block_table=table, causal=True
    )
    compare(out, expected, "out by pages")


def test_dropout_repeats_for_one_seed_and_differs_between_calls() -> None:
    q, k, v = (torch.randn(2, 16, 2, 8) for _ in range(3))
    torch.manual_seed(1)
    first, second = (flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)
    slopes = torch.zeros(2, 2)  # one call per sequence: each draws a separate mask
    out = flash_attn.flash_attn_func(
        *(t[:1].expand(2, -1, -1, -1) for t in (q, k, v)), 0.5, alibi_slopes=slopes
    )
    assert not torch.equal(out[0], out[1])


def test_unpadding_and_padding_are_inverse_with_gradients() -> None:
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]])
    rows, indices, offsets, longest, used = unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and torch.equal(
        index_first_axis(x.flatten(0, 1), indices), rows
    )
    assert offsets.tolist() == [0, 2, 2, 5] and offsets.dtype == torch.int32
    assert longest == 3 and used.tolist() == [2, 0, 3]
    padded = pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[:, :, None, None])
    (gradient,) = torch.autograd.grad(padded.square().sum(), x)
    assert torch.equal(gradient, 2 * x * mask[:, :, None, None])
    rows, _, offsets, longest, used = unpad_input(
        x, mask, unused_mask=torch.tensor([0, 0, 0, 1, 0]).expand(3, -1)
    )
    assert (
        len(rows) == 8
        and offsets.tolist() == [0, 3, 4, 8]
        and longest == 4
        and used.tolist() == [2, 0, 3]
    )
