"""The exact answer to a benchmark's problem: the float64 oracles of `pytransformer.testing`, in the shapes of the public ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from pytransformer.cli.providers import Problem
from pytransformer.testing import fuzz_cross_entropy, fuzz_ffn, fuzz_norm, oracle

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
    named = problem.named
    tensors = {name: named[name] for name in ("x", "weight", "target", "bias") if named.get(name) is not None}
    tensors |= dict(zip(("grad_out",), grads or []))
    keywords = {name: named[name] for name in ("ignore_index", "label_smoothing", "reduction") if name in named}
    return _solution(
        fuzz_cross_entropy.solve(fuzz_cross_entropy.Problem(problem.dtype, "zero_mean", tensors, {}, keywords, []))
    )


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
