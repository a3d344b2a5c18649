# SPDX-License-Identifier: Apache-2.0
"""Random problems of layer_norm, rms_norm and add_norm against float64, for `fuzz`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds
from pytransformer.testing.case import Case, named
from pytransformer.testing.case import Problem as Problem
from pytransformer.testing.exact_layer_norm import LIMITS as LIMITS
from pytransformer.testing.exact_layer_norm import solve as solve
from pytransformer.testing.oracle import exact

from .guarded import place, random_layout
from .judge import data_of
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("layer_norm", "rms_norm", "add_norm")


def _values(rng: random.Random, data: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    if data == "positive":
        x = x.abs()
    elif data == "offset":
        x = 100 + 0.1 * x if dtype in (torch.float32, torch.float64) else 2 + 0.1 * x
    elif data == "heavy":
        x = x * x.abs() ** 3
    elif data == "tiny":
        x = x * 1e-4
    return x.to(dtype)


def draw(seed: int, case: int) -> Problem:
    """Return the problem of this seed and number."""
    rng = random.Random(f"norm {seed} {case}")
    torch.manual_seed(rng.getrandbits(40))
    op, dtype = rng.choice(KINDS), rng.choice(DTYPES)
    dims = rng.choice((1, 1, 1, 2, 3))
    columns = rng.choice(
        (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 100, 127, 130, 257, 768, 1025)
    )
    inner = {
        1: (columns,),
        2: (rng.choice((1, 3, 5)), columns),
        3: (2, rng.choice((1, 3)), columns),
    }[dims]
    lead = tuple(rng.choice((1, 2, 3, 5, 9)) for _ in range(rng.choice((0, 1, 2, 2, 3))))
    if rng.random() < 0.04:
        lead = (0, *lead)
    if rng.random() < 0.05:
        lead = (rng.choice((130, 300)),)
    data = rng.choice(("zero_mean", "zero_mean", "positive", "offset", "heavy", "tiny"))
    shape = (*lead, *inner)
    low = (torch.float32, torch.bfloat16, torch.float16)

    def other(chance: float) -> torch.dtype:
        return rng.choice(low) if dtype != torch.float64 and rng.random() < chance else dtype

    tensors = {"x": _values(rng, data, shape, dtype)}
    keywords: dict[str, Any] = {}
    if op == "add_norm":
        if rng.random() < 0.85:
            tensors["residual"] = _values(rng, data, shape, other(0.4))
        if rng.random() < 0.4:
            keywords |= {
                "dropout_p": rng.choice((0.1, 0.5, 0.9, 1.0)),
                "dropout_seed": rng.getrandbits(63),
            }
        keywords["kind"] = rng.choice(("layer", "rms"))
    if (op == "add_norm" and dims > 1) or rng.random() < 0.75:
        tensors["weight"] = torch.randn(inner, dtype=torch.float64).add(1).to(other(0.3))
    if op != "rms_norm" and rng.random() < 0.7:
        tensors["bias"] = torch.randn(inner, dtype=torch.float64).to(other(0.3))
    if rng.random() < 0.5:
        keywords["eps"] = rng.choice((1e-5, 1e-6, 1e-3, 1e-12))
    wanted = [n for n in tensors if rng.random() < 0.8]
    if wanted and (op != "add_norm" or rng.random() < 0.9):
        tensors["grad_out"] = torch.randn(shape, dtype=torch.float64).to(dtype)
    if wanted and op == "add_norm" and (rng.random() < 0.6 or "grad_out" not in tensors):
        tensors["grad_residual_out"] = torch.randn(shape, dtype=torch.float64).to(
            tensors.get("residual", tensors["x"]).dtype
        )
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    if "grad_out" in tensors and rng.random() < 0.1:
        layouts["grad_out"] = "expanded"
        tensors["grad_out"] = tensors["grad_out"][tuple(slice(0, 1) for _ in shape)].expand(shape)
    features = {
        *tensors,
        *keywords,
        data,
        f"{dims}d",
        op,
        *(n for n, v in layouts.items() if v != "contiguous" and n == "x"),
    }
    if any(tensors[n].dtype != dtype for n in ("residual", "weight", "bias") if n in tensors):
        features.add("mixed")
    return Problem(op, dtype, data, tensors, layouts, keywords, wanted, features, dims)


def of_case(case: Case, dtype: torch.dtype) -> Problem:
    """Return a shared case as a problem with all gradients, for every output."""
    args, keywords = case.make("cpu", dtype, seed=0)
    given = named(case.op, args, keywords)
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    keywords = {n: v for n, v in given.items() if n not in tensors and n != "normalized_shape"}
    wanted = list(tensors)
    for grad in ("grad_out", "grad_residual_out")[: 1 + (case.op == "add_norm")]:
        tensors[grad] = torch.randn(tensors["x"].shape, dtype=torch.float64).to(dtype)
    layouts = dict.fromkeys(tensors, "contiguous")
    return Problem(case.op, dtype, "zero_mean", tensors, layouts, keywords, wanted)


# ---- one problem on one backend


def call(problem: Problem, leaves: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Return the outputs of the public function, by name."""
    import pytransformer as pt

    keywords = problem.keywords | {"backend": backend, "strict": True}
    weight, bias = leaves.get("weight"), leaves.get("bias")
    if problem.op == "add_norm":
        normed, residual_out = pt.add_norm(
            leaves["x"], leaves.get("residual"), weight, bias, **keywords
        )
        return {"normed": normed, "residual_out": residual_out}
    shape = leaves["x"].shape[leaves["x"].dim() - problem.dims :]
    if problem.op == "rms_norm":
        return {"out": pt.rms_norm(leaves["x"], shape, weight, **keywords)}
    return {"out": pt.layer_norm(leaves["x"], shape, weight, bias, **keywords)}


def run(
    problem: Problem, backend: str, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor | None], list[tuple[str, str]]]:
    """Return (results by name on the CPU, raw ops run), with guarded and poisoned memory."""
    from pytransformer.ops._core.registry import trace

    laid = {
        n: (
            t.to(device)
            if problem.layouts[n] == "expanded"
            else place(t.to(device), problem.layouts[n])
        )
        for n, t in problem.tensors.items()
    }
    leaves = {
        n: t.requires_grad_(n in problem.wanted)
        for n, t in laid.items()
        if not n.startswith("grad_")
    }
    with poisoned(), trace() as record:
        results: dict[str, Tensor | None] = dict(call(problem, leaves, backend))
        asked = [
            (results[n], laid[g])
            for n, g in zip(results, ("grad_out", "grad_residual_out"))
            if g in laid
        ]
        asked = [(out, grad) for out, grad in asked if out is not None and out.requires_grad]
        if asked:
            outputs, grads = zip(*asked)
            found = torch.autograd.grad(
                outputs, [leaves[n] for n in problem.wanted], grads, allow_unused=True
            )
            results |= dict(zip(problem.wanted, found))
    return {n: None if r is None else r.cpu() for n, r in results.items()}, list(record)


def judge(
    problem: Problem, backend: str, repeat: bool, device: str | torch.device = "cpu"
) -> tuple[list[bounds.Check], list[str]]:
    """Check one backend on the problem; `repeat` runs it twice and compares bits."""
    return judge_run(
        lambda: run(problem, backend, device),
        lambda results: exact(solve(problem, results.get("residual_out"))), backend, repeat,
        dtype=problem.coarse_dtype, data=data_of(problem), limits=LIMITS,
    )  # fmt: skip


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem and check every backend on it; `repeat` compares bits of two runs."""
    problem = draw(seed, case)
    return problem, {backend: judge(problem, backend, repeat) for backend in backends}
