# SPDX-License-Identifier: Apache-2.0
"""torch.jit.trace of every op, as a process's first call, gives the values of eager code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.raw_calls import recorded_cases

# Trace each op's first recorded case with one tensor as the input. The library is not loaded before
# the first trace.
CODE = """
import sys
import torch
import pytransformer as pt
from pytransformer.testing.case import named
from pytransformer.testing.cases import case

for name in sys.argv[1:]:
    chosen = case(name)
    args, kwargs = chosen.make("cpu", torch.float32, seed=0)
    values = named(chosen.op, args, kwargs)
    tensors = {n: t for n, t in values.items() if isinstance(t, torch.Tensor)}
    first, x = next((n, t) for n, t in tensors.items() if t.is_floating_point())
    others = {n: v for n, v in values.items() if n != first}

    def call(x):
        outputs = getattr(pt, chosen.op)(**{first: x, **others})
        return outputs[0] if isinstance(outputs, tuple) else outputs

    traced = torch.jit.trace(call, x, check_trace=False)
    assert torch.equal(traced(2 * x), call(2 * x)), name
"""


@pytest.mark.parametrize("first", ["rotary", pytest.param("attention", marks=pytest.mark.slow)])
def test_ops_can_be_traced_as_the_first_call(first: str) -> None:
    by_op = {case.op: case.name for case in reversed(recorded_cases())}
    names = [by_op.pop(first), *by_op.values()]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, *names], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
