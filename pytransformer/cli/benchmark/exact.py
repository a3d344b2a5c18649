"""The exact answer to a benchmark's problem: the float64 oracles of `pytransformer.testing`, in the shapes of the public ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from pytransformer.cli.providers import Problem
from pytransformer.testing import fuzz_cross_entropy, fuzz_feed_forward, fuzz_layer_norm, oracle

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


# Pairs of query and key, over all heads, that are compared of a problem that can be compared in part: a second's worth.
PAIRS = 1 << 21
# What a score depends on beside q and k may only be this, for the rows of the problem to be a problem of their own.
_ROWWISE = {"causal", "window", "scale", "softcap", "key_lengths", "query_lengths"}


def rows_of(problem: Problem) -> torch.Tensor | None:
    """The query rows whose results are compared, of attention too large to be solved in float64; None: all rows.

    One row, drawn at random, of each of as many equal stretches, in every head. The upstream gradient is zero elsewhere, so that the
    gradients of all keys and values are the exact ones of these rows, and those of the other queries are zero."""
    shape = problem.case.shape
    if problem.case.op != "attention" or set(problem.kwargs) - _ROWWISE:
        return None
    stretch = -(-shape["B"] * shape["Hq"] * shape["Lq"] * shape["Lk"] // PAIRS)
    if stretch == 1:
        return None
    starts = torch.arange(0, shape["Lq"], stretch)
    drawn = starts + torch.randint(stretch, starts.shape, generator=torch.Generator().manual_seed(problem.seed))
    return drawn.clamp(max=shape["Lq"] - 1)


def upstream_of(rows: torch.Tensor | None, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Upstream gradients that are zero but in `rows`."""
    return grads if rows is None else [torch.zeros_like(g).index_copy(-2, rows.to(g.device), g[..., rows, :]) for g in grads]


def excerpt(
    problem: Problem, rows: torch.Tensor | None, found: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """What of the results of the whole problem is compared with the exact ones of its `rows`."""
    if rows is None:
        return found
    picked = {name: t[..., rows, :] for name in ("out", "query") if (t := found.get(name)) is not None}
    if (d_query := found.get("query")) is not None:
        # The other rows' gradient must be zero: what is left of it goes into a row that is compared.
        rest = d_query.index_fill(-2, rows.to(d_query.device), 0.0)
        picked["query"] = picked["query"] + rest.abs().amax(-2, keepdim=True)
    return {**found, **picked}


def solve(problem: Problem, grads: list[torch.Tensor] | None, rows: torch.Tensor | None = None) -> oracle.Solution:
    """Outputs and, given upstream `grads`, gradients in float64, each with what its bound is made of; of some `rows` of queries."""
    here, grads = problem.on_cpu(), None if grads is None else [g.cpu() for g in grads]
    with torch.no_grad():
        return _SOLVERS[problem.case.op](here, grads) if rows is None else _some_rows(here, grads, rows)


def _some_rows(problem: Problem, grads: list[torch.Tensor] | None, rows: torch.Tensor) -> oracle.Solution:
    from pytransformer.ops._core.registry import OPS
    from pytransformer.reference.attention import visible_pairs

    query, key, value = problem.args
    visible = visible_pairs(OPS["attention"].prepare(query, key, value, **problem.kwargs)[0])
    mask = visible.expand(*visible.shape[:2], query.shape[2], key.shape[2])[..., rows, :]
    terms = {name: problem.kwargs[name] for name in ("scale", "softcap") if name in problem.kwargs}
    return oracle.solve(query[..., rows, :], key, value, *(g[..., rows, :] for g in grads or []), attn_mask=mask, **terms)


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
    results = dict(solution.results)
    for name, side in sides.items():
        if (r := results.get(name)) is not None:
            results[name] = dataclasses.replace(r, value=pack(r.value, side), S=pack(r.S, side), floor=pack(r.floor, side))
    return dataclasses.replace(solution, results=results)


def _norm(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    named = problem.named
    tensors = {name: named[name] for name in ("x", "residual", "weight", "bias") if named.get(name) is not None}
    tensors |= dict(zip(("grad_out", "grad_residual_out"), grads or []))
    keywords: dict[str, Any] = {name: named[name] for name in ("eps", "kind", "dropout_p", "dropout_seed") if name in named}
    drawn = fuzz_layer_norm.Problem(problem.case.op, problem.dtype, 1, "zero_mean", tensors, {}, keywords, [])
    stored = None
    if problem.case.op == "add_norm":
        # The norm is that of the sum as it is stored, rounded once.
        kept = fuzz_layer_norm.keep_factor(drawn)
        stored = (named["x"].double() * kept + named["residual"].double()).to(named["residual"].dtype)
    return _solution(fuzz_layer_norm.solve(drawn, stored))


def _feed_forward(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    names = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")
    tensors = {name: problem.named[name] for name in names if problem.named.get(name) is not None}
    tensors |= dict(zip(("grad_out",), grads or []))
    keywords: dict[str, Any] = {
        name: problem.named[name] for name in ("activation", "dropout_p", "dropout_seed") if name in problem.named
    }
    drawn = fuzz_feed_forward.Problem(problem.dtype, "zero_mean", tensors, {}, keywords, [])
    return _solution(fuzz_feed_forward.solve(drawn))


def _cross_entropy(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    named = problem.named
    tensors = {name: named[name] for name in ("x", "weight", "target", "bias") if named.get(name) is not None}
    tensors |= dict(zip(("grad_out",), grads or []))
    keywords: dict[str, Any] = {
        name: named[name] for name in ("ignore_index", "label_smoothing", "reduction") if name in named
    }
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
