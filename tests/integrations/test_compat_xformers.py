# SPDX-License-Identifier: Apache-2.0
"""compat.xformers and compat.liger against explicit formulas in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer.compat.xformers as xops
from pytransformer.compat.liger import LigerFusedLinearCrossEntropyLoss
from pytransformer.testing.bounds import agree

CASES = 12  # per class of attn_bias
pytestmark = pytest.mark.usefixtures("one_thread")


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
    """Return (B, Lq, H, D) for a bias of (B, H, Lq, Lk) by broadcast; rows without a key are 0."""
    scores = (
        torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        + bias
    )
    alive = (bias > -torch.inf).expand(scores.shape).any(-1, keepdim=True)
    weights = torch.where(alive, scores, 0.0).softmax(-1) * alive
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def hide(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, -torch.inf).double()


def band(left: float, right: float, bottom_right: bool) -> Callable[[int, int], Tensor]:
    """Return the additive mask (Lq, Lk): 0 for visible pairs, -inf elsewhere."""

    def bias(queries: int, keys: int) -> Tensor:
        i = torch.arange(queries)[:, None] + (keys - queries if bottom_right else 0)
        j = torch.arange(keys)
        return hide((j >= i - left) & (j <= i + right))

    return bias


INF = float("inf")
BANDS = {
    "none": (lambda: None, band(INF, INF, False)),
    "LowerTriangularMask": (xops.LowerTriangularMask, band(INF, 0, False)),
    "LowerTriangularFromBottomRightMask": (xops.LowerTriangularFromBottomRightMask,
        band(INF, 0, True)),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        lambda: xops.LowerTriangularFromBottomRightMask().make_local_attention(3), band(2, 0, True),
    ),
    "LocalAttentionFromBottomRightMask": (
        lambda: xops.LocalAttentionFromBottomRightMask(window_left=1, window_right=2),
        band(1, 2, True),
    ),
}  # fmt: skip


def check(
    out: Tensor, expected: Tensor, leaves: list[Tensor], copies: list[Tensor], what: str
) -> None:
    assert out.shape == expected.shape and agree(out, expected), what
    grad = torch.randn(out.shape)
    results = (
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(expected, copies, grad.double()),
    )
    assert agree(*(torch.cat([t.flatten() for t in grads]) for grads in results)), (
        f"gradients of {what}"
    )


def leaves_of(*shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    return leaves, [t.detach().double().requires_grad_() for t in leaves]


@pytest.mark.parametrize("kind", BANDS)
def test_band_masks_equal_the_formula(kind: str) -> None:
    rng, (mask, bias) = random.Random(kind), BANDS[kind]
    for case in range(CASES):
        batch, heads, queries, keys = (
            rng.choice((1, 2)),
            rng.choice((1, 3)),
            rng.choice((1, 6, 9)),
            rng.choice((1, 6, 12)),
        )
        leaves, copies = leaves_of(
            (batch, queries, heads, 8), (batch, keys, heads, 8), (batch, keys, heads, 12)
        )
        scale = rng.choice((None, 0.4))
        out = xops.memory_efficient_attention(*leaves, mask(), scale=scale)
        check(
            out,
            formula(*copies, bias(queries, keys), scale),
            leaves,
            copies,
            f"case {case}: {queries, keys}",
        )


@pytest.mark.parametrize("causal", [False, True])
def test_dense_bias_equals_the_formula_with_its_gradient(causal: bool) -> None:
    rng = random.Random(causal)
    for case in range(CASES):
        batch, heads, queries, keys = 2, 3, rng.choice((1, 6)), rng.choice((1, 6, 9))
        shape = (rng.choice((1, batch)), rng.choice((1, heads)), queries, keys)
        leaves, copies = leaves_of(
            (batch, queries, heads, 8), (batch, keys, heads, 8), (batch, keys, heads, 8), shape
        )
        attn_bias = xops.LowerTriangularMask().add_bias(leaves[3]) if causal else leaves[3]
        exact = copies[3] + band(INF, 0, False)(queries, keys) if causal else copies[3]
        out = xops.memory_efficient_attention(*leaves[:3], attn_bias)
        check(out, formula(*copies[:3], exact, None), leaves, copies, f"case {case}: {shape}")


def test_three_and_five_dimensions_equal_four() -> None:
    q, k, v = (torch.randn(2, n, 8) for n in (5, 7, 7))
    bias = torch.randn(2, 5, 7)
    out = xops.memory_efficient_attention(q, k, v, bias)
    expected = formula(*(t.double()[:, :, None] for t in (q, k, v)), bias.double()[:, None], None)
    assert agree(out, expected[:, :, 0])
    leaves, copies = leaves_of((2, 5, 2, 3, 8), (2, 7, 2, 1, 8), (2, 7, 2, 1, 8))
    for expand in (
        lambda t: t.expand(-1, -1, -1, 3, -1),
        lambda t: t.expand(-1, -1, -1, 3, -1).contiguous(),
    ):
        grouped = [leaves[0], *map(expand, leaves[1:])]
        flat = [copies[0].flatten(2, 3), *(expand(t).flatten(2, 3) for t in copies[1:])]
        bias = torch.randn(2, 2, 3, 5, 7)
        out = xops.memory_efficient_attention(*grouped, bias)
        expected = formula(*flat, bias.double().flatten(1, 2), None).unflatten(2, (2, 3))
        check(out, expected, leaves, copies, "five dimensions")


@pytest.mark.parametrize(
    "kind",
    ["BlockDiagonalMask", "BlockDiagonalCausalMask", "BlockDiagonalCausalFromBottomRightMask"],
)
def test_block_diagonal_masks_equal_the_formula(kind: str) -> None:
    rng = random.Random(kind)
    within = {"BlockDiagonalMask": (INF, False), "BlockDiagonalCausalMask": (0, False)}.get(
        kind, (0, True)
    )
    for case in range(CASES):
        lengths, keys = ([rng.choice((0, 1, 4, 7)) for _ in range(3)] for _ in range(2))
        keys = lengths if rng.random() < 0.3 else keys
        mask = xops.BlockDiagonalMask.from_seqlens(lengths, None if keys is lengths else keys)
        if kind != "BlockDiagonalMask":
            mask = (
                mask.make_causal()
                if kind == "BlockDiagonalCausalMask"
                else mask.make_causal_from_bottomright()
            )
        assert type(mask) is getattr(xops, kind)
        shapes = ((1, sum(lengths), 2, 8), (1, sum(keys), 2, 8), (1, sum(keys), 2, 8))
        leaves, copies = leaves_of(*shapes)
        out = xops.memory_efficient_attention(*leaves, mask)
        rows = zip(
            copies[0].split(lengths, 1), *(t.split(keys, 1) for t in copies[1:]), lengths, keys
        )
        parts = [formula(q, k, v, band(INF, *within)(a, b), None) for q, k, v, a, b in rows]
        check(out, torch.cat(parts, 1), leaves, copies, f"case {case}: {lengths, keys}")


def test_block_diagonal_mask_joins_and_splits_batches() -> None:
    tensors = [torch.randn(2, 3, 4), torch.randn(1, 5, 4)]
    mask, joined = xops.BlockDiagonalMask.from_tensor_list(tensors)
    assert mask.q_seqlen == [3, 3, 5] and joined.shape == (1, 11, 4)
    assert all(
        torch.equal(a, b) for a, b in zip(mask.make_causal().split(joined), tensors, strict=True)
    )


def test_dropout_drops_weights() -> None:
    q = torch.randn(1, 9, 2, 8)
    assert not torch.equal(
        xops.memory_efficient_attention(q, q, q, p=0.5), xops.memory_efficient_attention(q, q, q)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_liger_options_equal_the_formula(reduction: Any) -> None:
    """Softcap, z-loss over the number of targets, class weights, and the parts that come back."""
    (weight, x), copies = leaves_of((11, 8), (6, 8))
    target, class_weight = torch.tensor([0, 2, 10, -100, 5, 1]), torch.rand(11) + 0.1
    out = LigerFusedLinearCrossEntropyLoss(
        ce_weight=class_weight, lse_square_scale=0.1, softcap=2.0, reduction=reduction,
        label_smoothing=0.2, return_z_loss=True, return_token_accuracy=True,
    )(weight, x, target)  # fmt: skip
    logits = 2.0 * torch.tanh(copies[1] @ copies[0].T / 2.0)
    counts = target != -100
    z_loss = torch.where(counts, 0.1 * logits.logsumexp(-1) ** 2, 0.0)
    accuracy = (logits.argmax(-1) == target).double()
    if reduction != "none":
        z_loss = z_loss.sum() / (counts.sum() if reduction == "mean" else 1)
        accuracy = accuracy.sum() / counts.sum()
    expected = z_loss + torch.nn.functional.cross_entropy(
        logits, target, class_weight.to(logits.dtype), label_smoothing=0.2, reduction=reduction
    )
    torch.testing.assert_close(out.z_loss, z_loss.float())
    assert torch.equal(out.token_accuracy.double(), accuracy.float().double())
    check(out.loss, expected, [weight, x], copies, reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_liger_loss_equals_the_formula(reduction: Any) -> None:
    for ignore_index, smoothing, biased in ((-100, 0.0, False), (2, 0.1, True)):
        (weight, x, bias), copies = leaves_of((11, 8), (6, 8), (11,))
        target = torch.tensor([0, 2, 10, -100 if ignore_index < 0 else 2, 5, 1])
        loss_fn = LigerFusedLinearCrossEntropyLoss(
            ignore_index=ignore_index,
            label_smoothing=smoothing,
            reduction=reduction,
            accum_dtype=torch.float32,
        )
        loss = loss_fn(weight, x, target, *((bias,) if biased else ()))
        logits = copies[1] @ copies[0].T + (copies[2] if biased else 0.0)
        logs = logits - logits.logsumexp(-1, keepdim=True)
        counts = target != ignore_index
        chosen = logs.gather(1, target.clamp(min=0)[:, None])[:, 0]
        expected = torch.where(counts, -(1 - smoothing) * chosen - smoothing * logs.mean(-1), 0.0)
        if reduction != "none":
            expected = expected.sum() / (counts.sum() if reduction == "mean" else 1)
        n = 3 if biased else 2
        check(
            loss, expected, [weight, x, bias][:n], copies[:n], f"{reduction}, smoothing {smoothing}"
        )
