# SPDX-License-Identifier: Apache-2.0
"""Sinks: a term of each row's softmax denominator, added once after the row's last tile."""

from __future__ import annotations

import math

import torch

from ..reference._attention import above_sinks, sink_logits
from .tile import Grads, Lse, Merged, lse_shares


def add_sinks(merged: Merged, sinks: torch.Tensor) -> None:
    """Add the sink to rows that see a key: lse stays above it, and out shrinks by its share.

    Rows without a visible key stay at -inf.
    """
    sink = sink_logits(sinks, merged.out.dtype)[None, :, None]
    old = merged.lse
    live = old.total > -math.inf
    merged.add(
        torch.zeros_like(merged.out),
        Lse(None, torch.where(live, sink, -math.inf)),
        0,
        merged.out.shape[2],
    )
    shift, rest = merged.lse
    least = above_sinks(sink) if shift is None else above_sinks(sink) - shift
    merged.lse = Lse(shift, torch.where(live, torch.maximum(rest, least), -math.inf))


def lse_of_queries(
    lse: Lse, sinks: torch.Tensor | None, queries: torch.Tensor | None
) -> torch.Tensor:
    """Return the public lse, in which a query without visible keys has its sink only.

    Args:
        queries: bool (B, 1, Lq), None for all True.
    """
    total = lse.total
    if sinks is None:
        return total
    alone = sink_logits(sinks, total.dtype)[None, :, None]
    if queries is not None:
        alone = torch.where(queries, alone, -math.inf)
    return torch.where(total > -math.inf, total, alone)


def sinks_gradient(
    sinks: torch.Tensor,
    lse: Lse,
    out: torch.Tensor,
    grads: Grads,
    queries: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient (Hq,) of the sinks over this rank's rows.

    It is minus the sum of ``exp(sink - lse) (out · d_out - d_lse)``, with d_lse only if no key is
    visible.
    """
    d_out, d_lse = grads
    work = lse.rest.dtype
    live = lse.total > -math.inf
    sink = sink_logits(sinks, work)[None, :, None].expand_as(lse.rest)
    seen = live | (sink > -math.inf) if queries is None else live | ((sink > -math.inf) & queries)
    share = torch.where(live, lse_shares(Lse(None, sink), lse), 1.0)
    delta = torch.zeros_like(lse.rest)
    if d_out is not None:
        delta = torch.where(live, (out.to(work) * d_out.to(work)).sum(-1), 0.0)
    if d_lse is not None:
        delta = delta - d_lse
    return -torch.where(seen, share * delta, 0.0).sum((0, 2))
