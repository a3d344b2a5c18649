"""Correctness before speed: nothing is timed that is not inside its bound against float64.

Our backends are held to the bound of `pytransformer.testing`, element by element. Naive code and PyTorch are
peers, not kernels under test, and naive code rounds every intermediate result: they are held to PEER_EPS
roundings of their dtype in the norm of each tensor, or to the bound where that is wider, which a wrong mask
or a lost gradient misses by far.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pytransformer.cli.providers import Outputs, Prepared, Problem
from pytransformer.testing import bounds, oracle

PEER_EPS = 16

# The outputs of each op, by their names in pytransformer.testing; the gradients have their arguments' names.
OUTPUTS = {
    "attention": ("out",),
    "attention_varlen": ("out",),
    "layer_norm": ("y",),
    "rms_norm": ("y",),
    "add_norm": ("normed", "residual_out"),
    "feed_forward": ("y",),
    "linear_cross_entropy": ("loss",),
}


@dataclass(frozen=True)
class Verdict:
    """`errors`: ||error|| / ||exact|| of each tensor. `error`, `bound`: of the tensor nearest to its bound in
    that norm.

    `bound_used`: the largest elementwise error as a share of what is allowed. `wrong`: what is wrong, or
    None.
    """

    errors: Mapping[str, float]
    error: float
    bound: float
    bound_used: float
    wrong: str | None


def upstream(problem: Problem, seed: int) -> list[torch.Tensor]:
    """Gradients to send back through the outputs of the op, the same for every provider."""
    generator = torch.Generator().manual_seed(seed)
    shapes = output_shapes(problem)
    return [torch.randn(shape, generator=generator).to(device=problem.device, dtype=problem.dtype) for shape in shapes]


def output_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """The shape of each of OUTPUTS."""
    named = problem.named
    match problem.case.op:
        case "attention" | "attention_varlen":
            return [(*named["query"].shape[:-1], named["value"].shape[-1])]
        case "add_norm":
            return [tuple(named["x"].shape)] * 2
        case "linear_cross_entropy":
            return [tuple(named["target"].shape) if named.get("reduction") == "none" else ()]
        case _:
            return [tuple(named["x"].shape)]


def gradients(
    problem: Problem, outputs: Outputs, grads: list[torch.Tensor], **keywords: bool
) -> tuple[torch.Tensor | None, ...]:
    """Of every leaf. An output may have a wider dtype than the inputs (a loss), and then so has its gradient."""
    sent = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return torch.autograd.grad(outputs, list(problem.leaves.values()), sent, allow_unused=True, **keywords)


def compute(problem: Problem, prepared: Prepared, grads: list[torch.Tensor] | None) -> dict[str, torch.Tensor | None]:
    """Outputs and, given upstream `grads`, gradients of one provider, by name."""
    found: dict[str, torch.Tensor | None] = {}
    with prepared.context(), torch.set_grad_enabled(grads is not None):
        outputs = prepared.forward()
        if grads is not None:
            found = dict(zip(problem.leaves, gradients(problem, outputs, grads), strict=True))
    return {**dict(zip(OUTPUTS[problem.case.op], (o.detach() for o in outputs), strict=True)), **found}


def judge(problem: Problem, found: Mapping[str, torch.Tensor | None], exact: oracle.Solution, *, peer: bool) -> Verdict:
    """Compares one provider's tensors with the exact `solution` of pytransformer.testing; see the module's
    docstring.
    """
    if peer:  # a peer may return a loss in a narrower dtype than ours
        found = {name: t if t is None else t.to(exact.results[name].dtype) for name, t in found.items()}
    checks = bounds.check(exact, dict(found), problem.dtype)
    errors, shares, wrong = {}, {}, []
    for check in checks:
        result = exact.results[check.name]
        ours = found[check.name]
        ours = torch.zeros_like(result.value) if ours is None else ours
        unit = bounds.rounding(result, problem.dtype)
        allowed = float((check.allowed * torch.finfo(unit).eps * result.S + result.floor).norm())
        size = float(result.value.norm())
        if peer:
            allowed = max(allowed, PEER_EPS * torch.finfo(unit).eps * size)
        scale = size or 1.0  # an exact result of zero: the error itself, and it must be zero too
        error = float((ours.detach().cpu().double() - result.value).norm()) / scale
        errors[check.name] = error
        shares[check.name] = (_share(error, allowed / scale), error, allowed / scale)
        if peer and not error <= allowed / scale:
            wrong.append(f"{check.name} is off by {error:.2g} of its norm, allowed {allowed / scale:.2g}")
        elif not peer and not check.ok:
            wrong.append(str(check))
    _, error, bound = max(shares.values(), key=lambda share: share[0])
    used = max((check.reached / check.allowed for check in checks), default=0.0)
    return Verdict(errors, error, bound, used, "; ".join(wrong) or None)


def _share(error: float, allowed: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / allowed if allowed else (0.0 if error == 0 else math.inf)


def exact(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    """The answer in float64 with its bound, in the shapes of the public op's outputs."""
    return _EXACT[problem.case.op](problem, grads)


def _exact_padded(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
    return oracle.solve(*problem.args, *(grads or []), **problem.kwargs)


def _exact_packed(problem: Problem, grads: list[torch.Tensor] | None) -> oracle.Solution:
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


_EXACT = {"attention": _exact_padded, "attention_varlen": _exact_packed}


def ops() -> tuple[str, ...]:
    """The ops that this version has and that can be checked."""
    from pytransformer.ops._registry import OPS

    return tuple(op for op in _EXACT if op in OPS)
