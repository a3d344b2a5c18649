# SPDX-License-Identifier: Apache-2.0
"""Attention sinks on every backend, in cases that the fuzzer (tests/test_fuzz.py) cannot draw."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.testing.bounds import agree
from support.attention_check import check_attention, check_packed

pytestmark = pytest.mark.usefixtures("one_thread")
NONE = -math.inf


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    lq: int = 9, lk: int = 70, heads: int = 4, kv: int = 2, dim: int = 16, batch: int = 2
) -> tuple[torch.Tensor, ...]:
    return (
        draw(batch, heads, lq, dim),
        draw(batch, kv, lk, dim, seed=1),
        draw(batch, kv, lk, dim, seed=2),
    )


def results(
    args: tuple[torch.Tensor, ...], sinks: torch.Tensor | None, backend: str, **options: Any
) -> list[torch.Tensor]:
    """Return out, lse and the gradients of all inputs for one upstream gradient."""
    inputs = [t.detach().requires_grad_() for t in (*args, *([] if sinks is None else [sinks]))]
    if sinks is not None:
        options["sinks"] = inputs[3]
    out, lse = pt.attention(*inputs[:3], **options, return_lse=True, backend=backend, strict=True)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    return [
        out,
        lse,
        *torch.autograd.grad(
            [out, finite], inputs, [draw(*out.shape, seed=3), draw(*lse.shape, seed=4)]
        ),
    ]


def test_zero_sinks_give_softmax_off_by_one(backend: str) -> None:
    """The weights are exp(s) / (1 + sum exp(s)); lse is the log of that sum."""
    query, key, value = qkv(kv=4)
    out, lse = pt.attention(
        query, key, value, sinks=torch.zeros(4), return_lse=True, backend=backend, strict=True
    )
    weight = torch.exp(0.25 * query.double() @ key.double().mT)
    total = 1 + weight.sum(-1, keepdim=True)
    assert agree(out, weight / total @ value.double())
    assert agree(lse, total.log()[..., 0])


@pytest.mark.parametrize(
    "keywords",
    [{}, {"causal": "bottom_right", "window": (30, 0)}, {"softcap": 3.0, "dropout_p": 0.3}],
)
def test_sink_of_minus_infinity_changes_no_bit(backend: str, keywords: dict[str, Any]) -> None:
    """The gradient of such a sink is zero."""
    keywords = {**keywords, "dropout_seed": 5}
    *with_sinks, d_sinks = results(qkv(), torch.full((4,), NONE), backend, **keywords)
    assert all(map(torch.equal, with_sinks, results(qkv(), None, backend, **keywords)))
    assert not d_sinks.count_nonzero()


def test_query_without_visible_keys_has_lse_equal_to_its_sink(backend: str) -> None:
    """Its out is 0, and only the sink gets the gradient of lse.

    Masks, bounds and missing keys each hide every key. Rows past query_lengths are not queries.
    """
    sinks = torch.tensor([0.0, -3.25, 1500.0, NONE])
    mask = torch.ones(1, 1, 9, 1, dtype=torch.bool)
    mask[:, :, 3] = False
    options: dict[str, Any] = {"attn_mask": mask, "causal": "bottom_right",
        "query_lengths": torch.tensor([9, 6]),
                               "key_lengths": torch.tensor([70, 4])}  # fmt: skip
    out, lse, *_, d_sinks = results(qkv(), sinks, backend, **options)
    for b, i in ((0, 3), (1, 3), (1, 0), (1, 1)):  # masked; before the first key
        assert not out[b, :, i].any() and torch.equal(lse[b, :, i], sinks)
    assert not out[1, :, 6:].any() and bool((lse[1, :, 6:] == NONE).all())
    seen = (torch.isfinite(lse) & (lse != sinks[:, None]))[:, :3]
    assert seen.sum() == 3 * (8 + 3), "lse of every query that sees a key is above its sink"
    check_attention(qkv(), {**options, "sinks": sinks}, backend, poisoned=True)

    query, key, value = qkv(lk=0)
    out, lse, *_, d_sinks = results((query, key, value), sinks, backend)
    assert not out.any() and torch.equal(lse, sinks[:, None].expand(2, 4, 9))
    want = draw(2, 4, 9, seed=4).sum((0, 2)) * (sinks != NONE)
    assert agree(d_sinks, want)


def test_gradients_are_right_where_lse_rounds_to_the_sink(backend: str) -> None:
    """exp(20) absorbs every weight, so lse exceeds the sink by one ulp only."""
    check_attention(
        qkv(), {"sinks": torch.tensor([20.0, 20.0, 40.0, 0.0]), "causal": "bottom_right"}, backend
    )
    out, lse, d_query, *_ = results(qkv(), torch.full((4,), 20.0), backend)
    assert bool((lse > 20).all()) and bool(d_query.any(-1).all()) and bool(out.any(-1).all())


def test_infinite_sink_gives_zero_output_and_nan_sink_gives_nan(backend: str) -> None:
    out, lse, *grads = results(qkv(), torch.full((4,), math.inf), backend)
    assert not out.any() and bool((lse > 1e38).all()) and not any(bool(g.any()) for g in grads[:3])
    out, lse, *_ = results(qkv(), torch.tensor([math.nan, 0.0, NONE, 1.0]), backend)
    for t in (out, lse):
        assert bool(t[:, 0].isnan().all()) and bool(t[:, 1:].isfinite().all())


@pytest.mark.parametrize("place", ["attn_mask", "bias"])
def test_scores_of_finfo_min_are_data(backend: str, place: str) -> None:
    """A row and a sink of finfo.min give the mean over one more than the row's keys.

    The gradient is right although lse loses the log.
    """
    lowest = torch.finfo(torch.float32).min
    args = qkv(lq=3, lk=7)
    mask = torch.zeros(1, 1, 3, 7)
    mask[:, :, 1] = lowest
    sinks = torch.tensor([lowest, 1.0, NONE, lowest])
    check_attention(args, {place: mask, "sinks": sinks}, backend)
    out = pt.attention(*args, **{place: mask}, sinks=sinks, backend=backend, strict=True)
    mean = args[2].repeat_interleave(2, 1).mean(2)
    assert agree(out[:, 0, 1], mean[:, 0] * 7 / 8)
    assert not out[:, 1, 1].any()
    assert agree(out[:, 2, 1], mean[:, 2])


@pytest.mark.parametrize("lq, lk", [(1, 3000), (3, 2500)])
def test_split_kv_adds_the_sink_once(backend: str, lq: int, lk: int) -> None:
    sinks = torch.tensor([7.0, 8.0, 6.5, NONE])
    options: dict[str, Any] = {"causal": "bottom_right", "key_lengths": torch.tensor([lk, lk // 3])}
    check_attention(qkv(lq=lq, lk=lk, dim=32), {"sinks": sinks, **options}, backend)


def test_packed_equals_padded(backend: str) -> None:
    offsets = torch.tensor([0, 5, 5, 33]), torch.tensor([0, 9, 20, 60])
    args = draw(33, 4, 16), draw(60, 2, 16, seed=1), draw(60, 2, 16, seed=2), *offsets, 28, 40
    check_packed(
        args, {"sinks": torch.tensor([0.0, 2.0, -1.0, NONE]), "causal": "bottom_right"}, backend
    )
    sinks = torch.zeros(4, requires_grad=True)
    out, lse = pt.attention_varlen(
        *args, sinks=sinks, return_lse=True, backend=backend, strict=True
    )
    want = torch.autograd.grad([out.square().sum(), lse.sum()], sinks)[0]
    total = torch.zeros(4)
    for rows, keys in zip(pairwise(offsets[0].tolist()), pairwise(offsets[1].tolist())):
        one = [t[slice(*at)].transpose(0, 1)[None] for t, at in zip(args, (rows, keys, keys))]
        out, lse = pt.attention(*one, sinks=sinks, return_lse=True, backend="reference")
        total += torch.autograd.grad([out.square().sum(), lse.sum()], sinks)[0]
    assert agree(want, total)


def test_attention_weights_exclude_the_sink() -> None:
    query, key, value = (
        t.double() for t in qkv(kv=4)
    )  # with a sink of 30, rounding changes lse by 16 eps in float32
    sinks = torch.tensor([0.0, 2.0, 30.0, NONE], dtype=torch.float64)
    _, lse = pt.attention(query, key, value, sinks=sinks, return_lse=True)
    weights = pt.attention_weights(query, key, lse, sinks=sinks)
    share = torch.exp(sinks[:, None] - lse)
    assert agree((weights.sum(-1) + share).float(), torch.ones_like(share))
    assert agree((weights @ value).float(), pt.attention(query, key, value, sinks=sinks))
