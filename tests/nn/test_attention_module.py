# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention equals PyTorch's module; caches, beams, lengths and taps."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer import nn
from support.models import assert_same_logits


def test_module_equals_torch_multihead_attention():
    theirs = torch.nn.MultiheadAttention(24, 4, batch_first=True)
    ours = nn.MultiHeadAttention(24, 4)
    ours.qkv.load_state_dict({"weight": theirs.in_proj_weight, "bias": theirs.in_proj_bias + 1})
    theirs.in_proj_bias.data += 1
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(3, 7, 24)
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[1, :2] = keep[2, 4:] = False
    expected = theirs(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
    assert_same_logits(ours(x, **nn.padding(keep, 3, 7)), expected)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_parameter_count_does_not_depend_on_the_number_of_heads():
    counts = {
        sum(p.numel() for p in nn.MultiHeadAttention(24, h).parameters()) for h in (1, 2, 4, 8)
    }
    assert counts == {4 * 24 * 25}


def test_head_dim_and_grouped_queries_are_free():
    layer = nn.MultiHeadAttention(10, 6, num_kv_heads=2, head_dim=8)
    assert layer.qkv.weight.shape == ((6 + 2 + 2) * 8, 10)
    assert layer.out.weight.shape == (10, 48)
    x = torch.randn(2, 5, 10)
    q, k, v = (
        t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in layer.qkv(x).split([48, 16, 16], -1)
    )
    each = [
        torch.softmax(q[:, h] @ k[:, h // 3].transpose(1, 2) / 8**0.5, -1) @ v[:, h // 3]
        for h in range(6)
    ]  # three query heads share a key head
    assert_same_logits(layer(x), layer.out(torch.cat(each, -1)))


@pytest.mark.parametrize("cross", [False, True])
def test_value_dim_is_independent(cross: bool):
    """W_O is (d_model, heads * value_dim): queries and keys of 8, values of 3.

    The scale is that of the keys.
    """
    layer = nn.MultiHeadAttention(10, 4, num_kv_heads=2, head_dim=8, value_dim=3, cross=cross)
    x, context = torch.randn(2, 5, 10), torch.randn(2, 7, 10)
    if cross:
        assert layer.key_value.weight.shape == (2 * 8 + 2 * 3, 10)
        q, (k, v) = layer.query(x), layer.key_value(context).split([16, 6], -1)
    else:
        assert layer.qkv.weight.shape == (4 * 8 + 2 * 8 + 2 * 3, 10)
        q, k, v = layer.qkv(x).split([32, 16, 6], -1)
    assert layer.out.weight.shape == (10, 12) and "value_dim=3" in repr(layer)
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t, size in ((q, 8), (k, 8), (v, 3)))
    each = [
        torch.softmax(q[:, h] @ k[:, h // 2].transpose(1, 2) / 8**0.5, -1) @ v[:, h // 2]
        for h in range(4)
    ]
    assert_same_logits(layer(x, context) if cross else layer(x), layer.out(torch.cat(each, -1)))
    with pytest.raises(ValueError, match="head_dim and value_dim must be at least 1, got 8 and 0"):
        nn.MultiHeadAttention(10, 4, head_dim=8, value_dim=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, None, None), (4, 3, 8), (0, None, 8), (4, 0, 8)]
)
def test_invalid_heads_are_refused(heads: int, kv_heads: int | None, head_dim: int | None):
    with pytest.raises(ValueError, match="multiple"):
        nn.MultiHeadAttention(32, heads, num_kv_heads=kv_heads, head_dim=head_dim)


@torch.no_grad()
def test_cached_chunks_equal_the_full_sequence():
    layer = nn.MultiHeadAttention(16, 4, num_kv_heads=2).eval()
    x, cache = torch.randn(2, 9, 16), nn.LayerCache(9)
    expected = layer(x, causal="top_left")
    pieces = [
        layer(piece, cache=cache, causal="bottom_right") for piece in x.split([4, 1, 1, 3], 1)
    ]
    assert_same_logits(torch.cat(pieces, 1), expected)
    assert cache.length == 9
    with pytest.raises(ValueError, match="10 positions, but it was made for max_length=9"):
        layer(x[:, :1], cache=cache, causal="bottom_right")


@torch.no_grad()
def test_context_is_projected_once():
    layer = nn.MultiHeadAttention(16, 4, cross=True, context_dim=12).eval()
    x, context, cache = torch.randn(2, 3, 16), torch.randn(2, 6, 12), nn.LayerCache(4)
    expected = layer(x, context)
    assert torch.equal(layer(x, context, cache=cache), expected)
    assert torch.equal(layer(x, None, cache=cache), expected)
    with pytest.raises(ValueError, match="needs context"):
        layer(x)
    with pytest.raises(ValueError, match="cross=False"):
        nn.MultiHeadAttention(16, 4)(x, context)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[1, 0, 2], [2, 2, 0], [0, 0, 1, 1, 2, 2], [1]])
def test_reordered_cache_equals_the_cache_of_reordered_rows(rows: list[int]):
    layers = [nn.MultiHeadAttention(16, 4).eval(), nn.MultiHeadAttention(16, 4, cross=True).eval()]
    # Multiples of 64 rows: the same gemm for any number of sequences, so all round alike.
    x, new, context = torch.randn(3, 64, 16), torch.randn(len(rows), 1, 16), torch.randn(3, 64, 16)

    def start(rows: torch.Tensor) -> nn.KeyValueCache:
        cache = nn.KeyValueCache(1, 68)
        layers[0](x[rows], cache=cache.layers[0], causal="top_left")
        layers[1](x[rows], context[rows], cache=cache.layers[0])
        return cache

    index = torch.tensor(rows)
    cache, expected = start(torch.arange(3)), start(index)
    cache.reorder(index)
    for layer in layers:
        assert torch.equal(layer(new, cache=cache.layers[0]), layer(new, cache=expected.layers[0]))


@torch.no_grad()
def test_reorder_can_skip_the_cross_keys():
    layer = nn.MultiHeadAttention(8, 2, cross=True)
    cache = nn.KeyValueCache(1, 4)
    layer(torch.randn(2, 1, 8), torch.randn(2, 3, 8), cache=cache.layers[0])
    before = cache.layers[0].cross
    cache.reorder(torch.tensor([1, 0]), cross=False)
    assert cache.layers[0].cross is before


@torch.no_grad()
def test_cropped_and_reset_caches_equal_new_ones():
    layer, cache = nn.MultiHeadAttention(8, 2), nn.KeyValueCache(1, 6)
    x = torch.randn(1, 6, 8)
    layer(x[:, :5], cache=cache.layers[0], causal="top_left")
    cache.crop(2)
    out = layer(x[:, 2:], cache=cache.layers[0], causal="bottom_right")
    assert_same_logits(out, layer(x, causal="top_left")[:, 2:])
    with pytest.raises(ValueError, match="between 0 and 6"):
        cache.crop(7)
    cache.reset()
    assert cache.length == 0
    layer(torch.randn(4, 2, 8), cache=cache.layers[0])  # another batch size


def test_invalid_cache_updates_are_refused():
    layer, cache = nn.MultiHeadAttention(8, 2), nn.KeyValueCache(1, 6)
    with pytest.raises(ValueError, match="inference"):
        layer(torch.randn(1, 2, 8), cache=cache.layers[0])
    with torch.no_grad():
        layer(torch.randn(1, 2, 8), cache=cache.layers[0])
        with pytest.raises(
            ValueError, match=r"key must be \(1, 2, 1, 4\) as before, got \(2, 2, 1, 4\)"
        ):
            layer(torch.randn(2, 1, 8), cache=cache.layers[0])
    with pytest.raises(ValueError, match="at least 1"):
        nn.KeyValueCache(1, 0)


def test_attention_dropout_in_training_only():
    layer, x = nn.MultiHeadAttention(16, 2, dropout=0.5), torch.randn(2, 6, 16)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_masks_are_never_expanded():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    visible = nn.padding(mask, 2, 4)
    assert visible["attn_mask"].shape == (2, 1, 1, 4)
    lengths = torch.tensor([2, 4])
    assert nn.padding(lengths, 2, 4, queries=True).keys() == {"key_lengths", "query_lengths"}
    assert nn.padding(None, 2, 4) == {}
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 5\)"):
        nn.padding(mask, 2, 5)
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(2,\)"):
        nn.padding(lengths.float(), 2, 4)


@torch.no_grad()
def test_lengths_equal_a_right_padding_mask_with_and_without_cache():
    layer = nn.MultiHeadAttention(16, 4).eval()
    x, lengths = torch.randn(2, 7, 16), torch.tensor([7, 5])
    mask = torch.arange(7) < lengths[:, None]
    at_once = layer(x, **nn.causal(nn.padding(mask, 2, 7), 0, 7))
    assert_same_logits(layer(x, **nn.causal(nn.padding(lengths, 2, 7), 0, 7))[mask], at_once[mask])
    cache = nn.LayerCache(7)
    layer(x[:, :4], cache=cache, **nn.causal(nn.padding(lengths.clamp_max(4), 2, 4), 0, 4))
    rest = layer(x[:, 4:], cache=cache, **nn.causal(nn.padding(lengths, 2, 7), 4, 3))
    assert_same_logits(rest[mask[:, 4:]], at_once[:, 4:][mask[:, 4:]])


def test_position_ids_count_from_the_first_token():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert nn.position_ids(mask, 5).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert nn.position_ids(mask, 1).tolist() == [[2], [4]]


def test_taps_see_weights_and_outputs_and_leave_no_state():
    model = torch.nn.ModuleDict({"a": nn.MultiHeadAttention(8, 2), "b": torch.nn.Linear(8, 8)})
    x = torch.randn(2, 5, 8)

    def run() -> torch.Tensor:
        return model["b"](model["a"](x, causal="top_left"))

    plain = run()
    with nn.taps(model, "a", "b") as seen:
        out = run()
    assert_same_logits(out, plain)
    assert seen["b"] is out
    weights = seen["a"].weights()
    assert weights.shape == (2, 2, 5, 5)
    assert (weights.triu(1) == 0).all()  # no weight above the diagonal of causal attention
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    torch.testing.assert_close(seen["a"].weights(rows=[3], heads=[1]), weights[:, 1:, 3:4])
    assert seen["a"].summary("entropy").keys() == {"entropy"}
    torch.testing.assert_close(
        weights @ seen["a"].value, pt.attention(*_qkv(seen["a"]), causal="top_left")
    )
    assert model["a"].observer is None and not model["b"]._forward_hooks
    with nn.taps(model) as seen:
        run()
    assert list(seen) == ["a"]
    with pytest.raises(ValueError, match="no module is called 'c'"), nn.taps(model, "c"):
        pass


def _qkv(tap: nn.AttentionTap) -> tuple[torch.Tensor, ...]:
    return tap.query, tap.key, tap.value


def test_sinks_are_learned_and_scale_no_score():
    """Sinks start at zero, which is softmax off by one."""
    layer = nn.MultiHeadAttention(16, 4, sinks=True)
    x = torch.randn(2, 5, 16)
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    weight = torch.exp(q @ k.mT / 2)
    expected = layer.out(
        (weight / (1 + weight.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(-2)
    )
    assert_same_logits(layer(x), expected)
    layer(x).square().sum().backward()
    assert bool(layer.sinks.grad.all()) and "sinks" not in nn.MultiHeadAttention(16, 4).state_dict()
