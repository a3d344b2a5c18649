# SPDX-License-Identifier: Apache-2.0
"""Exported programs train like eager code: torch.export keeps the raw ops and their derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds
from pytransformer.testing.cases import Case, cases

SMALL = {c.name: c for name, op in OPS.items() if op.positions for c in cases(name, "small")}


class Inner(torch.nn.Module):
    """A call on results of other ops, whose gradients pass through the exported graph."""

    def __init__(self, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.args, self.kwargs = getattr(pt, case.op), args, kwargs
        self.places = [i for i, a in enumerate(args) if trains(a)] + [
            n for n, a in kwargs.items() if trains(a)
        ]
        values = [args[p] if isinstance(p, int) else kwargs[p] for p in self.places]
        self.leaves = torch.nn.ParameterList(
            [torch.nn.Parameter(t.detach().clone()) for t in values]
        )

    def forward(self, one: torch.Tensor) -> torch.Tensor:
        inner = {place: leaf * one for place, leaf in zip(self.places, self.leaves)}
        args = [inner.get(i, a) for i, a in enumerate(self.args)]
        kwargs = {n: inner.get(n, a) for n, a in self.kwargs.items()}
        out = self.call(*args, **kwargs)
        outputs = out if isinstance(out, tuple) else (out,)
        return sum(
            (o.float().sin().sum() for o in outputs if o.is_floating_point()), torch.zeros(())
        )


def trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def runs() -> list[Any]:
    """Return (name, strict): strict export of one case per op; the other cases are slow tests."""
    first = {
        name: next(iter(cases(name, "small"))).name for name, op in OPS.items() if op.positions
    }
    slow = [pytest.param(n, True, marks=pytest.mark.slow) for n in SMALL if n not in first.values()]
    return [*((n, False) for n in SMALL), *((n, True) for n in first.values()), *slow]


@pytest.mark.unpoisoned
@pytest.mark.parametrize(("name", "strict"), runs())
def test_exported_calls_have_the_gradients_of_eager_calls(name: str, strict: bool) -> None:
    args, kwargs = SMALL[name].make("cpu", torch.float32, seed=0, requires_grad=True)
    module, one = Inner(SMALL[name], args, kwargs), torch.ones(())
    if not module.places:
        pytest.skip("no argument of this case has a gradient")
    module(one).backward()
    expected = {n: p.grad for n, p in module.named_parameters()}
    module.zero_grad()
    exported = torch.export.export(module, (one,), strict=strict).module()
    exported(one).backward()
    found = {n: p.grad for n, p in exported.named_parameters()}
    assert found.keys() == expected.keys()
    for n, grad in expected.items():
        assert found[n] is not None and bounds.agree(found[n], grad), n
