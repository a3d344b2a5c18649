# SPDX-License-Identifier: Apache-2.0
"""The exact answer to a benchmark's problem: the float64 oracles of `pytransformer.testing`, in the shapes of the public ops."""

from __future__ import annotations

import torch

from pytransformer.cli.providers import Problem
from pytransformer.testing import oracle
from pytransformer.testing.kits import kit_of


def rows_of(problem: Problem) -> torch.Tensor | None:
    """The query rows whose results are compared, of a problem too large to be solved in float64; None: all rows."""
    return kit_of(problem.case.op).rows_of(problem.case.shape, problem.named, problem.seed)


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
        kit = kit_of(problem.case.op)
        if rows is None or kit.solve_rows is None:
            return kit.solve(problem.case.op, here.named, grads)
        return kit.solve_rows(here.named, grads, rows)
