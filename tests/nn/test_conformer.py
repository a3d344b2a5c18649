# SPDX-License-Identifier: Apache-2.0
"""Relative positions, subsampling, CTC and separable convolutions against explicit sums."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from pytransformer import nn
from support.models import assert_same_gradient, assert_same_logits, random_sum
from support.small_models import build


def _sinusoid(distance: int, d: int) -> torch.Tensor:
    angles = [distance / 10000 ** (2 * (n // 2) / d) for n in range(d)]
    return torch.tensor([math.cos(a) if n % 2 else math.sin(a) for n, a in enumerate(angles)])


def _relative_by_hand(
    layer: nn.RelativeMultiHeadAttention, x: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Return Transformer-XL's score of each pair; x (L, d), visible (L, L)."""
    length, d = x.shape
    size = layer.head_dim
    q, k, v = layer.qkv(x).chunk(3, -1)
    heads = []
    for h in range(d // size):
        part = slice(h * size, (h + 1) * size)
        u, w = layer.content_bias[h], layer.position_bias[h]
        rows = []
        for i in range(length):
            scores = [
                (q[i, part] + u) @ k[j, part]
                + (q[i, part] + w) @ (layer.position.weight[part] @ _sinusoid(i - j, d))
                for j in range(length)
            ]
            p = (
                (torch.stack(scores) / math.sqrt(size))
                .masked_fill(~visible[i], -torch.inf)
                .softmax(-1)
            )
            rows.append(p @ v[:, part])
        heads.append(torch.stack(rows))
    return layer.out(torch.cat(heads, -1))


def _layer() -> nn.RelativeMultiHeadAttention:
    layer = nn.RelativeMultiHeadAttention(12, 3)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return layer


@pytest.mark.parametrize("length", [1, 2, 7])
def test_relative_attention_equals_its_equation(length: int) -> None:
    layer, x = _layer(), torch.randn(1, length, 12)
    out = layer(x, sinusoids=nn.relative_sinusoids(length, 12, x))
    mine = torch.autograd.grad(random_sum(out), list(layer.parameters()))
    by_hand = _relative_by_hand(layer, x[0], torch.ones(length, length, dtype=torch.bool))
    theirs = torch.autograd.grad(random_sum(by_hand), list(layer.parameters()))
    assert_same_logits(out[0], by_hand)
    for (name, _), ours, expected in zip(layer.named_parameters(), mine, theirs):
        if length > 1 or name in (
            "out.weight",
            "out.bias",
        ):  # one key has weight 1 for any score
            assert_same_gradient(ours, expected)


def test_relative_attention_supports_padding_on_either_side() -> None:
    layer, x = _layer(), torch.randn(2, 7, 12)
    mask = torch.tensor([[1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    out = layer(x, sinusoids=nn.relative_sinusoids(7, 12, x), **nn.padding(mask, 2, 7))
    for row, (start, end) in enumerate(((0, 4), (2, 7))):
        alone = _relative_by_hand(
            layer, x[row, start:end], torch.ones(end - start, end - start, dtype=torch.bool)
        )
        assert_same_logits(out[row, start:end], alone)


def test_taps_see_the_weights_of_relative_attention() -> None:
    layer, x = _layer(), torch.randn(1, 6, 12)
    with nn.taps(torch.nn.ModuleDict({"layer": layer}), "layer") as seen:
        out = layer(x, sinusoids=nn.relative_sinusoids(6, 12, x))
    tap = seen["layer"]
    assert_same_logits(layer.out((tap.weights() @ tap.value).transpose(1, 2).flatten(2)), out)


def test_relative_attention_names_its_arguments() -> None:
    layer, x = _layer(), torch.randn(1, 6, 12)
    with pytest.raises(ValueError, match="give sinusoids=relative_sinusoids"):
        layer(x)
    for given in (
        {"sinusoids": nn.relative_sinusoids(5, 12, x)},
        {"sinusoids": nn.relative_sinusoids(6, 12, x), "bias": x},
    ):
        with pytest.raises(ValueError, match="without bias, and sinusoids of 2 L distances"):
            layer(x, **given)


def test_subsampled_frames_depend_on_their_windows() -> None:
    layer, x = nn.ConvolutionSubsampling(9, 6), torch.randn(1, 20, 9)
    out = layer(x)
    assert out.shape == (1, nn.ConvolutionSubsampling.frames(20), 6) == (1, 4, 6)
    for frame in range(20):
        other = x.clone()
        other[:, frame] += 1.0
        changed = (layer(other) - out).abs().amax((0, 2)) > 1e-7
        assert changed.tolist() == [4 * t <= frame <= 4 * t + 6 for t in range(4)], frame
    alone = layer.out(
        F.relu(F.conv2d(F.relu(F.conv2d(x[:, None, 8:15], layer.first.weight, layer.first.bias, 2)),
            layer.second.weight,
                        layer.second.bias, 2))[0, :, 0].flatten()
    )  # fmt: skip
    assert_same_logits(out[0, 2], alone)
    with pytest.raises(ValueError, match="at least 7 frames, got 6"):
        layer(x[:, :6])
    with pytest.raises(ValueError, match="at least 7 features a frame, got 6"):
        nn.ConvolutionSubsampling(6, 6)


@pytest.mark.parametrize("features", (7, 10, 11))
def test_single_features_are_convolved_over_time(features: int) -> None:
    layer, x = nn.ConvolutionSubsampling(features, 16), torch.randn(3, 33, features)
    plain = F.conv2d(
        F.relu(layer.first(x[:, None])), layer.second.weight, layer.second.bias, stride=2
    )
    expected = layer.out(F.relu(plain).transpose(1, 2).flatten(2))
    assert_same_logits(layer(x), expected)
    for _ in range(
        20
        # in bfloat16 PyTorch's Conv2d returns unwritten memory on CPUs with AMX for one column
    ):
        freed = [
            torch.full((1 << power,), torch.nan) for power in range(6, 18)
        ]  # reused by the next tensors of these sizes
        del freed
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert (layer(x) - expected).abs().max() < 0.05 * expected.abs().max()


def test_subsampling_returns_output_lengths() -> None:
    layer = nn.ConvolutionSubsampling(9, 6)
    lengths = torch.arange(34)
    ends = torch.arange(33) < lengths[:, None]
    assert torch.equal(layer.kept(ends).sum(1), layer.kept(lengths))
    assert layer.kept(lengths).tolist() == [nn.ConvolutionSubsampling.frames(n) for n in range(34)]
    assert layer.kept(ends.flip(1))[12].tolist() == [False] * 6 + [True], (
        "left padding: frames 24 to 30 are real"
    )
    assert layer.kept(None) is None


def _paths(labels: list[int], frames: int, classes: int) -> list[tuple[int, ...]]:
    """Yield every CTC path of the labels, one class per frame: repeats collapse, blanks drop."""
    ways = itertools.product(range(classes), repeat=frames)
    return [
        path
        for path in ways
        if [c for n, c in enumerate(path) if c and (n == 0 or path[n - 1] != c)] == labels
    ]


def test_ctc_sums_every_path() -> None:
    logits, labels = torch.randn(3, 5, 3), torch.tensor([[1, 2, -100], [2, 2, 1], [1, -100, -100]])
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]).bool()
    p, total = logits.softmax(-1), 0.0
    for row in range(3):
        expected, frames = (
            [n for n in labels[row].tolist() if n > 0],
            keep[row].nonzero().flatten().tolist(),
        )
        paths = _paths(expected, len(frames), 3)
        total -= math.log(
            sum(math.prod(p[row, f, c].item() for f, c in zip(frames, path)) for path in paths)
        )
    loss = nn.ctc_loss(logits.requires_grad_(), labels, keep)
    assert loss.item() == pytest.approx(total / 6, rel=1e-5)
    loss.backward()
    assert (
        logits.grad.isfinite().all()
        and (logits.grad[~keep] == 0).all()
        and (logits.grad[keep] != 0).all()
    )


def test_ctc_decodes_the_best_path() -> None:
    best = torch.tensor([[0, 2, 2, 0, 2, 1], [1, 1, 1, 2, 2, 0]])
    logits = F.one_hot(best, 3).float()
    assert nn.ctc_read(logits) == [[2, 2, 1], [1, 2]]
    assert nn.ctc_read(logits, torch.tensor([[1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]).bool()) == [
        [2, 2, 1],
        [1, 2],
    ]
    assert nn.ctc_read(logits, torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()) == [
        [2],
        [],
    ]


@torch.no_grad()
def test_conformer_output_does_not_depend_on_the_batch() -> None:
    """Subsampling, relative positions and CTC ignore a batch's padding."""
    model, x, labels = build("Conformer-ctc").eval(), torch.randn(1, 21, 9), torch.tensor([[4, 9]])
    padded = torch.full((2, 33, 9), torch.nan)
    padded[0, :21], padded[1, 12:] = x[0], x[0]  # 12 is a multiple of the stride
    mask = torch.zeros(2, 33, dtype=torch.long)
    mask[0, :21], mask[1, 12:] = 1, 1
    alone, both = model(x, labels=labels), model(padded, mask, labels.expand(2, -1))
    assert_same_logits(both.last_hidden_state[0, :4], alone.last_hidden_state[0])
    assert_same_logits(both.last_hidden_state[1, 3:], alone.last_hidden_state[0])
    assert_same_logits(both.loss, alone.loss)
    assert model.read(padded, mask) == model.read(x) * 2
    assert_same_logits(model(padded[:1], torch.tensor([21]), labels).loss, alone.loss)


# ---- separable convolutions


def test_separable_mixing_equals_its_equation() -> None:
    layer, x = nn.SeparableMixing(4, 3), torch.randn(2, 5, 4)
    inner = layer.depthwise.bias.expand(2, 5, 4).clone()
    for i in range(5):
        for tap in range(3):
            if 0 <= i + tap - 1 < 5:
                inner[:, i] += layer.depthwise.weight[:, 0, tap] * x[:, i + tap - 1]
    assert_same_logits(layer(x), layer.pointwise(F.gelu(inner)))
    keep = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    padded = layer(torch.where(keep[..., None].bool(), x, torch.nan), **nn.padding(keep, 2, 5))
    assert_same_logits(padded[0, :3], layer(x[:1, :3])[0])
    assert_same_logits(padded[1, 1:], layer(x[1:, 1:])[0])
    by_lengths = layer(x, **nn.padding(torch.tensor([3, 5]), 2, 5, queries=True))
    assert_same_logits(by_lengths[0, :3], layer(x[:1, :3])[0])
    with pytest.raises(ValueError, match="SeparableMixing follows padding only, got causal"):
        layer(x, causal="top_left")
    with pytest.raises(ValueError, match=r"attn_mask must be \(B, 1, 1, 5\) bool, got \(5, 5\)"):
        layer(x, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="odd, got 4"):
        nn.SeparableMixing(4, 4)


def test_separable_mixing_of_patches_is_two_dimensional() -> None:
    layer, x = nn.SeparableMixing(4, 3, grid=(3, 5)), torch.randn(1, 15, 4)
    out = layer(x)
    for place in range(15):
        other = x.clone()
        other[:, place] += 1.0
        changed = (layer(other) - out).abs().amax((0, 2)) > 1e-7
        row, column = divmod(place, 5)
        assert changed.tolist() == [
            abs(n // 5 - row) <= 1 and abs(n % 5 - column) <= 1 for n in range(15)
        ]
    with pytest.raises(ValueError, match="made for 3 x 5 tokens, got 14"):
        layer(x[:, 1:])
    with pytest.raises(ValueError, match="no padding, got a mask"):
        layer(x, key_lengths=torch.tensor([3]))
