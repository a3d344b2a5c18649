# SPDX-License-Identifier: Apache-2.0
"""Softmax weights of chosen rows and their summaries in linear memory, from a fused call's lse."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from typing_extensions import Unpack

from ..reference._attention import indices, scores, visible_pairs
from ._core.tensors import check_choice, check_tensor, is_sharded, shape_of
from ._core.verification import number
from .attention import attention_op
from .options import MaskAndBias

MASK_AND_BIAS = frozenset(MaskAndBias.__annotations__)
KINDS = ("entropy", "argmax", "column_sum", "distance")
BLOCK_BYTES = 64 << 20  # of one (B, Hq, rows, Lk) float32 matrix of weights


def attention_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    *,
    rows: Sequence[int] | torch.Tensor | None = None,
    heads: Sequence[int] | torch.Tensor | None = None,
    **mask_and_bias_args: Unpack[MaskAndBias],
) -> torch.Tensor:
    """Return the softmax weights ``exp(score - lse)`` of some queries and heads, without dropout.

    Args:
        query, key: the arguments of :func:`pytransformer.attention`.
        lse: (B, Hq, Lq), the result of that call with ``return_lse=True``.
        rows: query indices; None means all, with an (Lq, Lk) matrix per head.
        heads: query-head indices; None means all.
        **mask_and_bias_args: the masks, bias, softcap and scale of that call.

    Returns:
        (B, len(heads), len(rows), Lk), float32 (float64 for float64). A row without a visible key
        is zero.
    """
    a = _arguments("attention_weights", query, key, lse, mask_and_bias_args)
    return _weights(
        a,
        lse,
        _index("rows", rows, query.shape[2], query),
        _index("heads", heads, query.shape[1], query),
    )[0]


def attention_summary(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    *,
    kinds: Sequence[str] = KINDS,
    **mask_and_bias_args: Unpack[MaskAndBias],
) -> dict[str, torch.Tensor]:
    """Return summaries of the softmax weights p in memory linear in Lq and Lk.

    The function processes a block of rows at a time.

    Args:
        query, key, lse, **mask_and_bias_args: as in :func:`attention_weights`.
        kinds: some of

            - ``"entropy"``: -sum_j p log p in nats, (B, Hq, Lq)
            - ``"argmax"``: the first key with the largest weight, or -1 for a row without a visible
              key, (B, Hq, Lq) int64
            - ``"column_sum"``: sum_i p, the total weight of each key, (B, Hq, Lk)
            - ``"distance"``: sum_j p |j - i - offset|, the mean attention distance, (B, Hq, Lq)

    Returns:
        A dict with one entry per kind, float32 (float64 for float64) except argmax. No gradient.
    """
    for kind in kinds:
        check_choice("attention_summary", "kinds", kind, KINDS)
    a = _arguments("attention_summary", query, key, lse, mask_and_bias_args)
    parts: dict[str, list[torch.Tensor]] = {kind: [] for kind in kinds}
    heads = torch.arange(query.shape[1], device=query.device)
    with torch.no_grad():
        for rows in _blocks(a):
            weights, relative = _weights(a, lse, rows, heads)
            for kind in kinds:
                parts[kind].append(_summarise(kind, weights, relative))
        empty = lse.new_zeros(*lse.shape[:2], key.shape[2])
        joined = {
            k: (
                sum(p, empty)
                if k == "column_sum"
                else torch.cat(p, -1)
                if p
                else lse.new_zeros(lse.shape)
            )
            for k, p in parts.items()
        }
        return {k: v.to(torch.int64) if k == "argmax" else v for k, v in joined.items()}


def _summarise(kind: str, weights: torch.Tensor, relative: torch.Tensor) -> torch.Tensor:
    if kind == "entropy":
        return -torch.xlogy(weights, weights).sum(-1)
    if kind == "column_sum":
        return weights.sum(-2)
    if kind == "distance":
        return (weights * relative.abs()).sum(-1)
    top, where = weights.max(-1)
    return torch.where(top > 0, where, -1)


def _arguments(
    op: str, query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, keywords: MaskAndBias
) -> Any:
    if is_sharded((query, key, lse)):
        raise ValueError(
            f"{op}: query, key and lse must be plain tensors: give parts of one placement,"
            " to_local(), or full_tensor()"
        )
    if unknown := sorted(keywords.keys() - MASK_AND_BIAS):
        raise TypeError(
            f"{op}: unknown argument {unknown[0]!r}; it takes {', '.join(sorted(MASK_AND_BIAS))}"
        )
    a, _, _ = attention_op.prepare(query, key, key, **keywords)
    check_tensor(op, "lse", lse, floating=True)
    if lse.shape != query.shape[:3]:
        raise ValueError(
            f"{op}: lse must be (B, Hq, Lq) = {tuple(query.shape[:3])}, got {shape_of(lse)}"
        )
    if a.query_lengths is None:  # chosen rows must not change the alignment
        a = a._replace(
            query_lengths=torch.full((query.shape[0],), query.shape[2], device=query.device)
        )
    return a


def _index(name: str, chosen: Any, size: int, query: torch.Tensor) -> torch.Tensor:
    if chosen is None:
        return torch.arange(size, device=query.device)
    if isinstance(chosen, torch.Tensor):
        check_tensor("attention_weights", name, chosen)
    index = torch.as_tensor(chosen, device=query.device)
    if index.dim() != 1 or (index.numel() and index.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"attention_weights: {name} must be a list of indices, got {chosen!r}")
    if index.numel() and not (-size <= int(index.min()) and int(index.max()) < size):
        raise ValueError(
            f"attention_weights: {name} must be between {-size} and {size - 1}, got {chosen!r}"
        )
    return index.to(torch.int64) % max(size, 1)


def _weights(
    a: Any, lse: torch.Tensor, rows: torch.Tensor, heads: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, j - i - offset) of the chosen rows and heads."""
    work = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    group = a.query.shape[1] // a.key.shape[1]

    def pick(dense: torch.Tensor | None) -> torch.Tensor | None:
        if dense is None:
            return None
        dense = dense if dense.shape[1] == 1 else dense[:, heads]
        return dense if dense.shape[2] == 1 else dense[:, :, rows]

    chosen = a._replace(
        query=a.query[:, heads][:, :, rows].to(work),
        key=a.key[:, heads // group].to(work),
        mask=pick(a.mask),
        block_offsets=(
            a.block_offsets
            if a.block_offsets is None or a.block_offsets.shape[1] == 1
            else a.block_offsets[:, heads]
        ),
        bias=pick(a.bias),
        slopes=None if a.slopes is None else a.slopes[heads],
        table=None if a.table is None else a.table[:, heads],
        query_segments=None if a.query_segments is None else a.query_segments[:, rows],
    )
    visible = visible_pairs(chosen, rows)
    score = scores(chosen, chosen.query, chosen.key, visible, rows)
    sums = lse[:, heads][:, :, rows, None].to(work)
    weights = torch.where(visible & (sums > -torch.inf), torch.exp(score - sums), 0.0)
    i, j, offset = indices(chosen, rows)
    return weights, j - i - offset


def _blocks(a: Any) -> Iterator[torch.Tensor]:
    # A traced graph keeps the block sizes of tracing; an unknown batch size counts as 1.
    per_row = 4 * math.prod(number(n) or 1 for n in (*a.query.shape[:2], a.key.shape[2]))
    rows = torch.arange(a.query.shape[2], device=a.query.device)
    return iter(rows.split(max(1, BLOCK_BYTES // per_row))) if len(rows) else iter(())
