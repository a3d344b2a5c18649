# SPDX-License-Identifier: Apache-2.0
"""Negated views and efficient zero tensors, whose memory differs from their values."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from pytransformer.testing.case import Case, named
from support.raw_calls import recorded_cases

CASES = [case for case in recorded_cases() if case.op in OPS]


def backends_of(case: Case, args: Any, kwargs: Any) -> list[str | None]:
    """Return None, the C++ fast path if built, and every backend that runs the case here."""
    op = OPS[case.op]
    a, _, _ = op.prepare(*args, **kwargs)
    return [None, *(name for name in op.backends if op.reason(name, a) is None)]


def call(case: Case, args: Any, kwargs: Any, backend: str | None) -> tuple[torch.Tensor, ...]:
    outputs = getattr(pt, case.op)(*args, **kwargs, backend=backend)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of equal values whose memory contains the negatives."""
    return torch._neg_view(tensor.neg())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_negated_views_give_the_results_of_their_values(case: Case) -> None:
    args, kwargs = case.make("cpu", torch.float32, seed=0)
    tensors = {
        n: t
        for n, t in named(case.op, args, kwargs).items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    assert tensors
    for backend, (name, tensor) in itertools.product(
        backends_of(case, args, kwargs), tensors.items()
    ):
        expected = call(case, args, kwargs, backend)
        lazy_args = [negated(t) if t is tensor else t for t in args]
        lazy_kwargs = {key: negated(t) if t is tensor else t for key, t in kwargs.items()}
        assert all(map(torch.equal, call(case, lazy_args, lazy_kwargs, backend), expected)), (
            backend,
            name,
        )


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.forward_only], ids=lambda case: case.name
)
def test_lazy_gradients_give_the_results_of_their_values(case: Case) -> None:
    args, kwargs = case.make("cpu", torch.float32, seed=0, requires_grad=True)
    for backend in backends_of(case, args, kwargs):
        leaves = [
            t
            for t in named(case.op, args, kwargs).values()
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        outputs = [out for out in call(case, args, kwargs, backend) if out.requires_grad]
        gradients = functools.partial(
            torch.autograd.grad, outputs, leaves, retain_graph=True, materialize_grads=True
        )
        values = [torch.randn_like(out) for out in outputs]
        expected = gradients(grad_outputs=values)
        assert all(
            map(torch.equal, gradients(grad_outputs=[negated(value) for value in values]), expected)
        ), backend
        zeros = gradients(grad_outputs=[torch._efficientzerotensor(out.shape) for out in outputs])
        assert not any(grad.any() for grad in zeros), backend
