# SPDX-License-Identifier: Apache-2.0
"""feed_forward compiled on a GPU, for bench/gpu.sh; the other files here run interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from support import fuzz_feed_forward
from support.feed_forward_check import check_addresses, check_dropout_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 11, 200
NAMES = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")
DRAWN = [
    n for n in range(RANDOM) if fuzz_feed_forward.draw(SEED, n).dtype != torch.float64
]  # the backend does not support float64


def _check(problem: fuzz_feed_forward.Problem) -> None:
    """Run twice on the GPU: equal bits, within the bound of float64."""
    runs = []
    for _ in range(2):
        t = {n: v.cuda().requires_grad_(n in problem.wanted) for n, v in problem.tensors.items()}
        gate = {n: t.get(n) for n in NAMES[5:]}
        out = pt.feed_forward(
            *(t.get(n) for n in NAMES[:5]),
            **gate,
            **problem.keywords,
            backend="triton",
            strict=True,
        )
        leaves = [t[n] for n in problem.wanted]
        grads = torch.autograd.grad(out, leaves, t["grad_out"]) if leaves else ()
        runs.append(
            {"out": out.detach().cpu(), **{n: g.cpu() for n, g in zip(problem.wanted, grads)}}
        )
    for name, first in runs[0].items():
        assert torch.equal(first.nan_to_num(7.0), runs[1][name].nan_to_num(7.0)), (
            f"two runs differ in {name}"
        )
    solution = oracle.Solution(fuzz_feed_forward.solve(problem), 1, torch.empty(0), torch.empty(0))
    checks = bounds.check(
        solution, runs[0], problem.dtype, "zero_mean" if problem.data == "zero_mean" else "any"
    )
    assert all(c.ok for c in checks), "\n".join([str(problem), *map(str, checks)])


def _problem(
    rows: int, d: int, hidden: int, dtype: torch.dtype, gated: bool, **keywords: Any
) -> fuzz_feed_forward.Problem:
    torch.manual_seed(rows)
    shapes = ((rows, d), (hidden, d), (hidden,), (d, hidden), (d,), (hidden, d), (hidden,))
    tensors = {
        n: (torch.randn(s) / s[-1] ** 0.5).to(dtype)
        for n, s in zip(NAMES[: 7 if gated else 5], shapes)
    }
    tensors["x"] *= d**0.5
    expected = list(tensors)
    tensors["grad_out"] = torch.randn(rows, d).to(dtype)
    return fuzz_feed_forward.Problem(
        "feed_forward",
        dtype,
        "zero_mean",
        tensors,
        dict.fromkeys(tensors, ""),
        {"activation": "relu", **keywords},
        expected,
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("rows", [3, 40, 1100])
def test_network_sizes(rows: int, dtype: torch.dtype) -> None:
    """Each class of configurations runs full tiles and tails."""
    for gated, activation in ((False, "gelu"), (True, "silu")):
        for d, hidden in ((256, 1024), (200, 333)):
            _check(
                _problem(
                    rows,
                    d,
                    hidden,
                    dtype,
                    gated,
                    activation=activation,
                    dropout_p=0.1,
                    dropout_seed=5,
                )
            )


@pytest.mark.parametrize("number", DRAWN)
def test_random_network(number: int) -> None:
    _check(fuzz_feed_forward.draw(SEED, number))


def test_network_dropout_mask() -> None:
    check_dropout_mask("triton")


def test_network_addresses_beyond_32_bits() -> None:
    check_addresses("triton")
