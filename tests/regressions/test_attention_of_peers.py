# SPDX-License-Identifier: Apache-2.0
"""Wrong results of other attention implementations, each as its formula.

The formula exceeds the error bound on its problem, else the entry would prove nothing. Each of our
backends stays within it, gradients too. Each entry names its issue thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from support.attention_check import check_attention

Problem = tuple[tuple[Tensor, Tensor, Tensor], dict]


@dataclass(frozen=True)
class Regression:
    """A wrong result: `wrong(q, k, v, grad_out, **keywords)` returns the peer's tensors.

    They are some of out and the gradients of query, key and value.
    """

    name: str
    source: str
    problem: Callable[[], Problem]
    wrong: Callable[..., dict[str, Tensor]]


def qkv(
    lq: int = 9,
    lk: int = 13,
    d: int = 16,
    heads: int = 2,
    kv_heads: int = 2,
    dtype=torch.float32,
    scale: float = 1.0,
):
    q = torch.randn(2, heads, lq, d) * scale
    k, v = torch.randn(2, kv_heads, lk, d) * scale, torch.randn(2, kv_heads, lk, d)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def causal_mask(lq: int, lk: int, offset: int = 0) -> Tensor:
    return torch.ones(lq, lk, dtype=torch.bool).tril(offset)


def softmax_everything(q, k, v, grad_out, attn_mask=None, **_):
    """A row without visible keys is 0 / 0."""
    return {"out": scores(q, k).masked_fill(~attn_mask, -math.inf).softmax(-1) @ v}


def fully_masked_row() -> Problem:
    mask = torch.rand(2, 1, 9, 13) > 0.3
    mask[:, :, 4] = False
    return qkv(), {"attn_mask": mask}


def multiply_by_zero(q, k, v, grad_out, key_lengths=None, **_):
    """The weight of a padded key is 0, and 0 times NaN is NaN."""
    hidden = torch.arange(k.shape[2]) >= key_lengths[:, None, None, None]
    return {"out": scores(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v}


def nan_past_the_length() -> Problem:
    q, k, v = qkv()
    v[1, :, 10:] = math.nan
    return (q, k, v), {"key_lengths": torch.tensor([13, 10])}


def weights_from_lse(q, k, v, grad_out, attn_mask=None, **_):
    """Backward recomputes exp(score - lse), and lse of a row of finfo.min loses log(n).

    The weights are 1 instead of 1 / n.
    """
    s = scores(q, k) + attn_mask
    lse = torch.logsumexp(s, -1, keepdim=True)
    return {"value": torch.exp(s - lse).mT @ grad_out}


def row_of_lowest() -> Problem:
    mask = torch.zeros(2, 1, 9, 13)
    mask[:, :, 3] = torch.finfo(torch.float32).min
    return qkv(), {"attn_mask": mask}


def add_to_infinity(q, k, v, grad_out, attn_mask=None, bias=None, **_):
    """finfo.min + finfo.min is -inf, and the row has no weight left."""
    return {"out": (scores(q, k) + attn_mask + bias).softmax(-1) @ v}


def two_terms_of_lowest() -> Problem:
    mask = torch.zeros(2, 1, 9, 13)
    mask[:, :, 3] = torch.finfo(torch.float32).min
    return qkv(), {"attn_mask": mask, "bias": mask.clone()}


def aligned_top_left(q, k, v, grad_out, **_):
    return {
        "out": scores(q, k).masked_fill(~causal_mask(q.shape[2], k.shape[2]), -math.inf).softmax(-1)
        @ v
    }


def aligned_bottom_right(q, k, v, grad_out, **_):
    hidden = ~causal_mask(q.shape[2], k.shape[2], k.shape[2] - q.shape[2])
    return {"out": scores(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v}


def weights_as_a_quotient(q, k, v, grad_out, attn_mask=None, **_):
    """exp(score) / exp(lse) is 0 / 0 once lse is below -88.7; exp(score - lse) is right."""
    s = scores(q, k) + (0.0 if attn_mask is None else attn_mask)
    lse = torch.logsumexp(s, -1, keepdim=True)
    return {"value": (torch.exp(s) / torch.exp(lse)).mT @ grad_out}


def very_negative_lse(lq: int) -> Problem:
    mask = torch.zeros(1, 1, lq, 192)
    mask[:, :, ::3] = -120.0
    return qkv(lq, 192), {"attn_mask": mask}


def mask_read_as_half(q, k, v, grad_out, attn_mask=None, **_):
    halves = attn_mask.contiguous().view(torch.float16)[..., : attn_mask.shape[-1]]
    return {"out": (scores(q, k).float() + halves.float()).softmax(-1).to(v.dtype) @ v}


def gradient_read_as_contiguous(q, k, v, grad_out, **_):
    flat = grad_out.as_strided(grad_out.shape, grad_out.contiguous().stride())
    return {"value": scores(q, k).softmax(-1).mT @ flat}


def bias_with_padded_rows(q, k, v, grad_out, bias=None, **_):
    """Rows of the bias taken to start at multiples of 8 elements."""
    lq, lk = bias.shape[-2:]
    padded = -(-lk // 8) * 8
    storage = torch.cat([bias.flatten(), torch.zeros(lq * padded)])
    shifted = storage.as_strided((lq, lk), (padded, 1))
    return {"out": (scores(q, k) + shifted).softmax(-1) @ v}


def scale_after_masking(q, k, v, grad_out, scale=None, **_):
    """-inf times a negative scale is +inf: PyTorch's causal CPU flash kernel, 2.13."""
    hidden = ~causal_mask(q.shape[2], k.shape[2])
    return {"out": (scale * (q @ k.mT).masked_fill(hidden, -math.inf)).softmax(-1) @ v}


def mask_dropped(q, k, v, grad_out, **_):
    return {"out": scores(q, k).softmax(-1) @ v}


def left_padding() -> Problem:
    return qkv(13, 13), {
        "attn_mask": (torch.arange(13) >= torch.tensor([[0], [6]]))[:, None, None],
        "causal": "top_left",
    }


def heads_tiled(q, k, v, grad_out, **_):
    """Query head h reads key head h % Hkv."""
    group = q.shape[1] // k.shape[1]
    return {"out": scores(q, k.repeat(1, group, 1, 1)).softmax(-1) @ v.repeat(1, group, 1, 1)}


def bias_without_gradient(q, k, v, grad_out, bias=None, **_):
    return {"bias": torch.zeros_like(bias)}


def grid_limit(q, k, v, grad_out, **_):
    """Blocks past 65,535 in a launch dimension never run."""
    out = (scores(q, k).softmax(-1) @ v).flatten(0, 1)
    out[65535:] = 0
    return {"out": out.view(q.shape)}


def many_heads() -> Problem:
    return tuple(torch.randn(1, 65600, 2, 8) for _ in range(3)), {}


def tail_ignored(q, k, v, grad_out, **_):
    """The kernel drops the last key of an odd number."""
    even = k.shape[2] // 2 * 2
    return {"out": scores(q, k[:, :, :even]).softmax(-1) @ v[:, :, :even]}


def no_maximum(q, k, v, grad_out, **_):
    """exp without the maximum subtracted overflows for logits of a few hundred."""
    weights = scores(q, k).exp()
    return {"out": weights / weights.sum(-1, keepdim=True) @ v}


def delta_without_lse_gradient(q, k, v, grad_out, grad_lse, **_):
    p = scores(q, k).softmax(-1)
    dp = grad_out @ v.mT
    return {"query": (p * (dp - (p * dp).sum(-1, keepdim=True))) @ k * q.shape[-1] ** -0.5}


def dropout_without_rescaling(q, k, v, grad_out, dropout_p=0.0, dropout_seed=0, **_):
    keep = oracle.keep_factor(
        dropout_seed, dropout_p, *q.shape[:2], torch.arange(q.shape[2]), torch.arange(k.shape[2])
    )
    return {"out": (scores(q, k).softmax(-1) * (keep > 0)) @ v}


REGRESSIONS = [
    Regression(
        "fully_masked_row_is_nan",
        "pytorch#103749, #103963, #109517",
        fully_masked_row,
        softmax_everything,
    ),
    Regression(
        "nan_behind_the_mask_leaks", "pytorch#101967", nan_past_the_length, multiply_by_zero
    ),
    Regression(
        "gradient_of_a_row_of_lowest",
        "PyTorch's CPU flash kernel, 2.13",
        row_of_lowest,
        weights_from_lse,
    ),
    Regression(
        "two_masks_of_lowest_hide_the_row",
        "sums of masks in Hugging Face models",
        two_terms_of_lowest,
        add_to_infinity,
    ),
    Regression(
        "bottom_right_taken_as_top_left",
        "flash-attention before 2.1, pytorch#108108",
        lambda: (qkv(), {"causal": "bottom_right"}),
        aligned_top_left,
    ),
    Regression(
        "top_left_taken_as_bottom_right",
        "flash-attention#951",
        lambda: (qkv(), {"causal": "top_left"}),
        aligned_bottom_right,
    ),
    Regression(
        "lse_below_the_least_float",
        "pytorch#196678: L % 128 == 64",
        lambda: very_negative_lse(192),
        weights_as_a_quotient,
    ),
    Regression(
        "lse_below_the_least_float_one_query",
        "cudnn-frontend#1072: Sq = 1",
        lambda: very_negative_lse(1),
        weights_as_a_quotient,
    ),
    Regression(
        "float_mask_read_as_half",
        "pytorch#191612",
        lambda: (qkv(dtype=torch.bfloat16), {"attn_mask": torch.randn(2, 1, 9, 13)}),
        mask_read_as_half,
    ),
    Regression(
        "upstream_gradient_read_as_contiguous",
        "pytorch#194719, flash-attention#355",
        lambda: (qkv(), {}),
        gradient_read_as_contiguous,
    ),
    Regression(
        "bias_rows_taken_as_aligned",
        "xformers#813, pytorch#121943",
        lambda: (qkv(), {"bias": torch.randn(9, 13)}),
        bias_with_padded_rows,
    ),
    Regression(
        "negative_scale_turns_the_mask_round",
        "PyTorch's CPU flash kernel, 2.13",
        lambda: (qkv(), {"causal": "top_left", "scale": -0.2}),
        scale_after_masking,
    ),
    Regression("left_padding_dropped", "transformers#45811, #46132", left_padding, mask_dropped),
    Regression(
        "grouped_heads_tiled", "axolotl#3968", lambda: (qkv(heads=4, kv_heads=2), {}), heads_tiled
    ),
    Regression(
        "bias_gets_no_gradient",
        "xformers#783, flash-attention#242",
        lambda: (qkv(), {"bias": torch.randn(1, 2, 9, 13)}),
        bias_without_gradient,
    ),
    Regression(
        "more_heads_than_a_grid_dimension",
        "pytorch#142228, xformers#845, flash-attention#1812",
        many_heads,
        grid_limit,
    ),
    Regression("odd_number_of_keys", "cudnn-frontend#160", lambda: (qkv(), {}), tail_ignored),
    Regression(
        "large_logits_overflow",
        "softmax without its maximum",
        lambda: (qkv(scale=40.0), {}),
        no_maximum,
    ),
    Regression(
        "lse_gradient_dropped",
        "backward that knows only the output's gradient",
        lambda: (qkv(), {}),
        delta_without_lse_gradient,
    ),
    Regression(
        "dropout_not_rescaled",
        "weights masked without 1 / (1 - p)",
        lambda: (qkv(), {"dropout_p": 0.4, "dropout_seed": 3}),
        dropout_without_rescaling,
    ),
]


def upstream(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient in (B, L, H, D) memory, and one for lse."""
    generator = torch.Generator().manual_seed(0)
    grad = (
        torch.randn(q.shape[0], q.shape[2], q.shape[1], v.shape[3], generator=generator)
        .to(q.dtype)
        .transpose(1, 2)
    )
    return grad, torch.randn(q.shape[:3], generator=generator)


@pytest.mark.parametrize("r", REGRESSIONS, ids=lambda r: r.name)
def test_formula_of_the_peer_exceeds_the_bound(r: Regression) -> None:
    """It exceeds the bound or is NaN."""
    (q, k, v), keywords = r.problem()
    grad_out, grad_lse = upstream(q, v)
    solution = oracle.solve(q, k, v, grad_out, grad_lse, **keywords)
    if r.wrong is delta_without_lse_gradient:
        keywords = {**keywords, "grad_lse": grad_lse}
    checks = bounds.check(solution, r.wrong(q, k, v, grad_out, **keywords), q.dtype)
    assert checks and all(not c.ok for c in checks), [str(c) for c in checks]


@pytest.mark.parametrize("r", REGRESSIONS, ids=lambda r: r.name)
def test_our_backends_stay_within_the_bound(r: Regression, backend: str) -> None:
    args, keywords = r.problem()
    check_attention(args, keywords, backend, data="any")


def test_offsets_beyond_32_bits(backend: str) -> None:
    """Batches are more than 2**31 elements apart, with few touched pages.

    flash-attention#1500, #2260.
    """
    far = 2**31 + 2**20
    buffer = torch.empty(far + 4096, dtype=torch.bfloat16)
    wide = buffer.as_strided((2, 1, 4, 8), (far, 32, 8, 1))
    wide.copy_(torch.randn(2, 1, 4, 8))
    near = wide.contiguous()
    want = pt.attention(near, near, near, backend=backend)
    assert torch.equal(pt.attention(wide, wide, wide, backend=backend), want)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys_give_zeros(lengths: tuple[int, int], backend: str) -> None:
    """flash-attention#2470 (division by zero), pytorch#133780.

    The peer's formula, a maximum over nothing, raises.
    """
    q, k = torch.randn(1, 2, lengths[0], 8), torch.randn(1, 2, lengths[1], 8)
    if lengths[1] == 0:
        with pytest.raises((IndexError, RuntimeError)):
            scores(q, k).amax(-1)
    out, lse = pt.attention(q, k, k, return_lse=True, backend=backend)
    assert out.shape == q.shape and not out.any() and bool((lse == -math.inf).all())
