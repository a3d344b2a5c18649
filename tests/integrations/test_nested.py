# SPDX-License-Identifier: Apache-2.0
"""Nested tensors, strided and jagged: attention and torch.nn modules on packed sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.models import assert_same_elements

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"
    ),
]
LENGTHS, KEYS = (3, 5, 1), (2, 6, 4)
BOTH_LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()  # activate() warns if something is


def sequences(lengths: tuple[int, ...], *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths) + sum(shape) + lengths[0])
    return [torch.randn(n, *shape, generator=generator, requires_grad=True) for n in lengths]


def nest(parts: list[torch.Tensor], layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.as_nested_tensor(parts, layout=layout)


def ours(*inputs: torch.Tensor, **settings: Any) -> torch.Tensor:
    with pt.activate():
        return sdpa(*inputs, **settings)


def same(got: torch.Tensor, want: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """Compare output and gradients of a nested result with those of its sequences alone."""
    parts = got.unbind()
    for part, alone in zip(parts, want, strict=True):
        assert_same_elements(part, alone)
    losses = [
        sum((p * torch.linspace(-1, 1, p.shape[-1])).sum() for p in result)
        for result in (parts, want)
    ]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    for mine, theirs in zip(*grads, strict=True):
        assert_same_elements(mine, theirs, gradient=True)


@BOTH_LAYOUTS
@pytest.mark.parametrize("call", [pt.scaled_dot_product_attention, ours], ids=["pt", "activate"])
@pytest.mark.parametrize("keys", [LENGTHS, KEYS], ids=["self", "cross"])
@pytest.mark.parametrize(
    "settings", [{}, dict(is_causal=True), dict(enable_gqa=True, scale=0.3)], ids=str
)
def test_attention_equals_separate_sequences(
    layout: torch.layout, call: Callable[..., Any], keys: tuple[int, ...], settings: dict[str, Any]
) -> None:
    queries, others = (
        sequences(LENGTHS, 4, 8),
        sequences(keys, 2 if "enable_gqa" in settings else 4, 8),
    )
    query, key = (nest(parts, layout).transpose(1, 2) for parts in (queries, others))
    with trace() as ran:
        got = call(query, key, key, **settings)
    assert ran[0][0] == "attention_varlen_fwd"
    assert got.is_nested and got.layout == layout
    alone = [
        sdpa(*(t.transpose(0, 1)[None] for t in (q, k, k)), **settings)[0]
        for q, k in zip(queries, others)
    ]
    same(got, alone, [*queries, *others])


@BOTH_LAYOUTS
def test_attention_without_heads_equals_separate_sequences(layout: torch.layout) -> None:
    parts = sequences(LENGTHS, 8)
    x = nest(parts, layout)
    same(
        pt.scaled_dot_product_attention(x, x, x),
        [sdpa(p[None], p[None], p[None])[0] for p in parts],
        parts,
    )


def test_jagged_results_have_the_ragged_dimension_of_query() -> None:
    """A residual can be added."""
    x = nest(sequences(LENGTHS, 4, 8), torch.jagged)
    y = pt.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3).transpose(1, 2)
    assert (x + y).shape == x.shape


COMPILED: dict[str, Callable[..., torch.Tensor]] = {
    "self": lambda q, k, v: pt.scaled_dot_product_attention(q, q, q, is_causal=True),
    "cross": lambda q, k, v: pt.scaled_dot_product_attention(q, k, k),
    "key and value with offsets of their own": pt.scaled_dot_product_attention,
    "activate": lambda q, k, v: sdpa(q, k, v),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "activate")) for name in COMPILED],
)
def test_compiled_calls_equal_eager(name: str) -> None:
    torch._dynamo.reset()
    with pt.activate(), trace() as ran:
        one_graph(COMPILED[name])
    assert "attention_varlen_bwd" in {op for op, _ in ran}


def one_graph(call: Callable[..., torch.Tensor]) -> None:
    """Compile jagged calls of several lengths to one graph, with gradients.

    torch.compile does not support strided nested tensors.
    """
    compiled = torch.compile(
        lambda *x: call(*(t.transpose(1, 2) for t in x)), backend="aot_eager", fullgraph=True
    )
    for lengths, keys in ((LENGTHS, KEYS), ((4, 4, 9), (1, 8, 3))):
        parts = [sequences(n, 4, 8) for n in (lengths, keys, keys)]
        leaves = [p for group in parts for p in group]
        got = compiled(*(nest(group, torch.jagged) for group in parts))
        alone = [call(*(t.transpose(0, 1)[None] for t in group))[0] for group in zip(*parts)]
        losses = [
            sum((p * torch.linspace(-1, 1, 8)).sum() for p in result)
            for result in (got.unbind(), alone)
        ]
        for mine, theirs in zip(got.unbind(), alone, strict=True):
            assert_same_elements(mine, theirs)
        grads = [
            torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            for loss in losses
        ]
        for mine, theirs in zip(*grads, strict=True):
            assert_same_elements(mine, theirs, gradient=True)


def test_compiled_calls_check_lengths_at_run_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(pt.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    q, k, v, other = (
        nest(sequences(n, 4, 8), torch.jagged).detach().transpose(1, 2)
        for n in (LENGTHS, KEYS, KEYS, KEYS[::-1])
    )
    compiled(q, k, v)
    with pytest.raises(
        RuntimeError, match="key and value must have the same length in every sequence"
    ):
        compiled(q, k, other)


@BOTH_LAYOUTS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_equals_torch(
    layout: torch.layout, training: bool, norm_first: bool
) -> None:
    """PyTorch supports strided ones only in inference."""
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first), 2
    )
    model.train(training)
    parts = sequences(LENGTHS, 16)
    with pt.activate(), trace() as ran:
        got = model(nest(parts, layout))
    assert [op for op, _ in ran].count("attention_varlen_fwd") == 2
    same(got, [model(p[None])[0] for p in parts], [*parts, *model.parameters()])


@BOTH_LAYOUTS
def test_cross_attention_modules_equal_separate_sequences(layout: torch.layout) -> None:
    module = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, bias=False, batch_first=True)
    queries, others = sequences(LENGTHS, 16), sequences(KEYS, 8)
    with pt.activate():
        q, k = nest(queries, layout), nest(others, layout)
        got, weights = module(q, k, k, need_weights=False)
    assert weights is None
    want = [
        module(q[None], k[None], k[None], need_weights=False)[0][0] for q, k in zip(queries, others)
    ]
    same(got, want, [*queries, *others, *module.parameters()])


@pytest.mark.falls_back
def test_weights_come_from_pytorchs_fast_path() -> None:
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = nest([p.detach() for p in sequences(LENGTHS, 16)], torch.strided)
    with torch.no_grad():
        want = module(x, x, x)
        with (
            pytest.warns(RuntimeWarning, match="need_weights=True asks for the weights"),
            pt.activate(),
        ):
            got = module(x, x, x)
            assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(got[1], want[1]) and torch.equal(got[0].values(), want[0].values())


def test_modules_are_restored() -> None:
    call, jagged = (
        nn.MultiheadAttention.__call__,
        torch.nested._internal.ops.jagged_scaled_dot_product_attention,
    )
    with pt.activate(), pt.activate():
        assert nn.MultiheadAttention.__call__ is not call
    assert nn.MultiheadAttention.__call__ is call and "__call__" not in vars(nn.MultiheadAttention)
    assert torch.nested._internal.ops.jagged_scaled_dot_product_attention is jagged


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_modules_can_be_scripted() -> None:
    x = torch.randn(2, 3, 16)
    module = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    with pt.activate():
        assert_same_elements(torch.jit.script(module)(x, x, x)[0], module(x, x, x)[0])


@BOTH_LAYOUTS
def test_bad_nested_input_is_named(layout: torch.layout) -> None:
    attend = pt.scaled_dot_product_attention
    x = nest(sequences(LENGTHS, 4, 8), layout).transpose(1, 2)
    other = nest(sequences(KEYS, 4, 8), layout).transpose(1, 2)
    two = nest(sequences(LENGTHS, 2, 8), layout).transpose(1, 2)
    dense = torch.randn(3, 4, 5, 8)
    bad: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((dense, x, x), TypeError, "nested tensors of one layout, all three or none; query is not"),
        ((x, dense, dense), TypeError, "key is not"),
        ((x, x, other), ValueError, "key and value must have the same length in every sequence"),
        ((x, x, x, dense), ValueError, "attn_mask must be None with nested tensors"),
        ((x, two, two), ValueError, "query has 4 heads and key 2"),
    ]
    for arguments, error, match in bad:
        with pytest.raises(error, match=match):
            attend(*arguments)
