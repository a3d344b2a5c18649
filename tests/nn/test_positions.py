# SPDX-License-Identifier: Apache-2.0
"""Positions: worked examples, shifts as linear maps, and the effect of order on attention."""

from __future__ import annotations

import math

import pytest
import torch

from pytransformer import nn
from support.models import assert_same_logits


def test_sinusoids_equal_a_worked_example():
    expected = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(7)]
    torch.testing.assert_close(nn.sinusoidal(7, 4), torch.tensor(expected))
    halves = nn.sinusoidal(7, 4, halves=True)
    torch.testing.assert_close(halves, torch.tensor(expected)[:, [0, 2, 1, 3]])
    with pytest.raises(ValueError, match="even"):
        nn.sinusoidal(3, 5)


@pytest.mark.parametrize("shift", [1, 7, 30])
def test_a_shift_is_one_linear_map_for_all_positions(shift: int):
    d = 8
    table = nn.sinusoidal(64, d, dtype=torch.float64)
    rates = 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    sin, cos = (shift * rates).sin(), (shift * rates).cos()
    rotation = torch.block_diag(
        *(torch.tensor([[c, s], [-s, c]], dtype=torch.float64) for s, c in zip(sin, cos))
    )
    torch.testing.assert_close(table[shift:], table[:-shift] @ rotation.T)


def _encoder(pre: bool) -> nn.Stack:
    blocks = [
        nn.Block(
            nn.MultiHeadAttention(16, 4), nn.FeedForward(16, 32), lambda: nn.LayerNorm(16), pre=pre
        )
        for _ in range(2)
    ]
    return nn.Stack(blocks, nn.LayerNorm(16), pre=pre)


@pytest.mark.parametrize("pre", [False, True])
def test_encoder_is_permutation_equivariant_only_without_positions(pre: bool):
    encoder, x, order = _encoder(pre), torch.randn(2, 9, 16), torch.randperm(9)
    assert_same_logits(encoder(x[:, order], {}), encoder(x, {})[:, order])
    placed = x + nn.SinusoidalPositions(9, 16)(9)
    moved = x[:, order] + nn.SinusoidalPositions(9, 16)(9)
    assert (encoder(moved, {}) - encoder(placed, {})[:, order]).abs().max() > 0.1


@pytest.mark.parametrize("kind", [nn.SinusoidalPositions, nn.LearnedPositions])
def test_sequences_longer_than_the_positions_are_refused(kind: type):
    positions = kind(10, 8)
    assert positions(4, 6).shape == (4, 8)
    assert torch.equal(positions(2, ids=torch.tensor([[3, 9]])), positions(10)[None, [3, 9]])
    with pytest.raises(ValueError, match="11 tokens is longer than the model's 10"):
        positions(5, 6)
    with pytest.raises(ValueError, match="between 0 and 9, got 3 to 10"):
        positions(2, ids=torch.tensor([[3, 10]]))


def test_alibi_slopes_equal_the_paper():
    assert nn.Alibi(8).slopes.tolist() == [2.0**-h for h in range(1, 9)]
    twelve = nn.Alibi(12).slopes
    assert twelve[:8].tolist() == [2.0**-h for h in range(1, 9)]
    torch.testing.assert_close(twelve[8:], torch.tensor([2.0 ** -(h + 0.5) for h in range(4)]))


def test_alibi_and_t5_table_equal_dense_biases():
    layer, x = nn.MultiHeadAttention(16, 4), torch.randn(1, 6, 16)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    alibi = nn.Alibi(4)
    assert_same_logits(
        layer(x, bias=alibi()), layer(x, bias=-alibi.slopes[:, None, None] * distance)
    )
    table = nn.RelativePositionTable(8, 4, bidirectional=True, max_distance=16)
    layer(x, bias=table()).square().sum().backward()
    assert table.table.grad.abs().sum() > 0
