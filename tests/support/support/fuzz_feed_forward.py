# SPDX-License-Identifier: Apache-2.0
"""Random problems of feed_forward against float64, for `fuzz`."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds
from pytransformer.testing.case import Problem as Problem
from pytransformer.testing.exact_feed_forward import LIMITS as LIMITS
from pytransformer.testing.exact_feed_forward import solve as solve
from pytransformer.testing.oracle import exact

from .guarded import place, random_layout
from .judge import data_of, judge
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


def draw(seed: int, case: int) -> Problem:
    """Return the problem of this seed and number."""
    rng = random.Random(f"ffn {seed} {case}")
    torch.manual_seed(rng.getrandbits(40))
    dtype, data = rng.choice(DTYPES), rng.choice(("zero_mean", "zero_mean", "positive", "large"))
    size = (1, 2, 3, 7, 16, 17, 31, 33, 48, 63, 64, 65, 70, 96, 130)
    lead = tuple(rng.choice((1, 2, 3, 7)) for _ in range(rng.choice((0, 1, 2, 3))))
    if rng.random() < 0.1:
        lead = (rng.choice((190, 193, 250)),)
    if rng.random() < 0.03:
        lead = (0, *lead)
    d, hidden = rng.choice(size), rng.choice((*size, 200, 257))
    out = d if rng.random() < 0.6 else rng.choice(size)

    def values(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        t = torch.randn(shape, dtype=torch.float64) * scale
        return (t.abs() if data == "positive" else t * 4 if data == "large" else t).to(kind)

    def bias(n: int) -> Tensor:
        return values(
            n, kind=torch.float32 if dtype != torch.float64 and rng.random() < 0.3 else dtype
        )

    tensors = {
        "x": values(*lead, d),
        "w1": values(hidden, d, scale=d**-0.5),
        "w2": values(out, hidden, scale=hidden**-0.5),
    }
    if rng.random() < 0.7:
        tensors["b1"] = bias(hidden)
    if rng.random() < 0.7:
        tensors["b2"] = bias(out)
    if rng.random() < 0.4:
        tensors["gate_weight"] = values(hidden, d, scale=d**-0.5)
        if rng.random() < 0.6:
            tensors["gate_bias"] = bias(hidden)
    keywords: dict[str, Any] = {"activation": rng.choice(ACTIVATIONS)}
    if rng.random() < 0.4:
        keywords |= {
            "dropout_p": rng.choice((0.1, 0.5, 1.0)),
            "dropout_seed": rng.getrandbits(63) - 2**62,
        }
    if rng.random() < 0.4:
        keywords["recompute"] = True
    wanted = [n for n in tensors if rng.random() < 0.8]
    if wanted:
        tensors["grad_out"] = torch.randn(*lead, out, dtype=torch.float64).to(dtype)
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    features = {
        *tensors,
        *keywords,
        data,
        keywords["activation"],
        *({"strided"} if any(v != "contiguous" for v in layouts.values()) else ()),
    }
    return Problem("feed_forward", dtype, data, tensors, layouts, keywords, wanted, features)


def run(problem: Problem, backend: str) -> tuple[dict[str, Tensor | None], list[tuple[str, str]]]:
    """Return (results by name, raw ops run), with guarded and poisoned memory."""
    import pytransformer as pt
    from pytransformer.ops._core.registry import trace

    laid = {n: place(t, problem.layouts[n]) for n, t in problem.tensors.items()}
    leaves = {n: t.requires_grad_(n in problem.wanted) for n, t in laid.items() if n != "grad_out"}
    with poisoned(), trace() as record:
        out = pt.feed_forward(
            leaves["x"], leaves["w1"], leaves.get("b1"), leaves["w2"], leaves.get("b2"),
            gate_weight=leaves.get("gate_weight"),
            gate_bias=leaves.get("gate_bias"), **problem.keywords, backend=backend, strict=True,
        )  # fmt: skip
        results: dict[str, Tensor | None] = {"out": out}
        if problem.wanted:
            found = torch.autograd.grad(out, [leaves[n] for n in problem.wanted], laid["grad_out"])
            results |= dict(zip(problem.wanted, found))
    return results, list(record)


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem, solve it and check every backend; `repeat` compares bits of two runs."""
    problem = draw(seed, case)
    solution = exact(solve(problem))
    verdicts = {
        backend: judge(
            partial(run, problem, backend), lambda results: solution, backend, repeat,
            dtype=problem.dtype, data=data_of(problem), limits=LIMITS,
        )
        for backend in backends
    }  # fmt: skip
    return problem, verdicts
