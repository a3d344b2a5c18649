# SPDX-License-Identifier: Apache-2.0
"""Random problems of linear_cross_entropy against float64, for `fuzz`.

z = x w^T + b, p = softmax(z), loss = logsumexp(z) - sum(q z) with the smoothed target q; dz = (p -
q) dloss. The bound, where r = eps(float32) / eps(dtype) is the rounding of float32 sums:

    E(z)    = r (|x| |w|^T + |b|)
    E(p)    = p (1 + E(z) + r (|z| + |lse|))     rounding of z, lse, z - lse and exp
    E(dz)   = (E(p) + q) |dloss|                 as stored
    S(loss) = max E(z) + r (|loss| + |lse| + sum |q z|), max over the rows of a reduced
              loss; the loss is float32
    S(dx)   = E(dz) |w|,  S(db) = sum E(dz),  S(dw) = (1 + r sqrt(n) / 4) E(dz)^T |x|

In a row of the weight's gradient, one large term (the target) precedes up to n small ones, and each
addition rounds the full sum. n roundings have a standard deviation of 0.29 sqrt(n); 5.4 times that,
for the worst of ten million elements, is c = 8 times sqrt(n) / 5. The floor covers probabilities
below float32's min normal number, which may become zero, and float16's loss of small dz.
docs/accuracy.md has the errors of PyTorch's kernels and ours.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Case, named
from .guarded import place, random_layout
from .judge import data_of, exact
from .judge import judge as judge_run
from .poison import poisoned

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REDUCTIONS = ("mean", "sum", "none")
LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.float32: {"zero_mean": (2.0, 4.0), "any": (4.0, 6.0)},
}


@dataclass
class Problem:
    """One call, its upstream gradient, and its features."""

    dtype: torch.dtype
    data: str
    tensors: dict[str, Tensor]  # x, weight, target, bias; grad_out
    layouts: dict[str, str]
    keywords: dict[str, Any]
    wanted: list[str]
    features: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{n} {str(t.dtype)[6:]} {tuple(t.shape)} {self.layouts[n]}"
            for n, t in self.tensors.items()
        )
        return (
            f"linear_cross_entropy, {self.data} data, {self.keywords}, gradients of {self.wanted}:"
            f" {shapes}"
        )


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
    layouts = {n: random_layout(rng, t, 0.5) for n, t in tensors.items()}
    features |= {
        *tensors,
        *({"strided"} if any(v != "contiguous" for v in layouts.values()) else ()),
    }
    return Problem(dtype, data, tensors, layouts, keywords, wanted, features)


def of_case(case: Case, dtype: torch.dtype, **keywords: Any) -> Problem:
    """Return a shared case as a problem with all gradients."""
    args, given = case.make("cpu", dtype, seed=0)
    given = named(case.op, args, given)
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
    keywords = {n: v for n, v in given.items() if n not in tensors} | keywords
    wanted = [n for n in tensors if n != "target"]
    shape = tensors["target"].shape if keywords.get("reduction") == "none" else ()
    tensors["grad_out"] = torch.randn(shape)
    return Problem(
        dtype, "zero_mean", tensors, dict.fromkeys(tensors, "contiguous"), keywords, wanted
    )


def solve(problem: Problem) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S."""
    t, dtype = problem.tensors, problem.dtype
    classes, target = t["weight"].shape[0], t["target"].reshape(-1)
    valid = target != problem.keywords.get("ignore_index", -100)
    x = torch.where(valid[:, None], t["x"].double().reshape(len(target), t["weight"].shape[1]), 0.0)
    weight, bias = t["weight"].double(), t.get("bias", torch.zeros(classes)).double()
    smoothing, reduction = (
        problem.keywords.get("label_smoothing", 0.0),
        problem.keywords.get("reduction", "mean"),
    )
    r = 1.0 if dtype == torch.float64 else torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    z = x @ weight.T + bias
    summed = r * (x.abs() @ weight.abs().T + bias.abs())
    q = torch.full_like(z, smoothing / classes)
    q.scatter_add_(
        1,
        torch.where(valid, target, 0)[:, None],
        torch.full((len(z), 1), 1 - smoothing, dtype=torch.float64),
    )
    lse = torch.logsumexp(z, 1)
    moved = summed + r * (z.abs() + lse.abs()[:, None])
    losses = torch.where(valid, lse - (q * z).sum(1), 0.0)
    # The loss is always float32. In units of a 16-bit eps, whose c is 1, S includes float32's c.
    c = 1.0 if r == 1.0 else max(LIMITS[torch.float32]["any"])
    sizes = c * torch.where(
        valid, summed.amax(1) + r * (losses.abs() + lse.abs() + (q * z).abs().sum(1)), 0.0
    )
    share = 1.0 / valid.sum().double() if reduction == "mean" else torch.ones(())
    stored = torch.float64 if dtype == torch.float64 else torch.float32
    results: dict[str, oracle.Result] = {}

    def put(
        name: str, value: Tensor, size: Tensor, kept: torch.dtype, terms: Tensor | None = None
    ) -> None:
        # An element of dz is multiplied by `terms`; each product may lose the part below the
        # smallest subnormal.
        tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-120
        floor = torch.zeros_like(size) if terms is None else tiny * (1 + terms).expand(size.shape)
        results[name] = oracle.Result(value, size, floor, terms is not None, kept)

    if reduction == "none":
        put("loss", losses.view(t["target"].shape), sizes.view(t["target"].shape), stored)
    else:
        put("loss", losses.sum() * share, sizes.sum() * share, stored)
    if "grad_out" not in t:
        return results
    upstream = torch.where(valid, t["grad_out"].double().reshape(-1) * share, 0.0)[:, None]
    p = torch.softmax(z, 1)
    dz, size = (p - q) * upstream, (p * (1 + moved) + q) * upstream.abs()
    put(
        "x",
        (dz @ weight).view(t["x"].shape),
        (size @ weight.abs()).view(t["x"].shape),
        dtype,
        weight.abs().sum(0),
    )
    put(
        "weight",
        dz.T @ x,
        (1 + r * math.sqrt(len(x)) / 4) * (size.T @ x.abs()),
        dtype,
        x.abs().sum(0),
    )
    if "bias" in t:
        put("bias", dz.sum(0), size.sum(0), t["bias"].dtype, torch.tensor(float(len(x))))
    return results


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
    with poisoned(), trace() as record:
        loss = pt.linear_cross_entropy(
            leaves["x"],
            leaves["weight"],
            laid["target"],
            bias=leaves.get("bias"),
            **problem.keywords,
            backend=backend,
            strict=True,
        )
        results: dict[str, Tensor | None] = {"loss": loss}
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
    if not solution.results["loss"].value.isnan().any():
        return []
    loss = results.pop("loss")
    return (
        []
        if loss is not None and loss.isnan()
        else [f"loss = {loss}, the mean over no target is NaN: WRONG"]
    )


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem and check every backend on it; `repeat` compares bits of two runs."""
    problem = draw(seed, case)
    return problem, {backend: judge(problem, backend, repeat) for backend in backends}
