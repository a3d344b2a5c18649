# SPDX-License-Identifier: Apache-2.0
"""Norms, blocks, feed-forward, mixing, convolution and scoring against plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer import nn
from support.models import assert_same_logits


def test_norms_equal_torch():
    x = torch.randn(3, 5, 12)
    for ours, theirs in (
        (nn.LayerNorm(12, 1e-3), torch.nn.LayerNorm(12, 1e-3)),
        (nn.LayerNorm(12, bias=False), torch.nn.LayerNorm(12, bias=False)),
        (nn.RMSNorm(12), torch.nn.RMSNorm(12, 1e-6)),
    ):
        for p in theirs.parameters():
            p.data.normal_()
        ours.load_state_dict(theirs.state_dict())
        assert_same_logits(ours(x), theirs(x))
        normed, stream = ours.add(x, x.flip(0))
        assert_same_logits(stream, x + x.flip(0))
        assert_same_logits(normed, theirs(x + x.flip(0)))


@pytest.mark.parametrize("pre", [False, True])
def test_stack_equals_its_equations(pre: bool):
    def block() -> nn.Block:
        return nn.Block(
            nn.MultiHeadAttention(16, 4), nn.FeedForward(16, 32), lambda: nn.LayerNorm(16), pre=pre,
            cross_attention=nn.MultiHeadAttention(16, 2, cross=True),
        )  # fmt: skip

    stack = nn.Stack([block(), block()], nn.LayerNorm(16), pre=pre)
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, context = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    h = x
    for b in stack.blocks:
        for residual, f in (
            (b.mixing_residual, lambda t, b=b: b.mixing(t, causal="top_left")),
            (b.cross_residual, lambda t, b=b: b.cross_attention(t, context)),
            (b.feed_forward_residual, b.feed_forward),
        ):
            h = h + f(residual.norm(h)) if pre else residual.norm(h + f(h))
    assert_same_logits(stack(x, {"causal": "top_left"}, context), stack.norm(h))


def test_block_dropout_in_training_only():
    stack = nn.Stack(
        [nn.Block(nn.MultiHeadAttention(8, 2), nn.FeedForward(8, 16), lambda: nn.LayerNorm(8),
            dropout=0.5, pre=True)],
        nn.LayerNorm(8), dropout=0.5, pre=True,
    )  # fmt: skip
    x = torch.randn(2, 3, 8)
    assert not torch.equal(stack(x, {}), stack(x, {}))
    assert torch.equal(stack.eval()(x, {}), stack(x, {}))
    with pytest.raises(ValueError, match="last norm"):
        nn.Stack([], None, pre=True)


@pytest.mark.parametrize("pre", [False, True])
def test_residual_connections_drop_the_branch(pre: bool):
    connection, x, r, f = (
        nn.Residual(nn.LayerNorm(8), 1.0, pre),
        torch.randn(2, 3, 8),
        torch.randn(2, 3, 8),
        torch.nn.Linear(8, 8),
    )
    out = connection(nn.Stream(x, r) if pre else nn.Stream(x), f)  # with probability 1
    assert_same_logits(out.x, f(connection.norm(r)) if pre else connection.norm(x))
    if pre:
        assert torch.equal(out.residual, r)


@pytest.mark.parametrize("gated", [False, True])
def test_feed_forward_equals_torch(gated: bool):
    layer, x = nn.FeedForward(8, 20, activation="silu", gated=gated, d_out=6), torch.randn(3, 5, 8)
    hidden = F.silu(layer.gate(x)) * layer.w1(x) if gated else F.silu(layer.w1(x))
    assert_same_logits(layer(x), layer.w2(hidden))


# ---- mixing


def test_fourier_mixing_equals_two_transforms():
    x = torch.randn(2, 6, 8)
    tokens, features = (
        torch.exp(-2j * math.pi * torch.arange(n)[:, None] * torch.arange(n) / n).to(
            torch.complex64
        )
        for n in (6, 8)
    )
    assert_same_logits(nn.FourierMixing()(x), (tokens @ x.to(torch.complex64) @ features).real)
    assert nn.FourierMixing()(x.bfloat16()).dtype == torch.bfloat16


def test_token_mixing_mixes_tokens_only():
    layer, x = nn.TokenMixing(5, 12), torch.randn(2, 5, 8)
    network = layer.network
    assert_same_logits(layer(x), network.w2(F.gelu(network.w1(x.transpose(1, 2)))).transpose(1, 2))
    with pytest.raises(ValueError, match="made for 5 tokens, got 6"):
        layer(torch.randn(2, 6, 8))


def test_patches_equal_a_convolution():
    layer = nn.PatchEmbedding(12, 4, 3, 10)
    images = torch.randn(2, 3, 12, 12)
    weight = layer.projection.weight.view(10, 3, 4, 4)
    expected = F.conv2d(images, weight, layer.projection.bias, stride=4).flatten(2).transpose(1, 2)
    assert_same_logits(layer(images), expected)
    with pytest.raises(ValueError, match=r"pixel_values must be \(B, 3, 12, 12\)"):
        layer(images[..., :8])
    with pytest.raises(ValueError, match="multiple"):
        nn.PatchEmbedding(12, 5, 3, 10)
    with pytest.raises(ValueError, match=r"a pair \(height, width\) of them, got \(8, 0\)"):
        nn.PatchEmbedding((8, 0), 4, 3, 10)


def test_patches_support_rectangles() -> None:
    layer, images = nn.PatchEmbedding((16, 32), 4, 3, 10), torch.randn(2, 3, 16, 32)
    assert (layer.num_patches, layer.grid) == (16 * 32 // 4**2, (4, 8))
    weight = layer.projection.weight.view(10, 3, 4, 4)
    assert_same_logits(
        layer(images),
        F.conv2d(images, weight, layer.projection.bias, stride=4).flatten(2).transpose(1, 2),
    )


# ---- Conformer


def test_convolution_module_equals_a_worked_example():
    layer = nn.ConvolutionModule(1, 3).eval()
    with torch.no_grad():
        layer.pointwise_in.weight.copy_(torch.tensor([[2.0], [0.0]]))  # GLU: 2x * sigmoid(0) = x
        layer.pointwise_in.bias.zero_()
        layer.depthwise.weight.copy_(torch.tensor([[[1.0, 2.0, 3.0]]]))
        layer.depthwise.bias.zero_()
        layer.pointwise_out.weight.fill_(1.0)
        layer.pointwise_out.bias.fill_(0.5)
    # (0, 1, -1), (1, -1, 2), (-1, 2, 0) times (1, 2, 3); batch norm of mean 0 and variance 1
    # divides by sqrt(1 + 1e-5)
    convolved = torch.tensor([-1.0, 5.0, 3.0]) / math.sqrt(1 + 1e-5)
    expected = convolved / (1 + torch.exp(-convolved)) + 0.5
    out = layer(torch.tensor([1.0, -1.0, 2.0]).view(1, 3, 1))
    torch.testing.assert_close(out.flatten(), expected)
    with pytest.raises(ValueError, match="odd"):
        nn.ConvolutionModule(4, 2)


def test_conformer_block_equals_its_equation():
    block = nn.ConformerBlock(8, 2, 16, 5).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(2, 7, 8)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    attention.load_state_dict({
        "in_proj_weight": block.attention.qkv.weight, "in_proj_bias": block.attention.qkv.bias,
        "out_proj.weight": block.attention.out.weight, "out_proj.bias": block.attention.out.bias,
    })  # fmt: skip
    c = block.convolution

    def norm(i: int, h: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(h, (8,), block.residuals[i].norm.weight, block.residuals[i].norm.bias)

    h = x + 0.5 * block.first.w2(F.silu(block.first.w1(norm(0, x))))
    normed = norm(1, h)
    h = h + attention(normed, normed, normed, need_weights=False)[0]
    inner = c.depthwise(F.glu(c.pointwise_in(norm(2, h)), -1).transpose(1, 2))
    h = h + c.pointwise_out(F.silu(c.batch_norm(inner)).transpose(1, 2))
    h = h + 0.5 * block.second.w2(F.silu(block.second.w1(norm(3, h))))
    assert_same_logits(block(x, {}), F.layer_norm(h, (8,), block.norm.weight, block.norm.bias))


def test_conformer_padding_does_not_affect_results():
    block = nn.ConformerBlock(8, 2, 16, 5).eval()
    x, keep = torch.randn(2, 7, 8), torch.arange(7) < torch.tensor([[4], [7]])
    polluted = x.masked_fill(~keep[..., None], 1e3)
    visible = nn.padding(keep, 2, 7)
    assert_same_logits(block(polluted, visible, keep)[keep], block(x, visible, keep)[keep])
    assert_same_logits(block(x, visible, keep)[:1, :4], block(x[:1, :4], {}))


# ---- scoring, and the worked examples of the lecture notes


def test_similarities_weigh_values():
    scores = nn.DotScore(scaled=False)(
        torch.ones(1, 1, 1), torch.tensor([0.05, 0.45, 0.45]).view(1, 3, 1)
    )
    torch.testing.assert_close((scores @ torch.tensor([[1.0], [20.0], [22.0]])).item(), 18.95)


def test_a_permutation_of_scores_permutes_rows():
    permutation, value = torch.eye(3)[[1, 0, 2]], torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3])
    expected = value[[1, 0, 2]]
    assert torch.equal(nn.attend(1e4 * permutation, value)[0], expected)
    zero = torch.zeros(1, 1, 3, 4)
    out = pt.attention(zero, zero, value[None, None], bias=permutation.log())
    torch.testing.assert_close(out[0, 0], expected)


def test_attend_supports_masks_and_empty_rows():
    scores = torch.randn(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    out, weights = nn.attend(scores, torch.randn(4, 5), mask)
    assert (weights.triu() == 0).all()
    torch.testing.assert_close(weights[1:].sum(-1), torch.ones(3))
    assert (out[0] == 0).all()


def test_scoring_functions_equal_their_definitions():
    query, key = torch.randn(2, 3, 6), torch.randn(2, 4, 6)
    scaled = nn.DotScore()(query, key)
    torch.testing.assert_close(scaled, torch.einsum("bqd,bkd->bqk", query, key) / 6**0.5)
    value = torch.randn(2, 4, 5)
    fused = pt.attention(query[:, None], key[:, None], value[:, None])[:, 0]
    torch.testing.assert_close(nn.attend(scaled, value)[0], fused)
    general, other = nn.GeneralScore(6, 7), torch.randn(2, 4, 7)
    torch.testing.assert_close(
        general(query, other), torch.einsum("bqd,de,bke->bqk", query, general.map.weight, other)
    )
    additive = nn.AdditiveScore(6, 7, 9)
    w_q, w_k, v = additive.query.weight, additive.key.weight, additive.vector.weight[0]
    expected = torch.stack([
        torch.stack([torch.tanh(w_q @ q + w_k @ k) @ v for k in keys]) for qs,
        keys in zip(query, other) for q in qs
    ]).view(2, 3, 4)  # fmt: skip
    torch.testing.assert_close(additive(query, other), expected)
