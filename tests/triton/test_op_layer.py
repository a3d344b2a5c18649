# SPDX-License-Identifier: Apache-2.0
"""The interpreted Triton backend under the op layer: schema, fakes, full graphs, seeds as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS

pytestmark = pytest.mark.unpoisoned
CU_SEQLENS = torch.tensor([0, 5, 9], dtype=torch.int32)
TARGET = torch.tensor([1, 10, -100, 0])


class Call(NamedTuple):
    """An op's public function: shapes of its differentiable tensors, and the call with them."""

    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Any]
    drops: bool = True


CALLS = {
    "attention": Call(
        ((1, 2, 9, 16), (1, 1, 11, 16), (1, 1, 11, 16), (1, 1, 9, 11)),
        lambda q, k, v, bias, **options: pt.attention(
            q, k, v, bias=bias, causal="bottom_right", return_lse=True, **options
        ),
    ),
    "attention_varlen": Call(
        ((9, 2, 16), (9, 2, 16), (9, 2, 16), (2,)),
        lambda q, k, v, slopes, **options: pt.attention_varlen(
            q, k, v, CU_SEQLENS, CU_SEQLENS, 5, 5, bias=pt.AlibiBias(slopes), **options
        ),
    ),
    "layer_norm": Call(
        ((2, 3, 8), (8,), (8,)),
        lambda x, w, b, **options: pt.layer_norm(x, 8, w, b, **options),
        drops=False,
    ),
    "rms_norm": Call(
        ((2, 3, 8), (8,)), lambda x, w, **options: pt.rms_norm(x, 8, w, **options), drops=False
    ),
    "add_norm": Call(
        ((2, 3, 8), (2, 3, 8), (8,), (8,)), lambda *t, **options: pt.add_norm(*t, **options)
    ),
    "feed_forward": Call(
        ((2, 3, 4), (8, 4), (8,), (4, 8), (4,), (8, 4), (8,)),
        lambda x, w1, b1, w2, b2, gate, gate_bias, **options: pt.feed_forward(
            x, w1, b1, w2, b2, activation="silu", gate_weight=gate, gate_bias=gate_bias, **options
        ),
    ),
    "linear_cross_entropy": Call(
        ((4, 6), (11, 6), (11,)),
        lambda x, w, bias, **options: pt.linear_cross_entropy(
            x, w, TARGET, bias=bias, label_smoothing=0.1, **options
        ),
        drops=False,
    ),
}
DROPPING = [name for name, call in CALLS.items() if call.drops]


def _leaves(name: str) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in CALLS[name].shapes]


def _run(name: str, leaves: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    result = CALLS[name].run(*leaves, **options, backend="triton", strict=True)
    return result if isinstance(result, tuple) else (result,)


def _gradients(
    outputs: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad([o.square().sum() for o in outputs], leaves)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_the_raw_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward get the arguments that the public function passes."""
    op = OPS[name]
    backend, given = op.backends["triton"], []
    spy = dataclasses.replace(backend, forward=lambda a: (given.append(a), backend.forward(a))[1])
    monkeypatch.setattr(op, "backends", {**op.backends, "triton": spy})
    _run(
        name, _leaves(name), **({"dropout_p": 0.5, "dropout_seed": 3} if CALLS[name].drops else {})
    )
    monkeypatch.setattr(op, "backends", {**op.backends, "triton": backend})
    a = [t.detach() if isinstance(t, torch.Tensor) else t for t in given[0]]
    torch.library.opcheck(op.fwd, (*a, "triton", True))
    outputs = dict(zip(op.outputs, op.fwd(*a, "triton", True)))
    grads = [torch.randn_like(outputs[n]) for n in list(outputs)[: len(op.grad_names)]]
    saved = [outputs[n] for n in op.saved]
    expected = [isinstance(a[p], torch.Tensor) and a[p].is_floating_point() for p in op.positions]
    torch.library.opcheck(op.bwd, (*grads, *a, *saved, expected, "triton", True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CALLS)
def test_compiles_to_one_graph(name: str, dynamic: bool) -> None:
    """Forward and backward have the call's bits, for these sizes or any."""
    torch._dynamo.reset()
    leaves = _leaves(name)
    compiled = torch.compile(
        lambda *t: _run(name, t), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    ours, want = compiled(*leaves), _run(name, leaves)
    for a, e in zip((*ours, *_gradients(ours, leaves)), (*want, *_gradients(want, leaves))):
        assert torch.equal(a, e)


@pytest.mark.parametrize("name", DROPPING)
def test_seed_is_an_input_of_the_graph(name: str) -> None:
    """Another value gives another mask and no other graph, so captured graphs may refill it."""
    torch._dynamo.reset()
    leaves, seed = [t.detach() for t in _leaves(name)], torch.tensor(1)
    call = torch.compile(
        lambda seed, *t: _run(name, t, dropout_p=0.5, dropout_seed=seed),
        fullgraph=True,
        backend="aot_eager",
    )
    masks = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in (1, 2, 1):
            masks.append(call(seed.fill_(n), *leaves)[0].clone())
            assert torch.equal(masks[-1], _run(name, leaves, dropout_p=0.5, dropout_seed=n)[0])
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])


@pytest.mark.parametrize("name", DROPPING)
def test_missing_seed_is_drawn_by_torch(name: str) -> None:
    """torch.manual_seed repeats a mask; the next call draws another."""
    leaves = [t.detach() for t in _leaves(name)]
    results = []
    for again in (True, False, True):
        if again:
            torch.manual_seed(5)
        results.append(_run(name, leaves, dropout_p=0.5)[0])
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])


def test_negated_views_give_the_results_of_their_values() -> None:
    x, g = torch.randn(6, 32, requires_grad=True), torch.randn(6, 32)
    expected = pt.layer_norm(x, 32, backend="triton")
    out = pt.layer_norm(torch._neg_view(-x), 32, backend="triton")
    assert torch.equal(out, expected)
    (dx,) = torch.autograd.grad(expected, x, g, retain_graph=True)
    assert torch.equal(torch.autograd.grad(expected, x, torch._neg_view(-g))[0], dx)
