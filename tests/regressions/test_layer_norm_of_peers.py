# SPDX-License-Identifier: Apache-2.0
"""Wrong results of other norm kernels, each as its formula.

The formula exceeds the error bound on its problem, else the entry would prove nothing. Each of our
backends stays within it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from support import fuzz_layer_norm

ROWS, COLUMNS = 4096, 64


def problem() -> fuzz_layer_norm.Problem:
    """Return a batch's number of rows and the upstream gradient of ``y.square().sum() / 2``.

    All terms of the weight's gradient are positive.
    """
    x, weight, bias = torch.randn(ROWS, COLUMNS), torch.ones(COLUMNS), torch.ones(COLUMNS)
    tensors = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "grad_out": torch.nn.functional.layer_norm(x, (COLUMNS,)) + 1,
    }
    tensors = {name: t.bfloat16() for name, t in tensors.items()}
    layouts = dict.fromkeys(tensors, "contiguous")
    return fuzz_layer_norm.Problem(
        "layer_norm", torch.bfloat16, "zero_mean", tensors, layouts, {}, ["x", "weight", "bias"]
    )


def summed_in_bfloat16(terms: Tensor) -> Tensor:
    """Sum rows in a bfloat16 accumulator, which stops growing at 512 times a term."""
    total = torch.zeros(COLUMNS, dtype=torch.bfloat16)
    for row in terms:
        total = (total.float() + row).bfloat16()
    return total


def parameter_gradients(p: fuzz_layer_norm.Problem) -> dict[str, Tensor]:
    """Return torch 2.13's bfloat16 CPU gradients, one thread.

    dweight and dbias stay in the weight's dtype between rows.
    """
    x, grad = p.tensors["x"].float(), p.tensors["grad_out"].float()
    xhat = torch.nn.functional.layer_norm(x, (COLUMNS,))
    return {"weight": summed_in_bfloat16(grad * xhat), "bias": summed_in_bfloat16(grad)}


@pytest.fixture
def backends() -> list[str]:
    reasons = pt.explain(
        "layer_norm", torch.zeros(1, COLUMNS, dtype=torch.bfloat16), COLUMNS
    ).reasons
    return [name for name, reason in reasons.items() if reason is None]


def test_parameter_gradients_are_not_summed_in_bfloat16(backends: list[str]) -> None:
    p = problem()
    exact = oracle.Solution(fuzz_layer_norm.solve(p, None), 1, torch.empty(0), torch.empty(0))
    wrong = {
        c.name
        for c in bounds.check(
            exact, dict(parameter_gradients(p)), torch.bfloat16, p.data, fuzz_layer_norm.LIMITS
        )
        if not c.ok
    }
    assert wrong == {"weight", "bias"}
    assert {"reference", "cpu"} <= set(backends)
    for backend in backends:
        checks, complaints = fuzz_layer_norm.judge(p, backend, repeat=False)
        assert not complaints, (backend, complaints)
        assert {"weight", "bias", "x"} <= {c.name for c in checks}
