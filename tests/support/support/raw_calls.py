# SPDX-License-Identifier: Apache-2.0
"""Calls of the raw ops, recorded from the named cases, and variants with a freed tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytransformer.ops._core.registry import OPS
from pytransformer.testing.cases import Case, case, cases

NATIVE = "pytransformer_C"
EXTRA_CASES = ("blocks", "pages", "decode_pages")


class RawCall(NamedTuple):
    """One call of ``torch.ops.<namespace>.<op>``."""

    namespace: str
    op: str
    args: tuple[Any, ...]

    def run(self) -> Any:
        return getattr(getattr(torch.ops, self.namespace), self.op).default(*self.args)

    def replace(self, position: int, value: Any) -> RawCall:
        return self._replace(args=(*self.args[:position], value, *self.args[position + 1 :]))


def arguments(raw: torch._ops.OpOverload, **given: Any) -> list[Any]:
    """Return a raw op's arguments in its order; those not given are None, or 0 for numbers."""
    arguments = raw._schema.arguments
    assert given.keys() <= {argument.name for argument in arguments}
    empty = lambda argument: None if "Tensor" in str(argument.type) else 0
    return [given.get(argument.name, empty(argument)) for argument in arguments]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class _Below(TorchDispatchMode):
    """A recorder of the native calls inside a Python raw op."""

    def __init__(self, calls: list[RawCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NATIVE and args:
            self.calls.append(RawCall(NATIVE, func._opname, tuple(map(_copied, args))))
        return func(*args, **(kwargs or {}))


class Recorder(_Below):
    """A recorder of the calls of both layers of raw ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "pytransformer":
            return func(*args, **(kwargs or {}))
        self.calls.append(RawCall(func.namespace, func._opname, tuple(map(_copied, args))))
        op = OPS[func._opname[:-4]]
        body = op.run_forward if func._opname.endswith("_fwd") else op._backward_body
        with _Below(self.calls):
            return body(*args)


def recorded_cases() -> list[Case]:
    """Return every named case, at shapes that take well under a millisecond."""
    small = {"Lq": 9, "Lk": 11, "D": 8, "rows": 5, "d": 24, "hidden": 40, "classes": 13}
    found = [*cases(), *map(case, EXTRA_CASES)]
    return [
        c.resize(**{name: size for name, size in small.items() if name in c.shape}) for c in found
    ]


def record(
    chosen: Case, dtype: torch.dtype = torch.float32, backend: str | None = None
) -> list[RawCall]:
    """Return the raw calls of one case, forward and backward."""
    import pytransformer as pt

    calls: list[RawCall] = []
    args, kwargs = chosen.make("cpu", dtype, seed=0, requires_grad=True)
    with Recorder(calls):
        outputs = getattr(pt, chosen.op)(*args, **kwargs, backend=backend)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(o.sum() for o in outputs if o.requires_grad).backward() if any(
            o.requires_grad for o in outputs
        ) else None
    return calls


def corpus() -> list[RawCall]:
    """Return valid calls of every Python raw op and every op of the CPU library."""
    calls = [
        c
        for chosen in recorded_cases()
        for dtype in (torch.float32, torch.bfloat16)
        for c in record(chosen, dtype)
    ]
    x, bias = torch.randn(4, 8), torch.randn(5)
    for weight in (torch.randn(5, 8), torch.randn(8, 5).T):
        calls += linear_calls(x, weight, bias)
    sizes = {"layer_norm_scratch": (8,), "feed_forward_scratch": (4, 8, 16, 8, True)}
    sizes["linear_cross_entropy_scratch"] = (4, 8, 16, True, True)
    calls += [RawCall(NATIVE, op, (x, *numbers)) for op, numbers in sizes.items()]
    forward = [c for c in calls if c.namespace == NATIVE and c.op == "attention_fwd"]
    return calls + [
        RawCall(NATIVE, "attention_scratch", (*c.args[:3], *c.args[5:], True)) for c in forward
    ]


def linear_calls(x: Tensor, weight: Tensor, bias: Tensor) -> list[RawCall]:
    """Return valid calls of the CPU library's linear layer."""
    out, d_weight = torch.empty(len(x), len(weight)), torch.empty_like(weight)
    panels = torch.zeros(
        torch.ops.pytransformer_C.feed_forward_linear_panels(weight), dtype=torch.uint8
    )
    return [
        RawCall(NATIVE, "feed_forward_linear", (x, weight, bias, None, out)),
        RawCall(NATIVE, "feed_forward_linear", (x, weight, bias, panels, out)),
        RawCall(
            NATIVE,
            "feed_forward_linear_bwd",
            (
                torch.randn_like(out),
                x,
                weight,
                torch.empty_like(x),
                d_weight,
                torch.empty_like(bias),
            ),
        ),
        RawCall(NATIVE, "feed_forward_linear_pack", (weight, panels)),
        RawCall(NATIVE, "feed_forward_linear_panels", (weight,)),
        RawCall(NATIVE, "feed_forward_linear_digest", (weight,)),
    ]


def freed(t: Tensor) -> Tensor:
    """Return a tensor with the same shape and strides, freed storage and a nonzero offset."""
    backing = torch.empty(16 + t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype)
    view = backing.as_strided(t.shape, t.stride(), 16)
    backing.untyped_storage().resize_(0)
    return view


def freed_variants(calls: Sequence[RawCall]) -> Iterator[tuple[str, RawCall]]:
    """Yield each tensor argument's name and the call with that tensor's storage freed."""
    for call in calls:
        schema = getattr(getattr(torch.ops, call.namespace), call.op).default._schema.arguments
        for at, value in enumerate(call.args):
            if isinstance(value, Tensor) and value.numel():
                yield schema[at].name, call.replace(at, freed(value))
