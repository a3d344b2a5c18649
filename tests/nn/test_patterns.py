# SPDX-License-Identifier: Apache-2.0
"""Self-attention with a pattern equals dense code in float64: padding, compile, export, models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import pytransformer as pt
from pytransformer import nn
from pytransformer.models import BERT
from pytransformer.models.bert import BERTConfig
from support.models import assert_same_logits

L = 150  # no multiple of a block
RULES: dict[str, tuple[nn.Pattern, Callable[[Tensor, Tensor], Tensor]]] = {
    "local": (
        nn.Pattern("sliding_window", window=(20, 5)),
        lambda i, j: (j >= i - 20) & (j <= i + 5),
    ),
    "strided": (
        nn.Pattern("strided", stride=40),
        lambda i, j: (j <= i) & ((i - j < 40) | ((i - j) % 40 == 0)),
    ),
    "longformer": (
        nn.Pattern("longformer", window=16, global_tokens=2, block_size=32),
        lambda i, j: ((i - j).abs() <= 8) | (i < 2) | (j < 2),
    ),
    "big bird": (
        nn.Pattern("big_bird", window_blocks=1, global_blocks=1, random_blocks=0, block_size=32),
        lambda i, j: (i // 32 == j // 32) | (i < 32) | (j < 32),
    ),
    "function": (
        nn.Pattern(
            lambda n, device: pt.BlockMask.strided(n, 40) & pt.BlockMask.sliding_window(n, (64, 0))
        ),
        lambda i, j: (j <= i) & (i - j <= 64) & ((i - j < 40) | ((i - j) % 40 == 0)),
    ),
}


def plain(layer: nn.MultiHeadAttention, x: Tensor, visible: Tensor) -> Tensor:
    """Return the module's equation with the (L, L) mask."""
    q, k, v = (
        t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1)
    )
    scores = (q @ k.mT / layer.head_dim**0.5).masked_fill(~visible, float("-inf"))
    return layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def pairs(rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return rule(torch.arange(L)[:, None], torch.arange(L))


@pytest.mark.parametrize("padded", ["none", "mask", "lengths"])
@pytest.mark.parametrize("name", RULES)
def test_patterns_equal_dense_code(name: str, padded: str) -> None:
    pattern, rule = RULES[name]
    layer = nn.MultiHeadAttention(12, 3, pattern=pattern).double()
    x = torch.randn(2, L, 12, dtype=torch.float64, requires_grad=True)
    keep = torch.ones(2, L, dtype=torch.bool)
    arguments: dict[str, Any] = {}
    if padded == "mask":
        keep[0, :1] = keep[0, 70:90] = keep[1, 140:] = (
            False  # in front, in the middle and at the end
        )
        arguments = nn.padding(keep, 2, L)
    elif padded == "lengths":
        keep[1, 131:] = False
        arguments = nn.padding(torch.tensor([L, 131]), 2, L)
    visible = pairs(rule) & keep[:, None, None, :]
    seen = visible.any(-1)[:, 0]  # rows of queries without visible keys are 0 here and NaN there
    weight = torch.randn(2, L, 12, dtype=torch.float64) * seen[..., None]
    found, expected = (
        layer(x, **arguments),
        plain(layer, x, visible | ~visible.any(-1, keepdim=True)),
    )
    torch.testing.assert_close(found[seen], expected[seen])
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *layer.parameters()])
    for one, two in zip(
        torch.autograd.grad((found * weight).sum(), [x, *layer.parameters()]), wanted
    ):
        torch.testing.assert_close(one, two)


def test_random_blocks_differ_by_head_and_follow_the_seed() -> None:
    pattern = nn.Pattern(
        "big_bird",
        heads=2,
        random_blocks=1,
        window_blocks=1,
        global_blocks=0,
        block_size=32,
        seed=5,
    )
    layer, x = (
        nn.MultiHeadAttention(8, 2, pattern=pattern).double(),
        torch.randn(1, L, 8, dtype=torch.float64),
    )
    visible = pt.BlockMask.big_bird(
        L, heads=2, random_blocks=1, window_blocks=1, global_blocks=0, block_size=32, seed=5
    ).to_dense()
    assert not torch.equal(visible[:, 0], visible[:, 1])
    torch.testing.assert_close(layer(x), plain(layer, x, visible))


def test_state_dict_equals_full_attention() -> None:
    full, sparse = (
        nn.MultiHeadAttention(8, 2),
        nn.MultiHeadAttention(8, 2, pattern=RULES["local"][0]),
    )
    sparse.load_state_dict(full.state_dict())
    x = torch.randn(1, 16, 8)  # inside the window's left side; causality hides the right side
    assert_same_logits(sparse(x, causal="top_left"), full(x, causal="top_left"))


def test_masks_are_cached_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(n: int, device: torch.device) -> pt.BlockMask:
        made.append(n)
        return pt.BlockMask.sliding_window(n, (3, 3), device=device)

    pattern = nn.Pattern(make)
    layers = [nn.MultiHeadAttention(8, 2, pattern=pattern) for _ in range(3)]
    for n in [40, 50, 40, 50]:
        for layer in layers:
            layer(torch.randn(1, n, 8))
    assert made == [40, 50]
    for n in range(60, 60 + nn.patterns.KEPT - 1):
        pattern(n, torch.device("cpu"))
    assert len(pattern._kept) == nn.patterns.KEPT
    made.clear()
    pattern(50, torch.device("cpu"))
    pattern(40, torch.device("cpu"))
    assert made == [40]  # the least recently used one was evicted
    made.clear()
    copied = copy.deepcopy(layers[0])
    assert not copied.pattern._kept and copied.pattern.make is make


def test_masks_of_inference_mode_serve_training() -> None:
    layer, x = (
        nn.MultiHeadAttention(8, 2, pattern=nn.Pattern("longformer", window=8)),
        torch.randn(1, 40, 8),
    )
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.qkv.weight.grad.isfinite().all()
    with torch._subclasses.FakeTensorMode():
        layer.pattern(64, torch.device("cpu"))
    layer(torch.randn(1, 64, 8))  # a real mask, although the first call was fake
    assert str(layer.pattern(64, torch.device("meta")).device) == "meta"


@pytest.mark.parametrize("name", RULES)
def test_first_call_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    layer = nn.MultiHeadAttention(8, 2, pattern=copy.deepcopy(RULES[name][0]))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for n in (96, 130):  # another length is another mask and another graph
        x = torch.randn(2, n, 8, requires_grad=True)
        keep = torch.arange(n) < torch.tensor([[n], [n - 9]])
        found, expected = compiled(x, **nn.padding(keep, 2, n)), layer(x, **nn.padding(keep, 2, n))
        torch.testing.assert_close(found, expected)
        for one, two in zip(
            torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
        ):
            torch.testing.assert_close(one, two)


def test_compiled_layers_have_their_own_patterns() -> None:
    """Two layers share code in the compiler; a length that returns compiles nothing."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for window in (8, 40):
        layer = nn.MultiHeadAttention(8, 2, pattern=nn.Pattern("longformer", window=window))
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        for n in (96, 130, 96, 130):
            x = torch.randn(1, n, 8)
            torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 4


@pytest.mark.parametrize("strict", [False, True])
def test_exported_masks_are_constants(strict: bool) -> None:
    layer, x = (
        nn.MultiHeadAttention(8, 2, pattern=nn.Pattern("longformer", window=16, global_tokens=1)),
        torch.randn(2, 90, 8),
    )
    program = torch.export.export(layer, (x,), strict=strict)
    assert str(program).count("torch.ops.pytransformer.attention_fwd") == 1
    torch.testing.assert_close(program.module()(x), layer(x))
    with pytest.raises(
        Exception, match=r"(?i)specialized|constraint|constant"
    ):  # torch's message depends on its version
        torch.export.export(
            layer,
            (x,),
            dynamic_shapes={"x": {1: torch.export.Dim("length", min=64, max=512)}},
            strict=strict,
        )


def test_taps_see_weights_of_the_pattern() -> None:
    pattern, rule = RULES["longformer"]
    model = torch.nn.Sequential(nn.MultiHeadAttention(8, 2, pattern=pattern))
    with nn.taps(model) as seen:
        model(torch.randn(1, L, 8))
    weights = seen["0"].weights()
    assert torch.equal(weights != 0, pairs(rule).expand_as(weights))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: nn.Pattern("spiral"),
            "no pattern is called 'spiral'; there are sliding_window, strided",
        ),
        (
            lambda x: nn.Pattern(lambda n, d: None, window=3),
            "a function takes .length, device. alone",
        ),
        (
            lambda x: nn.MultiHeadAttention(8, 2, cross=True, pattern=RULES["local"][0]),
            "a pattern is of self-attention",
        ),
        (
            lambda x: local()(x[0]),
            "packed sequences and the Pattern.'sliding_window', window=.20, 5..",
        ),
        (lambda x: local()(x, cache=nn.LayerCache(8)), "a cache and the Pattern"),
        (
            lambda x: local()(x, attn_mask=torch.ones(6, 6, dtype=torch.bool)),
            r"must be key padding, bool \(2, 1, 1, 6\), got",
        ),
        (
            lambda x: local()(x, attn_mask=pt.BlockMask.strided(6, 2)),
            "got BlockMask; put it into the pattern",
        ),
        (
            lambda x: local()(
                x,
                attn_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool),
                key_segments=torch.zeros(2, 6),
            ),
            "give padding as key_lengths where there are segments",
        ),
    ],
)
def test_invalid_patterns_are_refused(make: Callable[[Tensor], Any], message: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        make(torch.randn(2, 6, 8))


def local() -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(8, 2, pattern=RULES["local"][0])


def test_bert_has_a_pattern_in_its_config(tmp_path: Any) -> None:
    """The config saves the field; windows as wide as the sequence give BERT."""
    sizes = dict(vocab_size=30, d_model=16, num_layers=2, num_heads=2, hidden=32, max_length=80)
    wide = {"make": "sliding_window", "window": [80, 80]}
    torch.manual_seed(3)
    full, sparse = BERT(BERTConfig(**sizes)).eval(), BERT(BERTConfig(**sizes, pattern=wide)).eval()
    with torch.no_grad():
        for p in full.parameters():  # initial weights are so small that keys hardly matter
            p.add_(0.1 * torch.randn_like(p))
    sparse.load_state_dict(full.state_dict())
    ids, mask = torch.randint(30, (2, 80)), torch.arange(80) < torch.tensor([[80], [50]])
    assert_same_logits(sparse(ids, mask).logits[mask], full(ids, mask).logits[mask])
    narrow = BERT(
        BERTConfig(**sizes, pattern={"make": "longformer", "window": 8, "global_tokens": 1})
    ).eval()
    narrow.load_state_dict(full.state_dict())
    assert (
        not narrow.encoder.packs and len({id(b.mixing.pattern) for b in narrow.encoder.blocks}) == 1
    )
    assert (narrow(ids, mask).logits - full(ids, mask).logits)[mask].abs().max() > 0.01
    narrow.save(tmp_path)
    assert_same_logits(BERT.load(tmp_path).eval()(ids, mask).logits, narrow(ids, mask).logits)
