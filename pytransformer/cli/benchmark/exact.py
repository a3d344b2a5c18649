"""The exact answer to a benchmark's problem: the float64 oracles of `pytransformer.testing`, in the shapes of the public ops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from pytransformer.cli.providers import Problem
from pytransformer.testing import fuzz_ffn, fuzz_norm, oracle

# The outputs of each op, by their names in the oracles; the gradients have their arguments' names.
OUTPUTS = {
    "attention": ("out",),
    "attention_varlen": ("out",),
    "layer_norm": ("out",),
    "rms_norm": ("out",),
    "add_norm": ("normed", "residual_out"),
    "feed_forward": ("out",),
    "linear_cross_entropy": ("loss",),
}


def solve(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    """Outputs and, given upstream `grads`, gradients in float64, each with what its bound is made of."""
    with torch.no_grad():
        return _SOLVERS[problem.case.op](problem.on_cpu(), None if grads is None else [g.cpu() for g in grads])


def _padded(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    return oracle.solve(*problem.args, *(grads or []), **problem.kwargs)


def _packed(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    """Packed sequences are padded ones with lengths; what comes out is packed again."""
    *qkv, cu_q, cu_k, longest_q, longest_k = problem.args
    spans = [(cu[:-1].tolist(), cu.diff().tolist(), longest) for cu, longest in ((cu_q, longest_q), (cu_k, longest_k))]

    def pad(rows: torch.Tensor, side: int) -> torch.Tensor:
        starts, lengths, longest = spans[side]
        padded = rows.new_zeros(len(starts), rows.shape[1], longest, rows.shape[2])
        for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            padded[b, :, :length] = rows[start : start + length].detach().transpose(0, 1)
        return padded

    def pack(padded: torch.Tensor, side: int) -> torch.Tensor:
        lengths = spans[side][1]
        return torch.cat([padded[b, :, :length].transpose(0, 1) for b, length in enumerate(lengths)])

    sides = {"out": 0, "query": 0, "key": 1, "value": 1}
    solution = oracle.solve(
        pad(qkv[0], 0), pad(qkv[1], 1), pad(qkv[2], 1), *(pad(g, 0) for g in grads or []),
        query_lengths=cu_q.diff(), key_lengths=cu_k.diff(), **problem.kwargs,
    )  # fmt: skip
    results = {
        name: dataclasses.replace(r, **{part: pack(getattr(r, part), sides[name]) for part in ("value", "S", "floor")})
        if name in sides
        else r
        for name, r in solution.results.items()
    }
    return dataclasses.replace(solution, results=results)


def _norm(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    named = problem.named
    tensors = {name: named[name] for name in ("x", "residual", "weight", "bias") if named.get(name) is not None}
    tensors |= dict(zip(("grad_out", "grad_residual_out"), grads or []))
    keywords = {name: named[name] for name in ("eps", "kind", "dropout_p", "dropout_seed") if name in named}
    drawn = fuzz_norm.Problem(problem.case.op, problem.dtype, 1, "zero_mean", tensors, {}, keywords, [])
    stored = None
    if problem.case.op == "add_norm":
        # The norm is that of the sum as it is stored, rounded once.
        kept = fuzz_norm.keep_factor(drawn)
        stored = (named["x"].double() * kept + named["residual"].double()).to(named["residual"].dtype)
    return _solution(fuzz_norm.solve(drawn, stored))


def _feed_forward(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    names = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")
    tensors = {name: problem.named[name] for name in names if problem.named.get(name) is not None}
    tensors |= dict(zip(("grad_out",), grads or []))
    keywords = {name: problem.named[name] for name in ("activation", "dropout_p", "dropout_seed") if name in problem.named}
    drawn = fuzz_ffn.Problem(problem.dtype, "zero_mean", tensors, {}, keywords, [])
    return _solution(fuzz_ffn.solve(drawn))


def _cross_entropy(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    """z = x w^T + b, p = softmax(z), loss = logsumexp(z) - sum(q z), q the smoothed target; dz = (p - q) dloss.

    The bound, with r = eps(float32) / eps(dtype), the rounding of what is summed in float32: E(z) = r (|x| |w|^T + |b|). It moves
    the loss of a row by at most its largest E(z); p = exp(z - lse) by E(z) of itself and by the rounding of z, lse and their
    difference, r (|z| + |lse|). The sums carry it on. In a row of the weight's gradient one large term, of the target, is followed
    by many small ones, each of which rounds the whole sum anew: n roundings have a standard deviation of 0.29 sqrt(n), and 5.4 of
    those, for the worst of ten million elements, are c = 8 times sqrt(n) / 5. The bound allows r sqrt(n) / 4.
    """
    named = problem.named
    x, weight, target = named["x"].double(), named["weight"].double(), named["target"]
    bias = torch.zeros(weight.shape[0]) if named.get("bias") is None else named["bias"]
    valid = target != named.get("ignore_index", -100)
    smoothing = named.get("label_smoothing", 0.0)
    r = 1.0 if problem.dtype == torch.float64 else torch.finfo(torch.float32).eps / torch.finfo(problem.dtype).eps
    z = x @ weight.T + bias.double()
    summed = r * (x.abs() @ weight.abs().T + bias.double().abs())
    q = torch.full_like(z, smoothing / z.shape[1])
    q.scatter_add_(1, torch.where(valid, target, 0)[:, None], torch.full((len(z), 1), 1 - smoothing, dtype=torch.float64))
    lse = torch.logsumexp(z, 1)
    moved = summed + r * (z.abs() + lse.abs()[:, None])
    losses = torch.where(valid, lse - (q * z).sum(1), 0.0)
    sizes = torch.where(valid, lse.abs() + (q * z).abs().sum(1), 0.0) * r + torch.where(
        valid, losses.abs() + summed.amax(1), 0.0
    )
    reduction = named.get("reduction", "mean")
    share = 1.0 / valid.sum().double() if reduction == "mean" else torch.ones(())
    stored = torch.float64 if problem.dtype == torch.float64 else torch.float32
    results: dict[str, oracle.Result] = {}

    def put(name: str, value: torch.Tensor, size: torch.Tensor, gradient: bool, dtype: torch.dtype) -> None:
        floor = torch.full_like(size, 2.0**-24 if dtype == torch.float16 else 0.0)
        results[name] = oracle.Result(value, size, floor, gradient, dtype)

    whole = reduction != "none"
    put("loss", (losses * share).sum() if whole else losses, (sizes * share).sum() if whole else sizes, False, stored)
    if grads is None:
        return _solution(results)
    p = torch.softmax(z, 1)
    upstream = (grads[0].double() * share * valid)[:, None] if whole else (grads[0].double() * valid)[:, None]
    dz, size = (p - q) * upstream, (p * (1 + moved) + q) * upstream.abs()
    put("x", dz @ weight, size @ weight.abs(), True, problem.dtype)
    put("weight", dz.T @ x, (1 + r * math.sqrt(len(x)) / 4) * (size.T @ x.abs()), True, problem.dtype)
    if named.get("bias") is not None:
        put("bias", dz.sum(0), size.sum(0), True, named["bias"].dtype)
    return _solution(results)


def _solution(results: dict[str, oracle.Result]) -> oracle.Solution:
    nothing = torch.empty(0)
    return oracle.Solution(results, 1, nothing, nothing)


_SOLVERS: dict[str, Callable[[Problem, list[torch.Tensor] | None], oracle.Solution]] = {
    "attention": _padded,
    "attention_varlen": _packed,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "add_norm": _norm,
    "feed_forward": _feed_forward,
    "linear_cross_entropy": _cross_entropy,
}


def ops() -> tuple[str, ...]:
    """The ops that can be checked: all of them."""
    return tuple(_SOLVERS)
