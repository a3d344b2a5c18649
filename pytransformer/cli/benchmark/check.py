# SPDX-License-Identifier: Apache-2.0
"""Correctness before speed: time only results inside their float64 error bound.

Our backends must meet the elementwise bound of `pytransformer.testing`. Naive code and PyTorch are
peers, not kernels under test, and naive code rounds every intermediate result. Each of their
tensors must be within PEER_EPS roundings of its dtype in the norm, or within the bound if that is
wider. A wrong mask or a lost gradient exceeds this limit by far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pytransformer.cli.providers import Outputs, Prepared, Problem
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds, oracle
from pytransformer.testing.kits import kit_of

PEER_EPS = 16


@dataclass(frozen=True)
class Verdict:
    """The errors of one implementation.

    `errors` is ||error|| / ||exact|| per tensor. `error` and `bound` belong to the tensor nearest
    to its bound in that norm. `bound_used` is the largest elementwise error as a share of its
    bound. `wrong` is the fault, or None.
    """

    errors: Mapping[str, float]
    error: float
    bound: float
    bound_used: float
    wrong: str | None


def upstream(problem: Problem, seed: int, on_device: bool = False) -> list[torch.Tensor]:
    """Return the upstream gradients of the op's outputs, equal for every implementation.

    They are drawn on the CPU by default, or on the device.
    """
    generator = torch.Generator(problem.device if on_device else "cpu").manual_seed(seed)
    drawn = (
        torch.randn(shape, generator=generator, device=generator.device)
        for shape in output_shapes(problem)
    )
    return [t.to(device=problem.device, dtype=problem.dtype) for t in drawn]


def output_shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Return the output shapes of the op from its fake kernel."""
    op = OPS[problem.case.op]
    with torch.no_grad():
        a, _, _ = op.prepare(*problem.args, **problem.kwargs)
        return [tuple(t.shape) for t in op.empty_outputs(a)[: len(op.returned)]]


def gradients(
    problem: Problem, outputs: Outputs, grads: list[torch.Tensor], **keywords: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return every leaf's gradient; it has the outputs' dtype if that is wider (a loss)."""
    sent = [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)]
    return torch.autograd.grad(
        outputs, list(problem.leaves.values()), sent, allow_unused=True, **keywords
    )


def compute(
    problem: Problem, prepared: Prepared, grads: list[torch.Tensor] | None
) -> dict[str, torch.Tensor | None]:
    """Return outputs, written arguments and, given upstream `grads`, gradients, by name."""
    found: dict[str, torch.Tensor | None] = {}
    grads = None if problem.case.forward_only else grads
    with prepared.context(), torch.set_grad_enabled(grads is not None):
        outputs = prepared.forward()
        if grads is not None:
            found = dict(zip(problem.leaves, gradients(problem, outputs, grads), strict=True))
    op = OPS[problem.case.op]
    return {
        **dict(zip(op.returned, (o.detach() for o in outputs), strict=True)),
        **found,
        **op.written(problem.named),
    }


def judge(
    problem: Problem,
    found: Mapping[str, torch.Tensor | None],
    solution: oracle.Solution,
    *,
    peer: bool,
) -> Verdict:
    """Compare one implementation's tensors with the exact `solution`; see the module docstring."""
    if peer:  # a peer may return a loss in a narrower dtype than ours
        found = {
            name: t if t is None else t.to(solution.results[name].dtype)
            for name, t in found.items()
        }
    checks = bounds.check(
        solution, dict(found), problem.dtype, limits=kit_of(problem.case.op).limits
    )
    errors, shares, wrong = {}, {}, []
    for check in checks:
        result = solution.results[check.name]
        ours = found[check.name]
        ours = torch.zeros_like(result.value) if ours is None else ours
        unit = bounds.rounding(result, problem.dtype)
        allowed = float((check.allowed * torch.finfo(unit).eps * result.S + result.floor).norm())
        size = float(result.value.norm())
        if peer:
            allowed = max(allowed, PEER_EPS * torch.finfo(unit).eps * size)
        scale = size or 1.0  # for an exact zero the error itself, which must be zero
        error = float((ours.detach().cpu().double() - result.value).norm()) / scale
        errors[check.name] = error
        shares[check.name] = (_share(error, allowed / scale), error, allowed / scale)
        if peer and not error <= allowed / scale:
            wrong.append(
                f"{check.name} is off by {error:.2g} of its norm, allowed {allowed / scale:.2g}"
            )
        elif not peer and not check.ok:
            wrong.append(str(check))
    _, error, bound = max(shares.values(), key=lambda share: share[0])
    used = max((check.reached / check.allowed for check in checks), default=0.0)
    return Verdict(errors, error, bound, used, "; ".join(wrong) or None)


def _share(error: float, allowed: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / allowed if allowed else (0.0 if error == 0 else math.inf)
