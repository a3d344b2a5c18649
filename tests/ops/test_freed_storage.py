# SPDX-License-Identifier: Apache-2.0
"""Freed storage (FSDP2 reshard, untyped_storage().resize_(0)) raises and names the argument.

This holds on every backend, forward and backward.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import fast_path, native
from pytransformer.testing.case import Case, named
from support.raw_calls import NATIVE, freed_variants, record, recorded_cases

FREED = "has no storage: it was freed"
CASES = [pytest.param(case, id=case.name) for case in recorded_cases()]
# Backends with emulated or interpreted kernels run every sixth case in `make test`.
SLOW_CASES = [
    pytest.param(*c.values, id=c.id, marks=[pytest.mark.slow] * (i % 6 > 0))
    for i, c in enumerate(CASES)
]
needs_library = pytest.mark.skipif(
    native.why_not("attention_fwd") is not None,
    reason=f"no native library: {native.why_not('attention_fwd')}",
)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in an argument: itself, or those of a bias or a cache."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from itertools.chain.from_iterable(map(tensors_of, value))
    elif isinstance(value, (pt.AlibiBias, pt.RelativePositionBias)):
        yield value.slopes if isinstance(value, pt.AlibiBias) else value.table


def arguments_of(case: Case, grad: bool) -> tuple[Any, Any, list[tuple[str, torch.Tensor]]]:
    args, kwargs = case.make("cpu", torch.float32, seed=0, requires_grad=grad)
    found = [
        (name, t)
        for name, value in named(case.op, args, kwargs).items()
        for t in tensors_of(value)
        if t.numel()
    ]
    return args, kwargs, found


def backends_of(case: Case, args: Any, kwargs: Any) -> list[str | None]:
    """Return None, the C++ fast path if built, and every backend that runs the case here."""
    op = pt.ops._core.registry.OPS[case.op]
    a, _, _ = op.prepare(*args, **kwargs)
    return [None, *(name for name in op.backends if op.reason(name, a) is None)]


def upstream(
    case: Case, args: Any, kwargs: Any, backend: str | None, leaves: list[torch.Tensor]
) -> tuple[Any, Any, Any]:
    """Return the outputs of a call, its leaves, and gradients of the outputs."""
    outputs = getattr(pt, case.op)(*args, **kwargs, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, leaves, [torch.ones_like(o) for o in outputs]


@pytest.mark.parametrize("case", CASES)
def test_forward_refuses_a_freed_tensor_by_name(case: Case) -> None:
    args, kwargs, _ = arguments_of(case, False)
    check_forward(case, backends_of(case, args, kwargs))


def check_forward(case: Case, backends: list[str | None]) -> None:
    count = len(arguments_of(case, False)[2])
    for backend, number in itertools.product(backends, range(count)):
        args, kwargs, tensors = arguments_of(case, False)
        name, t = tensors[number]
        t.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=rf"^{case.op}: [\w.]+ {FREED}") as raised:
            getattr(pt, case.op)(*args, **kwargs, backend=backend)
        if isinstance(named(case.op, args, kwargs)[name], torch.Tensor):
            assert str(raised.value).startswith(f"{case.op}: {name} ")


@pytest.mark.parametrize("case", [case for case in CASES if not case.values[0].forward_only])
def test_backward_refuses_a_freed_tensor_or_does_not_need_it(case: Case) -> None:
    args, kwargs, _ = arguments_of(case, True)
    check_backward(case, backends_of(case, args, kwargs))


def check_backward(case: Case, backends: list[str | None]) -> None:
    count, refused = len(arguments_of(case, True)[2]), 0
    for backend, number in itertools.product(backends, range(count)):
        args, kwargs, tensors = arguments_of(case, True)
        leaves = [t for _, t in tensors if t.requires_grad]
        expected = torch.autograd.grad(*upstream(case, args, kwargs, backend, leaves))
        outputs_and_grads = upstream(case, args, kwargs, backend, leaves)
        tensors[number][1].untyped_storage().resize_(0)
        try:
            grads = torch.autograd.grad(*outputs_and_grads)
        except RuntimeError as error:
            assert re.match(rf"{case.op}: [\w.]+ {FREED}", str(error))
            refused += 1
        else:
            assert all(map(torch.equal, grads, expected))
    assert refused > 0


def check_backend(case: Case, backend: str) -> None:
    """Check forward and backward on one backend that runs on CPU tensors here."""
    args, kwargs, _ = arguments_of(case, False)
    arguments, _, _ = pt.ops._core.registry.OPS[case.op].prepare(*args, **kwargs)
    if (reason := pt.ops._core.registry.OPS[case.op].reason(backend, arguments)) is not None:
        pytest.skip(f"backend {backend}: {reason}")
    check_forward(case, [backend])
    if not case.forward_only:
        check_backward(case, [backend])


@needs_library
@pytest.mark.parametrize("case", CASES)
def test_raw_ops_refuse_a_freed_tensor_by_name(case: Case) -> None:
    calls = record(case)
    assert {call.namespace for call in calls} == {"pytransformer", NATIVE}
    for name, call in freed_variants(calls):
        with pytest.raises(RuntimeError, match=rf"\b{name} {FREED}|[\w.]+ {FREED}"):
            call.run()


def test_views_of_freed_storage_are_refused() -> None:
    """Their address is not null."""
    x, packed = torch.randn(4, 32), torch.randn(3, 32)
    weight = packed[1]
    packed.untyped_storage().resize_(0)
    for way in (fast_path.off, torch.no_grad):
        with way(), pytest.raises(RuntimeError, match=f"layer_norm: weight {FREED}"):
            pt.layer_norm(x, 32, weight)


@needs_library
def test_too_small_storage_is_refused() -> None:
    pt.layer_norm(torch.randn(4, 32), 32)
    x, weight = torch.randn(4, 32), torch.randn(32)
    weight.untyped_storage().resize_(64)
    with pytest.raises(
        RuntimeError, match="layer_norm: weight must have a storage of at least 128 bytes, got 64"
    ):
        pt.layer_norm(x, 32, weight)


def test_autocast_refuses_a_freed_tensor_by_name() -> None:
    q = torch.randn(1, 2, 8, 16)
    q.untyped_storage().resize_(0)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(RuntimeError, match=f"attention: query {FREED}"),
    ):
        pt.attention(q, q, q)
