# SPDX-License-Identifier: Apache-2.0
"""Code of attention and attention_varlen that the backends ``triton`` and ``cuda`` share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..._core.op import Op
from ..._core.tensors import looks_at_values
from ..._problem.attention import AttentionProblem

MAX_HEAD_DIM = 256
LARGEST_POSITION = 1 << 28  # sums of four positions fit in 32 bits


def outputs(
    op: Op, a: AttentionProblem, check_values: Callable[[AttentionProblem], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse for the kernels to write.

    Kernels never visit packed rows of no sequence, so these start with 0 and -inf.
    """
    if looks_at_values(a.query.device):
        check_values(a)
    out, lse = op.empty_outputs(a)
    if a.packed:
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse


def gradients(
    op: Op, a: AttentionProblem, wanted: Sequence[bool]
) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor]]:
    """Return the gradients for the kernels to write, as a list and, if needed, by name."""
    results = op.empty_gradients(a, wanted)
    by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
    if a.packed:
        for name in by_name.keys() & {"query", "key", "value"}:
            by_name[name].zero_()
    return results, by_name


def no_pairs(
    op: Op, a: AttentionProblem, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the results of a problem without queries or without keys: out is 0, lse the sink."""
    if a.sinks is not None and lse.numel():
        lse.copy_(op.reference(a)[1])
    else:
        lse.fill_(-math.inf)
    return out.zero_(), lse


def no_pairs_gradients(
    a: AttentionProblem,
    by_name: dict[str, torch.Tensor],
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> None:
    """Write the gradients of :func:`no_pairs`: zeros, except for the sinks' gradient from lse."""
    for result in by_name.values():
        result.zero_()
    if "sinks" in by_name and grad_lse is not None:
        alone = torch.where(lse > -math.inf, grad_lse, 0.0)
        by_name["sinks"].copy_(alone.sum(1) if a.packed else alone.sum((0, 2)))


def why_not_sizes(a: AttentionProblem) -> str | None:
    """Return why the kernels do not support a problem of this size, or None."""
    if (widest := max(a.head_dim, a.value_dim)) > MAX_HEAD_DIM:
        return f"head sizes up to {MAX_HEAD_DIM}, got {widest}"
    rows = max(a.num_queries, a.num_keys)
    if rows + max(a.query_start, a.key_start) >= LARGEST_POSITION:
        return f"positions below {LARGEST_POSITION:,}, got {rows:,} rows"
    return None
