# SPDX-License-Identifier: Apache-2.0
"""All tolerances: the error bound against float64 (derivation and data: docs/accuracy.md).

    |ours - exact| <= c * eps(dtype) * S + floor        for every element

S and floor come with the exact result from `oracle.solve` (attention) or `propagation` (other ops);
c is below. A NaN or infinity that the exact result lacks violates every bound. If S is 0, the
result must be exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import LN2, Result, Solution

# c for (outputs, gradients). "zero_mean": data drawn around zero, where rounding errors average
# out. "any": all other data, where the rounding errors of sums of one sign accumulate. "repeated":
# a tensor repeats along a dimension (stride 0), so sums of equal terms round the same way each
# time. PyTorch's kernels just meet these values (docs/accuracy.md).
Limits = Mapping[torch.dtype, Mapping[str, tuple[float, float]]]
LIMITS: Limits = {
    torch.bfloat16: {"zero_mean": (1.0, 2.0), "any": (1.0, 2.0), "repeated": (1.0, 2.0)},
    torch.float16: {"zero_mean": (1.0, 2.0), "any": (1.0, 2.0), "repeated": (1.0, 2.0)},
    torch.float32: {"zero_mean": (2.0, 6.0), "any": (6.0, 8.0), "repeated": (6.0, 16.0)},
    torch.float64: {"zero_mean": (2.0, 6.0), "any": (6.0, 8.0), "repeated": (6.0, 16.0)},
}

# The files of other op families define their constants. PyTorch's kernels meet them in 1,000
# problems each, except for 16-bit losses and norms, which they round on the way, and long sums of
# equal terms (docs/accuracy.md). In float64 the exact result errs as much as ours, so attention's
# constants apply.


@dataclass(frozen=True)
class Check:
    """One tensor's comparison: c reached, c allowed, and the worst element."""

    name: str
    reached: float
    allowed: float
    worst: tuple[int, ...]
    ours: float
    exact: float

    @property
    def ok(self) -> bool:
        return self.reached <= self.allowed

    def __str__(self) -> str:
        at = ",".join(map(str, self.worst))
        verdict = "ok" if self.ok else "WRONG"
        numbers = (
            f"{self.ours:.9g}, exact {self.exact:.9g}: c {self.reached:.3g} of {self.allowed:g}"
        )
        return f"{self.name}[{at}] = {numbers} {verdict}"


# For terms of one sign, a score's rounding error grows as the square root of the head size from
# this size on.
LONG = 96


def limit(
    dtype: torch.dtype,
    gradient: bool,
    data: str = "any",
    head_dim: int = 1,
    limits: Limits = LIMITS,
) -> float:
    """Return c for a result of this dtype."""
    c = limits[dtype][data][gradient]
    wide = dtype in (torch.float32, torch.float64)
    return c * max(1.0, head_dim / LONG) ** 0.5 if wide and data != "zero_mean" else c


def coefficients(
    ours: Tensor, exact: Tensor, S: Tensor, floor: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """Return the min c per element that meets the bound.

    It is inf for a NaN, and for an inexact element where S is 0.
    """
    finfo = torch.finfo(dtype)
    # Backends saturate in base 2 or round to infinity where the exact result leaves the dtype's
    # range; both count as equal. A float16 result leaves it early even if its unit is bfloat16's.
    half = torch.float16 in (ours.dtype, dtype)
    top = torch.finfo(torch.float16).max if half else finfo.max * LN2
    ours = ours.cpu().double()
    error = (ours.clamp(-top, top) - exact.clamp(-top, top)).abs()
    error = torch.where(ours.isinf() & (ours == exact), 0.0, error)
    excess = (error - floor).clamp(min=0.0)
    c = torch.where(excess == 0, 0.0, excess / (finfo.eps * S))
    return torch.where(ours.isnan() | excess.isnan(), torch.inf, c)


def compare(
    name: str,
    ours: Tensor,
    exact: Tensor,
    S: Tensor,
    floor: Tensor | float,
    dtype: torch.dtype,
    allowed: float,
) -> Check:
    """Return one tensor's comparison with its bound."""
    if ours.shape != exact.shape:
        raise ValueError(f"{name} has shape {tuple(ours.shape)}, want {tuple(exact.shape)}")
    if ours.numel() == 0:
        return Check(name, 0.0, allowed, (), 0.0, 0.0)
    ours = ours.detach()
    c = coefficients(ours, exact, S, floor, dtype)
    at = torch.unravel_index(c.argmax(), c.shape)
    worst = tuple(int(i) for i in at)
    return Check(name, float(c[at]), allowed, worst, float(ours[at]), float(exact[at]))


def rounding(result: Result, dtype: torch.dtype) -> torch.dtype:
    """Return the coarser of the arithmetic inputs' dtype and the stored dtype."""
    return max(result.dtype, dtype, key=lambda d: torch.finfo(d).eps)


def check(
    solution: Solution,
    ours: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    data: str = "any",
    limits: Limits = LIMITS,
) -> list[Check]:
    """Compare every tensor of `ours` with the solution; None counts as a zero gradient.

    `dtype` is that of query, key and value. An unknown name or a wrong dtype raises ValueError.
    """
    checks = []
    for name, tensor in ours.items():
        if name not in solution.results:
            raise ValueError(f"no result {name!r}, the solution has {sorted(solution.results)}")
        r = solution.results[name]
        if tensor is None:
            tensor = torch.zeros_like(r.value, dtype=r.dtype)
        if tensor.dtype != r.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, want {r.dtype}")
        unit = r.dtype if name == "lse" else rounding(r, dtype)
        floor = r.floor + torch.finfo(r.dtype).tiny * torch.finfo(r.dtype).eps * (r.S > 0)
        checks.append(
            compare(
                name,
                tensor,
                r.value,
                r.S,
                floor,
                unit,
                limit(unit, r.gradient, data, solution.head_dim, limits),
            )
        )
    return checks


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return ||ours - exact|| / ||exact|| in float64.

    It is 0 if both are zero and inf if only `exact` is.
    """
    ours, exact = ours.detach().cpu().double(), exact.detach().cpu().double()
    error, size = float((ours - exact).norm()), float(exact.norm())
    return error / size if size else (0.0 if error == 0 else float("inf"))


# Relative 2-norm of the difference in units of eps, for two backends' results in one dtype. Two
# 16-bit results round nearly the same number and differ by about half a unit; float32 results are
# sums in different orders.
AGREEMENT = {torch.bfloat16: 2.0, torch.float16: 2.0, torch.float32: 8.0}


def agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return True if two results agree, for results without an exact solution.

    `dtype` is that of the arithmetic's inputs, if coarser than the results' dtype.
    """
    unit = ours.dtype if dtype is None else max(ours.dtype, dtype, key=lambda d: torch.finfo(d).eps)
    return relative_error(ours, theirs) <= AGREEMENT[unit] * torch.finfo(unit).eps


def other_bits(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> list[str]:
    """Return the names of results with unequal bits in two runs; NaN payloads may differ."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) and torch.equal(
            x.signbit(), y.signbit()
        )

    return [name for name in a if not equal(a[name], b[name])]


# ---- models: two correct computations of the small test models

# For float32 logits, relative to max(1, max|logit|). Two correct computations of the small test
# models differ by 1e-7 to 3e-6; an approximate GELU or a wrong eps gives 1e-4 and more.
LOGITS = 5e-5
# Relative 2-norm difference of a parameter's float32 gradients.
GRADIENT = 5e-5
# Relative difference of a small model's loss under bfloat16 autocast: a few roundings of 2^-9 per
# layer.
AUTOCAST = 2e-2
# Relative difference of two float64 losses after 50 training steps: rounding only (4e-15 measured).
CURVE = 1e-12
# For elements of one float32 attention with magnitude about 1, relative and absolute; gradients sum
# more terms.
ELEMENT = 32 * torch.finfo(torch.float32).eps
OUTPUT_SIZE, GRADIENT_SIZE = 4.0, 8.0
# For weights, relative and absolute, and losses after a few float32 training steps with another
# summation order. Adam divides small gradients, and thus their rounding errors, by their magnitude.
TRAINED, TRAINED_LEAST = 1e-4, 1e-5
# Number of examples, and limit, of the ratio to eager code's error. The ratio of two rounding
# errors scatters. Over 40 draws of 3 examples its logarithm has a standard deviation of 0.03 (BERT)
# to 0.23 (ViT); over 8 draws of 64 examples, 0.003 to 0.05 about a mean of -0.13 to 0.02 (Zen 5
# with AVX-512, and pinned to AVX2). The limit is the highest mean plus 4 of the largest deviations:
# exp(0.22).
MANY, AS_EXACT = 64, 1.25


def model_distance_limit(dtype: torch.dtype) -> float:
    """Return the max relative 2-norm difference of two correct runs of these two-layer models.

    PyTorch's sdpa differs from eager code by 1 to 16 eps; a wrong mask differs by 1e5 eps and more.
    """
    return 32 * torch.finfo(dtype).eps


def conditioned_limit(dtype: torch.dtype, noise: float) -> float:
    """Return the limit for a model of any condition.

    `noise` is its output change if each weight changes by one rounding. BERT, GPT-2, Llama and ViT
    change by 4 eps, an eighth of their limit of 32 eps. Wrong masks start at 2e-2, and no limit
    exceeds a quarter of that.
    """
    return min(max(model_distance_limit(dtype), 8 * noise), 5e-3)
