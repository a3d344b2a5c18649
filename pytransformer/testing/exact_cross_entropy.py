# SPDX-License-Identifier: Apache-2.0
"""Exact results of linear_cross_entropy in float64, with their error bounds.

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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle

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
