# SPDX-License-Identifier: Apache-2.0
"""Random problems of linear_cross_entropy against float64, for `fuzz`."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds, oracle
from pytransformer.testing.case import Case, named
from pytransformer.testing.case import Problem as Problem
from pytransformer.testing.exact_cross_entropy import LIMITS as LIMITS
from pytransformer.testing.exact_cross_entropy import solve as solve
from pytransformer.testing.oracle import exact

from .guarded import place, random_layout
from .judge import data_of
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


REDUCTIONS = ("mean", "sum", "none")


NO_GRADIENT = ("target", "class_weight", "grad_out")


def draw(seed: int, case: int) -> Problem:
    """Return the problem of this seed and number."""
    rng = random.Random(f"cross entropy {seed} {case}")
    torch.manual_seed(rng.getrandbits(40))
    dtype, data = rng.choice(DTYPES), rng.choice(("zero_mean", "zero_mean", "positive", "large"))
    d = rng.choice((1, 2, 3, 7, 16, 17, 31, 48, 64, 65, 96, 130, 260))
    classes = rng.choice((1, 2, 3, 10, 31, 64, 65, 127, 128, 129, 200, 257, 700))
    lead = tuple(rng.choice((1, 2, 3, 7)) for _ in range(rng.choice((0, 1, 2, 3))))
    if rng.random() < 0.15:
        lead = (rng.choice((90, 130, 200)),)
    if rng.random() < 0.03:
        lead = (0, *lead)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        t = torch.randn(shape, dtype=torch.float64) * scale
        return t.abs() if data == "positive" else t * 4 if data == "large" else t

    x, target = values(*lead, d), torch.randint(0, classes, lead)
    keywords: dict[str, Any] = {"reduction": rng.choice(REDUCTIONS)}
    if rng.random() < 0.4:
        keywords["label_smoothing"] = rng.choice((0.1, 0.3, 1.0))
    if rng.random() < 0.4:
        keywords["ignore_index"] = rng.choice((-1, 0, classes - 1, classes + 5))
    features = {*keywords, data, keywords["reduction"]}
    if rng.random() < 0.6:  # ignored rows may hold anything; sometimes all rows are ignored
        ignored = torch.rand(lead) < (1.0 if rng.random() < 0.05 else 0.3)
        target = torch.where(ignored, keywords.get("ignore_index", -100), target)
        features.add("ignored")
        if rng.random() < 0.5:
            x = torch.where(
                (target == keywords.get("ignore_index", -100)).unsqueeze(-1),
                rng.choice((math.nan, math.inf)),
                x,
            )
            features.add("ignored_nan")
    tensors = {
        "x": x.to(dtype),
        "weight": values(classes, d, scale=d**-0.5).to(dtype),
        "target": target,
    }
    if rng.random() < 0.6:
        other = torch.float32 if dtype != torch.float64 and rng.random() < 0.4 else dtype
        tensors["bias"] = values(classes).to(other)
    wanted = [n for n in tensors if n != "target" and rng.random() < 0.8]
    if wanted:
        shape = lead if keywords["reduction"] == "none" else ()
        tensors["grad_out"] = torch.randn(
            shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32
        )
        if keywords["reduction"] == "none" and rng.random() < 0.3:  # rows of very different weight
            tensors["grad_out"] *= 10.0 ** (4 * torch.rand(shape) - 3).to(tensors["grad_out"].dtype)
    tensors |= _options(rng, classes, dtype, keywords)
    if "return_accuracy" in keywords:
        tensors["target"] = _some_right(tensors, keywords)
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    features |= {
        *tensors,
        *keywords,
        *({"strided"} if any(v != "contiguous" for v in layouts.values()) else ()),
    }
    return Problem(
        "linear_cross_entropy", dtype, data, tensors, layouts, keywords, wanted, features
    )


def _options(
    rng: random.Random, classes: int, dtype: torch.dtype, keywords: dict[str, Any]
) -> dict[str, Tensor]:
    """Add the rarer options to the keywords; return {"class_weight": ...} or nothing."""
    if rng.random() < 0.6:
        return {}
    if rng.random() < 0.45:
        keywords["softcap"] = rng.choice((0.5, 5.0, 30.0))
    if rng.random() < 0.45:
        keywords["z_loss_weight"] = rng.choice((1e-4, 0.02))
        keywords["return_z_loss"] = rng.random() < 0.7
    if rng.random() < 0.4:
        keywords["return_accuracy"] = True
    if rng.random() >= 0.45:
        return {}
    weights = torch.rand(classes, dtype=torch.float64) * rng.choice((1.0, 8.0)) + 0.1
    other = rng.choice((dtype, torch.float32)) if dtype != torch.float64 else dtype
    return {"class_weight": weights.to(other)}


def _some_right(tensors: dict[str, Tensor], keywords: dict[str, Any]) -> Tensor:
    """Return the target with the largest logit's class in every other row, if it is clearly that.

    A random target rarely is the largest of many classes, and a wrong argmax would go unseen.
    """
    bias = tensors.get("bias")
    logits = tensors["x"].double() @ tensors["weight"].double().T
    logits = logits if bias is None else logits + bias.double()
    if cap := keywords.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    target, best = tensors["target"], logits.argmax(-1)
    first, second = (logits.sort(-1).values[..., n] for n in (-1, -min(2, logits.shape[-1])))
    ignored = keywords.get("ignore_index", -100)
    right = (target != ignored) & (best != ignored) & (first - second > 1e-2 * first.abs())
    right &= torch.arange(target.numel()).view(target.shape) % 2 == 0
    return torch.where(right, best, target)


def of_case(case: Case, dtype: torch.dtype, **keywords: Any) -> Problem:
    """Return a shared case as a problem with all gradients."""
    args, given = case.make("cpu", dtype, seed=0)
    given = named(case.op, args, given)
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    keywords = {n: v for n, v in given.items() if n not in tensors} | keywords
    wanted = [n for n in tensors if n not in NO_GRADIENT]
    shape = tensors["target"].shape if keywords.get("reduction") == "none" else ()
    tensors["grad_out"] = torch.randn(shape)
    layouts = dict.fromkeys(tensors, "contiguous")
    return Problem(case.op, dtype, "zero_mean", tensors, layouts, keywords, wanted)


def run(
    problem: Problem, backend: str, device: str | torch.device = "cpu"
) -> tuple[dict[str, Tensor | None], list[tuple[str, str]]]:
    """Return (results by name on the CPU, raw ops run), with guarded and poisoned memory."""
    import pytransformer as pt
    from pytransformer.ops._core.registry import trace

    laid = {n: place(t.to(device), problem.layouts[n]) for n, t in problem.tensors.items()}
    leaves = {
        n: t.requires_grad_(n in problem.wanted)
        for n, t in laid.items()
        if n not in ("grad_out", "target")
    }
    keywords = problem.keywords
    with poisoned(), trace() as record:
        out = pt.linear_cross_entropy(
            leaves["x"],
            leaves["weight"],
            laid["target"],
            bias=leaves.get("bias"),
            class_weight=leaves.get("class_weight"),
            **keywords,
            backend=backend,
            strict=True,
        )
        loss, *more = out if isinstance(out, tuple) else (out,)
        results: dict[str, Tensor | None] = {"loss": loss}
        results |= dict(
            zip([n for n in ("z_loss", "accuracy") if keywords.get(f"return_{n}")], more)
        )
        if problem.wanted:
            found = torch.autograd.grad(loss, [leaves[n] for n in problem.wanted], laid["grad_out"])
            results |= dict(zip(problem.wanted, found))
    return {n: None if r is None else r.cpu() for n, r in results.items()}, list(record)


def judge(
    problem: Problem, backend: str, repeat: bool, device: str | torch.device = "cpu"
) -> tuple[list[bounds.Check], list[str]]:
    """Check one backend on the problem; `repeat` runs it twice and compares bits."""
    return judge_run(
        lambda: run(problem, backend, device), lambda results: exact(solve(problem)), backend,
        repeat,
        dtype=problem.dtype, data=data_of(problem), limits=LIMITS, special=_mean_over_nothing,
    )  # fmt: skip


def _mean_over_nothing(solution: oracle.Solution, results: dict[str, Tensor | None]) -> list[str]:
    """Check that the mean over no target is NaN; it has no number to compare."""
    means = {n: results.pop(n) for n, r in solution.results.items() if r.value.isnan().any()}
    return [
        f"{name} = {mean}, the mean over no target is NaN: WRONG"
        for name, mean in means.items()
        if mean is None or not mean.isnan().all()
    ]


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem and check every backend on it; `repeat` compares bits of two runs."""
    problem = draw(seed, case)
    return problem, {backend: judge(problem, backend, repeat) for backend in backends}
