# SPDX-License-Identifier: Apache-2.0
"""Wrong backends that a fuzzer must detect: the reference with one typical kernel fault each.

    mutants = families()["feed_forward"].mutants
    with mutant_backends(mutants.ops, mutants.faults, mutants.backward_faults) as names:
        pytransformer.feed_forward(x, w1, b1, w2, b2, backend=names[0])

A fault is a function of the raw op's arguments and of `forward`, the correct implementation, and
returns a wrong result. A backward fault returns the correct value with a wrong derivative.
"faithful" has no fault. tests/test_mutants.py checks that the fuzzers detect every fault and report
nothing in "faithful".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pytransformer.ops._core.op import Op
from pytransformer.ops._core.registry import OPS, Backend

Outputs = tuple[Tensor, ...]
Forward = Callable[[Any], Outputs]
Fault = Callable[[Any, Forward], Outputs]
BackwardFault = Callable[[Any, list[Any]], tuple[Any, list[Any]]]
FAITHFUL: Fault = lambda a, forward: forward(a)


def value_of(value: Tensor, gradient_of: Tensor) -> Tensor:
    """Return one tensor's value, bit for bit, with another's derivative."""
    nothing = torch.where(gradient_of.detach().isfinite(), gradient_of - gradient_of.detach(), 0.0)
    return value.detach() + nothing


def replacing(**change: Callable[[Any], Any]) -> Fault:
    """Return a fault that changes arguments; None means that the problem lacks the argument."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        present = {n: f(a) for n, f in change.items() if getattr(a, n, None) is not None}
        return forward(a._replace(**present))

    return fault


def outputs(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes the first output."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        first, *rest = forward(a)
        return change(first), *rest

    return fault


def patching(module: Any, **names: Callable[..., Any]) -> Fault:
    """Return a fault that replaces functions of the reference; each gets the original first."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        with contextlib.ExitStack() as stack:
            for name, f in names.items():
                original = getattr(module, name)
                stack.enter_context(
                    mock.patch.object(module, name, lambda *x, f=f, o=original: f(o, *x))
                )
            return forward(a)

    return fault


def different_every_time(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    out, *rest = forward(a)
    return out * (1 + 1e-7 * torch.rand(()).to(out.dtype)), *rest


def as_contiguous(t: Tensor) -> Tensor:
    """Return the elements that a kernel reads if it assumes contiguity."""
    end = t.storage_offset() + t.numel()
    if end * t.element_size() > t.untyped_storage().nbytes():
        return t.new_zeros(t.shape)
    return torch.empty(0, dtype=t.dtype).set_(
        t.untyped_storage(), t.storage_offset(), t.shape, t.contiguous().stride()
    )


def shifted(keep: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return a dropout mask shifted by one column."""
    return keep(*arguments).roll(1, -1)


BACKWARD_FAULTS: dict[str, BackwardFault] = {
    "gradient_readas_contiguous": lambda a, grads: (
        a,
        [None if g is None else as_contiguous(g) for g in grads],
    ),
    "backward_with_another_dropout_mask": lambda a, grads: (
        a
        if getattr(a, "dropout_seed", None) is None
        else a._replace(dropout_seed=a.dropout_seed + 1),
        grads,
    ),
}


def _backend(op_name: str, name: str, fault: Fault, backward_fault: BackwardFault) -> Backend:
    op = OPS[op_name]

    def wrong(a: Any) -> Outputs:
        return fault(a, op.reference)

    def forward(a: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(e.copy_(r) for e, r in zip(op.empty_outputs(a), wrong(a)))

    def backward(a: Any, grads: Any, saved: Any, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
        places = [p for p, want in zip(op.positions, wanted) if want]
        with torch.enable_grad():
            leaves = [a[p].detach().requires_grad_() for p in places]
            replaced, grads = backward_fault(
                a._replace(**{a._fields[p]: leaf for p, leaf in zip(places, leaves)}), list(grads)
            )
            pairs = [
                (o, g) for o, g in zip(wrong(replaced), grads) if g is not None and o.requires_grad
            ]
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if pairs:
                found = torch.autograd.grad(
                    [o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
                )
        return stored(op, a, wanted, dict(zip(places, found)))

    return Backend(name, forward, backward, lambda a: None)


def stored(
    op: Op, a: Any, wanted: Sequence[bool], by_place: Mapping[int, Tensor | None]
) -> list[Tensor | None]:
    """Return gradients by argument position as a backend does; missing ones are zero."""
    gradients: list[Tensor | None] = []
    for place, empty in zip(op.positions, op.empty_gradients(a, wanted)):
        found = by_place.get(place)
        gradients.append(
            empty if empty is None else empty.zero_() if found is None else empty.copy_(found)
        )
    return gradients


@contextlib.contextmanager
def mutant_backends(
    ops: Sequence[str], faults: Mapping[str, Fault], backward_faults: Mapping[str, BackwardFault]
) -> Iterator[list[str]]:
    """Register every mutant of the ops as a backend within the block; yield the names."""
    wrong: dict[str, tuple[Fault, BackwardFault]] = {
        n: (f, lambda a, grads: (a, grads)) for n, f in faults.items()
    }
    wrong |= {n: (FAITHFUL, f) for n, f in backward_faults.items()}
    saved = {op: OPS[op].backends for op in ops}
    for op in ops:
        mutants = {n: _backend(op, n, *pair) for n, pair in wrong.items()}
        OPS[op].backends = {**saved[op], **mutants}
    try:
        yield list(wrong)
    finally:
        for op, backends in saved.items():
            OPS[op].backends = backends
