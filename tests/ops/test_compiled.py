# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a call: one tensor as several arguments, and vmap around a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import pytransformer as pt
from pytransformer import drop_in
from pytransformer.ops._core.registry import trace
from support.hugging_face import distance, model_distance_limit

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.unpoisoned]

LIMIT = model_distance_limit(torch.float32)
LENGTHS = torch.tensor([3])
OFFSETS = torch.tensor([0, 2])


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# x (1, 2, 5, 8), w (8, 8), b (8,): each op with as many equal tensors as the shapes allow.
REPEATED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "attention, key and value": lambda x, w, b: pt.attention(x.sin(), x, x),
    "attention, all three": lambda x, w, b: pt.attention(x, x, x),
    "attention, mask and bias": lambda x, w, b: (
        lambda m: pt.attention(x, x.sin(), x.cos(), attn_mask=m, bias=m)
    )(w[:5, :5]),
    "attention, lengths": lambda x, w, b: pt.attention(
        x, x, x, query_lengths=LENGTHS, key_lengths=LENGTHS
    ),
    "attention_varlen": lambda x, w, b: pt.attention_varlen(
        x[0], x[0], x[0], OFFSETS, OFFSETS, 2, 2
    ),
    "scaled_dot_product_attention": lambda x, w, b: pt.scaled_dot_product_attention(x, x, x),
    "layer_norm": lambda x, w, b: pt.layer_norm(x, 8, b, b),
    "add_norm": lambda x, w, b: pt.add_norm(x, x, b, b)[0],
    "feed_forward": lambda x, w, b: pt.feed_forward(x, w, b, w, b, gate_weight=w, gate_bias=b),
    "linear_cross_entropy": lambda x, w, b: pt.linear_cross_entropy(w, w, torch.arange(8), bias=b),
}


@pytest.mark.parametrize("name", REPEATED)
def test_one_tensor_as_several_arguments(name: str) -> None:
    """There is one graph, and each argument contributes to the gradient."""
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((1, 2, 5, 8), (8, 8), (8,))]
    loss = lambda *t: REPEATED[name](*t).square().sum()
    want = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
    got = torch.autograd.grad(
        torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves),
        leaves,
        materialize_grads=True,
    )
    assert any(g.abs().sum() > 0 for g in want)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= LIMIT * theirs.norm()


def test_tied_parameters_get_their_summed_gradient() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pt.feed_forward(
                x, self.first.weight, self.first.bias, self.second.weight, self.second.bias
            )

    model, x = Tied(), torch.randn(3, 8)
    want = torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(
        torch.autograd.grad(compiled(x).square().sum(), tuple(model.parameters())),
        want,
        strict=True,
    ):
        assert (ours - theirs).norm() <= LIMIT * theirs.norm()


def test_vmap_keeps_its_gradients_or_is_refused() -> None:
    """torch.compile sees no requires_grad within vmap and ignores autograd Functions.

    The gradients would be None.
    """
    inputs = [torch.randn(3, 1, 2, 5, 8, requires_grad=True) for _ in "qkv"]
    batched = torch.vmap(pt.attention)
    want = torch.autograd.grad(batched(*inputs).square().sum(), inputs)
    got = torch.autograd.grad(
        torch.compile(batched, backend="aot_eager")(*inputs).square().sum(), inputs
    )
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= LIMIT * theirs.norm()
    # Otherwise Dynamo would reuse the code that it compiled for the eager run.
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"without fullgraph=True they run eagerly"):
        torch.compile(batched, backend="aot_eager", fullgraph=True)(*inputs)
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(batched, backend="aot_eager", fullgraph=True)(*inputs)
    assert distance(out, batched(*inputs)) < LIMIT


def test_vmap_runs_under_activate() -> None:
    inputs = [torch.randn(3, 1, 2, 5, 8, requires_grad=True) for _ in "qkv"]
    batched = torch.vmap(torch.nn.functional.scaled_dot_product_attention)
    want = torch.autograd.grad(batched(*inputs).square().sum(), inputs)
    with pt.activate():
        compiled = torch.compile(batched, backend="aot_eager", fullgraph=True)
        got = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= LIMIT * theirs.norm()


def test_activating_after_compiling_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's guards do not see the dispatcher, so the graph keeps PyTorch's attention."""
    x = torch.randn(1, 2, 5, 8)
    monkeypatch.setattr(drop_in, "_told_compiled", False)
    with warnings.catch_warnings(record=True) as output:
        warnings.simplefilter("always")
        with pt.activate():
            pass
        assert output == [], "nothing is compiled yet"
        compiled = torch.compile(
            lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), backend="eager"
        )
        compiled(x)
        for _ in range(2):
            with pt.activate():
                pass
    assert [str(w.message).partition(":")[0] for w in output] == ["pytransformer.activate"]
    assert output[0].filename == __file__
    with pt.activate(), trace() as ran:
        torch._dynamo.reset()
        compiled(x)
    assert ran, "after the reset it is traced anew"
