# SPDX-License-Identifier: Apache-2.0
"""Exact results of linear_cross_entropy in float64, with their error bounds.

u = x w^T + b, z = cap t with t = tanh(u / cap), or u; p = softmax(z), q the smoothed target times
the class weights, A = sum(q). loss = A lse - sum(q z) + lambda lse^2; du = (P p - g q) (1 - t^2),
where g and g' are the upstream gradients of the first part and of the z-loss, and P = g A + 2
lambda lse g'. The bound, where r = eps(float32) / eps(dtype) is the rounding of float32 sums:

    E(u)    = r (|x| |w|^T + |b|)
    E(z)    = (1 - t^2) E(u) + 2 r |z|           rounding of u / cap, tanh and cap t; E(u) if no cap
    E(p)    = p (1 + E(z) + r (|z| + |lse|))     rounding of z, lse, z - lse and exp
    E(P)    = r (|g| A + 2 |lambda lse g'|) + 2 lambda |g'| max E(z)
    E(dz)   = |P| E(p) + E(P) p + |g| q          as stored; without weights and z-loss P = g
    E(du)   = (1 - t^2) E(dz) + |dz| 2 |t| E(z) / cap
    S(loss) = (A + 2 |lambda lse|) max E(z) + r (|loss| + A |lse| + sum |q z|), max over the rows of
              a reduced loss; the loss is float32
    S(dx)   = E(du) |w|,  S(db) = sum E(du),  S(dw) = (1 + r sqrt(n) / 4) E(du)^T |x|

A row's accuracy may be either value if its two largest candidates differ by less than c eps (E(z) +
E(z')), the bound of their difference.

In a row of the weight's gradient, one large term (the target) precedes up to n small ones, and each
addition rounds the full sum. n roundings have a standard deviation of 0.29 sqrt(n); 5.4 times that,
for the worst of ten million elements, is c = 8 times sqrt(n) / 5. The floor covers probabilities
below float32's min normal number, which may become zero, and float16's loss of small dz.
docs/accuracy.md has the errors of PyTorch's kernels and ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Problem

LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.float32: {"zero_mean": (2.0, 4.0), "any": (4.0, 6.0)},
}


@dataclass
class _Rows:
    """One row of every array per target: the formula's terms and their errors, in float64."""

    valid: Tensor
    z: Tensor
    of_z: Tensor  # E(z)
    tanh: Tensor  # t, 0 without a cap
    q: Tensor  # with class weights
    lse: Tensor
    share: Tensor  # what the reduction multiplies the loss with
    z_share: Tensor  # and the z-loss


def _rows(problem: Problem, x: Tensor, valid: Tensor, r: float) -> _Rows:
    t, keywords = problem.tensors, problem.keywords
    classes, target = t["weight"].shape[0], torch.where(valid, t["target"].reshape(-1), 0)
    weight, bias = t["weight"].double(), t.get("bias", torch.zeros(classes)).double()
    z = x @ weight.T + bias
    of_z, tanh = r * (x.abs() @ weight.abs().T + bias.abs()), torch.zeros_like(z)
    if cap := keywords.get("softcap", 0.0):
        tanh = torch.tanh(z / cap)
        z = cap * tanh
        of_z = (1 - tanh**2) * of_z + 2 * r * z.abs()
    smoothing = keywords.get("label_smoothing", 0.0)
    q = torch.full_like(z, smoothing / classes)
    q.scatter_add_(1, target[:, None], torch.full((len(z), 1), 1 - smoothing, dtype=torch.float64))
    weights = t.get("class_weight", torch.ones(classes)).double()
    share = z_share = torch.ones((), dtype=torch.float64)
    if keywords.get("reduction", "mean") == "mean":
        share = 1.0 / torch.where(valid, weights[target], 0.0).sum()
        z_share = 1.0 / valid.sum().double()
    return _Rows(valid, z, of_z, tanh, q * weights, torch.logsumexp(z, 1), share, z_share)


def _outputs(problem: Problem, rows: _Rows, r: float) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return (value, S, floor) of the loss, z-loss and accuracy, reduced."""
    keywords, lse, q, z = problem.keywords, rows.lse, rows.q, rows.z
    total, factor = q.sum(1), keywords.get("z_loss_weight", 0.0)
    losses, z_losses = total * lse - (q * z).sum(1), factor * lse**2
    largest = rows.of_z.amax(1)
    sizes = total * largest + r * (losses.abs() + total * lse.abs() + (q * z).abs().sum(1))
    z_sizes = 2 * factor * lse.abs() * largest + 2 * r * z_losses
    # The loss is always float32. In units of a 16-bit eps, whose c is 1, S includes float32's c.
    c = 1.0 if r == 1.0 else max(LIMITS[torch.float32]["any"])
    shape = problem.tensors["target"].shape

    def reduced(each: Tensor, share: Tensor) -> Tensor:
        each = torch.where(rows.valid, each, 0.0)
        if keywords.get("reduction", "mean") == "none":
            return each.view(shape)
        return each.sum() * share

    loss, z_loss = reduced(losses, rows.share), reduced(z_losses, rows.z_share)
    size, z_size = c * reduced(sizes, rows.share), c * reduced(z_sizes, rows.z_share)
    target = torch.where(rows.valid, problem.tensors["target"].reshape(-1), 0)[:, None]
    correct = (z.argmax(1) == target[:, 0]).double()
    others = z.scatter(1, target, -math.inf).amax(1)
    gap = (z.gather(1, target)[:, 0] - others).abs()
    near = gap <= max(LIMITS[problem.dtype]["any"]) * torch.finfo(problem.dtype).eps * 2 * largest
    mean = 1.0 / rows.valid.sum().double()
    accuracy, doubt = reduced(correct, mean), reduced(near.double(), mean)
    zero = torch.zeros_like(loss)
    return {
        "loss": (loss + z_loss, size + z_size, zero),
        "z_loss": (z_loss, z_size, zero),
        "accuracy": (accuracy, accuracy, doubt),
    }


def _logit_gradients(problem: Problem, rows: _Rows, r: float) -> tuple[Tensor, Tensor]:
    """Return du and E(du)."""
    z, lse, tanh = rows.z, rows.lse[:, None], rows.tanh
    factor, cap = (problem.keywords.get(n, 0.0) for n in ("z_loss_weight", "softcap"))
    upstream = problem.tensors["grad_out"].double().reshape(-1)
    g, of_z_loss = (
        torch.where(rows.valid, upstream * share, 0.0)[:, None]
        for share in (rows.share, rows.z_share)
    )
    p, total, extra = torch.softmax(z, 1), rows.q.sum(1)[:, None], 2 * factor * of_z_loss
    p_factor = g * total + extra * lse
    dz = p_factor * p - g * rows.q
    of_p = p * (1 + rows.of_z + r * (z.abs() + lse.abs()))
    of_dz = p_factor.abs() * of_p + g.abs() * rows.q
    if factor or "class_weight" in problem.tensors:
        of_factor = r * (g.abs() * total + (extra * lse).abs())
        of_dz += p * (of_factor + extra.abs() * rows.of_z.amax(1)[:, None])
    if not cap:
        return dz, of_dz
    slope = 1 - tanh**2
    return dz * slope, of_dz * slope + dz.abs() * 2 * tanh.abs() * rows.of_z / cap


def solve(problem: Problem) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S."""
    t, dtype = problem.tensors, problem.dtype
    target = t["target"].reshape(-1)
    valid = target != problem.keywords.get("ignore_index", -100)
    x = torch.where(valid[:, None], t["x"].double().reshape(len(target), t["weight"].shape[1]), 0.0)
    r = 1.0 if dtype == torch.float64 else torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    rows = _rows(problem, x, valid, r)
    stored = torch.float64 if dtype == torch.float64 else torch.float32
    results = {
        name: oracle.Result(*parts, False, stored)
        for name, parts in _outputs(problem, rows, r).items()
        if name == "loss" or problem.keywords.get(f"return_{name}")
    }
    if "grad_out" not in t:
        return results

    def put(name: str, value: Tensor, size: Tensor, terms: Tensor) -> None:
        # An element of du is multiplied by `terms`; each product may lose the part below the
        # smallest subnormal.
        tiny = 2.0**-24 if dtype == torch.float16 else 2.0**-120
        floor = tiny * (1 + terms).expand(size.shape)
        results[name] = oracle.Result(value, size, floor, True, t[name].dtype)

    du, size = _logit_gradients(problem, rows, r)
    weight = t["weight"].double()
    put("x", (du @ weight).view(t["x"].shape), (size @ weight.abs()).view(t["x"].shape),
        weight.abs().sum(0))  # fmt: skip
    grown = 1 + r * math.sqrt(len(x)) / 4
    put("weight", du.T @ x, grown * (size.T @ x.abs()), x.abs().sum(0))
    if "bias" in t:
        put("bias", du.sum(0), size.sum(0), torch.tensor(float(len(x))))
    return results
