# SPDX-License-Identifier: Apache-2.0
"""Exact results of a benchmark problem from the float64 oracles of `pytransformer.testing`."""

from __future__ import annotations

import torch

from pytransformer.cli.providers import Problem
from pytransformer.testing import oracle
from pytransformer.testing.kits import kit_of


def rows_of(problem: Problem) -> torch.Tensor | None:
    """Return the query rows to compare if float64 cannot solve the full problem; None for all."""
    return kit_of(problem.case.op).rows_of(problem.case.shape, problem.named, problem.seed)


def upstream_of(rows: torch.Tensor | None, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return upstream gradients that are zero outside `rows`."""
    return (
        grads
        if rows is None
        else [torch.zeros_like(g).index_copy(-2, rows.to(g.device), g[..., rows, :]) for g in grads]
    )


def excerpt(
    problem: Problem, rows: torch.Tensor | None, found: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Return the part of the full results that corresponds to the exact ones of `rows`."""
    if rows is None:
        return found
    picked = {
        name: t[..., rows, :] for name in ("out", "query") if (t := found.get(name)) is not None
    }
    if (d_query := found.get("query")) is not None:
        # Gradients of other rows must be zero; add the remainder to a compared row.
        rest = d_query.index_fill(-2, rows.to(d_query.device), 0.0)
        picked["query"] = picked["query"] + rest.abs().amax(-2, keepdim=True)
    return {**found, **picked}


def solve(
    problem: Problem, grads: list[torch.Tensor] | None, rows: torch.Tensor | None = None
) -> oracle.Solution:
    """Return float64 outputs and, given upstream `grads`, gradients with their bound terms.

    `rows` restricts the solution to some query rows.
    """
    here, grads = problem.on_cpu(), None if grads is None else [g.cpu() for g in grads]
    with torch.no_grad():
        kit = kit_of(problem.case.op)
        if rows is None or kit.solve_rows is None:
            return kit.solve(problem.case.op, here.named, grads)
        return kit.solve_rows(here.named, grads, rows)
