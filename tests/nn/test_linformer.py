# SPDX-License-Identifier: Apache-2.0
"""Linformer equals plain code in float64 for every sharing; padding has no effect; errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytransformer import nn


def plain(layer: nn.LinformerSelfAttention, x: Tensor, keep: Tensor) -> Tensor:
    """Return equation 7 of the paper, head by head; padding's keys and values are zero."""
    projected = layer.qkv(x).chunk(3, -1)
    outs = []
    for h in range(layer.num_heads):
        q, k, v = (t[..., h * layer.head_dim : (h + 1) * layer.head_dim] for t in projected)
        e, f = (
            m.weight[h % m.weight.shape[0], :, : x.shape[1]] for m in (layer.keys, layer.values)
        )
        k, v = k.masked_fill(~keep[..., None], 0), v.masked_fill(~keep[..., None], 0)
        scores = torch.einsum("bqd,kl,bld->bqk", q, e, k) / layer.head_dim**0.5
        outs.append(scores.softmax(-1) @ torch.einsum("kl,bld->bkd", f, v))
    return layer.out(torch.cat(outs, -1))


@pytest.mark.parametrize("padded", ["none", "mask", "lengths"])
@pytest.mark.parametrize("sharing", ["none", "heads", "key_value"])
def test_module_equals_the_equation(sharing: Any, padded: str) -> None:
    layer = nn.LinformerSelfAttention(12, 3, max_length=50, projected=7, sharing=sharing).double()
    x = torch.randn(2, 41, 12, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, 41, dtype=torch.bool)
    visible: dict[str, Any] = {}
    if padded == "mask":
        keep[0, :3] = keep[1, 20:30] = False
        visible = nn.padding(keep, 2, 41)
    elif padded == "lengths":
        keep[1, 33:] = False
        visible = nn.padding(torch.tensor([41, 33]), 2, 41)
    found, expected = layer(x, **visible), plain(layer, x, keep)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *layer.parameters()])
    for one, two in zip(
        torch.autograd.grad((found * weight).sum(), [x, *layer.parameters()]), wanted
    ):
        torch.testing.assert_close(one, two)


def test_parameter_count_depends_on_sharing() -> None:
    """(k, L) once, twice, or twice per head; layers may share one module."""
    base = sum(p.numel() for p in nn.MultiHeadAttention(12, 3).parameters())

    def more(*layers: torch.nn.Module) -> int:
        return sum(p.numel() for p in torch.nn.ModuleList(layers).parameters()) - len(layers) * base

    made = {
        s: nn.LinformerSelfAttention(12, 3, max_length=50, projected=7, sharing=s)
        for s in ("none", "heads", "key_value")
    }
    assert {s: more(m) // 350 for s, m in made.items()} == {"none": 6, "heads": 2, "key_value": 1}
    one, two = made["key_value"], nn.LinformerSelfAttention(12, 3, max_length=50, projected=7)
    two.keys = two.values = one.keys
    assert more(one, two) == 350
    assert made["heads"].state_dict().keys() == nn.MultiHeadAttention(12, 3).state_dict().keys() | {
        "keys.weight", "values.weight"
    }  # fmt: skip


def test_nan_in_padding_has_no_effect_and_no_visible_key_gives_the_bias() -> None:
    layer = nn.LinformerSelfAttention(8, 2, max_length=20, projected=4)
    x = torch.randn(2, 20, 8)
    keep = torch.arange(20) < torch.tensor([[12], [0]])
    expected = layer(x, **nn.padding(keep, 2, 20))
    y = x.clone()
    y[0, 12:] = float("nan")
    assert torch.equal(layer(y, **nn.padding(keep, 2, 20))[0, :12], expected[0, :12])
    torch.testing.assert_close(expected[1], layer.out.bias.expand(20, 8))
    by_lengths = layer(x, **nn.padding(torch.tensor([12, 0]), 2, 20, queries=True))
    torch.testing.assert_close(by_lengths[0, :12], expected[0, :12])
    torch.testing.assert_close(
        by_lengths[0, 12:], layer.out.bias.expand(8, 8)
    )  # queries at padding have no visible keys


def test_blocks_compile_and_export() -> None:
    mixing = nn.LinformerSelfAttention(8, 2, max_length=64, projected=8)
    stack = nn.Stack(
        [nn.Block(mixing, nn.FeedForward(8, 16), lambda: nn.LayerNorm(8))], None
    ).eval()
    x, visible = (
        torch.randn(2, 30, 8),
        nn.padding(torch.arange(30) < torch.tensor([[30], [20]]), 2, 30),
    )
    expected = stack(x, visible)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, visible), expected)
    program = torch.export.export(
        mixing, (x,), dynamic_shapes={"x": {1: torch.export.Dim("length", min=2, max=63)}}
    )
    torch.testing.assert_close(program.module()(x[:, :17]), mixing(x[:, :17]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_run(dtype: torch.dtype) -> None:
    layer, x = nn.LinformerSelfAttention(16, 2, max_length=40, projected=8), torch.randn(2, 40, 16)
    expected = layer(x)
    with torch.autocast("cpu", dtype):
        found = layer(x)
    assert found.dtype == dtype and (found - expected).norm() < 2e-2 * expected.norm()
    assert layer.to(dtype)(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        (dict(sharing="layers"), {}, "sharing must be one of none, heads, key_value, got 'layers'"),
        (dict(num_heads=3), {}, "d_model 8 is not a multiple of num_heads 3"),
        (dict(max_length=9), {}, "made for at most 9 tokens, got 10"),
        ({}, dict(causal="top_left"), "causal cannot be said of mixtures"),
        ({}, dict(bias=torch.zeros(10, 10), window=(3, 3)), "bias, window cannot be said"),
        (
            {},
            dict(attn_mask=torch.ones(10, 10, dtype=torch.bool)),
            r"must be key padding, bool \(2, 1, 1, 10\), got torch.bool of",
        ),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: dict[str, Any], call: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        nn.LinformerSelfAttention(8, **{"num_heads": 2, "max_length": 32, **arguments})(
            torch.randn(2, 10, 8), **call
        )
