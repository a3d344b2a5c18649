# SPDX-License-Identifier: Apache-2.0
"""Attention in plain PyTorch: the oracle of every backend, and the last fallback.

    s = scale * q·k;  softcap;  + mask, bias, ALiBi, T5
    p = softmax over the visible keys and the sink;  dropout;  out = p @ value

The arithmetic is float32 for float32, bfloat16 and float16 inputs and float64 for float64. The
functions are differentiable to any order. They build the (Lq, Lk) matrices, so memory is quadratic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ..ops._problem.blocks import BLOCK_TENSORS, visible_block_pairs
from ..ops.masks import buckets_of
from .eight_bit import dequantize_kv
from .philox import keep_mask, keep_scale

# Arguments of attention that packed sequences, gathered from pages, do not have.
PADDED_ONLY = (
    *BLOCK_TENSORS,
    "page_table",
    "key_scale",
    "value_scale",
    "mask",
    "bias",
    "prefix_lengths",
    "query_segments",
    "key_segments",
)


def attention_forward(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of the op's arguments; see pytransformer.ops.attention.ARGUMENTS."""
    work = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    if a.key_scale is not None:
        a = dequantized(a)
    if a.page_table is not None:
        a = gathered(a)
    batch, heads, num_queries, _ = a.query.shape
    num_keys = a.key.shape[2]
    group = heads // a.key.shape[1]
    visible = visible_pairs(a)
    live_queries, live_keys = visible.any(-1), visible.any(-2)
    live_keys = live_keys.unflatten(1, (-1, group)).any(2)

    # Read a row without a visible pair as zero, because it may hold NaN.
    query = _select(live_queries[..., None], a.query.to(work))
    key = _select(live_keys[..., None], a.key.to(work)).repeat_interleave(group, 1)
    value = _select(live_keys[..., None], a.value.to(work)).repeat_interleave(group, 1)

    score = scores(a, query, key, visible)
    top = (
        score.detach().amax(-1, keepdim=True) if num_keys else score.new_zeros(*score.shape[:-1], 1)
    )
    sinks = None if a.sinks is None else sink_logits(a.sinks, work)[:, None, None]
    top = top if sinks is None else torch.maximum(top, sinks.detach())
    top = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(score - top)
    total = (
        weight.sum(-1, keepdim=True)
        if sinks is None
        else weight.sum(-1, keepdim=True) + torch.exp(sinks - top)
    )
    total = torch.where(live_queries[..., None], total, 1.0)
    lse = torch.where(live_queries, (top + torch.log(total))[..., 0], -math.inf)
    weight = weight / total
    if sinks is not None:
        lse = _lse_with_sinks(a, lse, live_queries, sinks[..., 0])
    if a.dropout_p:
        keep = keep_mask(
            a.dropout_seed, a.dropout_p, batch, heads, num_queries, num_keys, a.query_start,
            a.key_start, a.head_start, a.batch_start
        )  # fmt: skip
        weight = weight * keep * keep_scale(a.dropout_p)
    out = torch.where(live_queries[..., None], weight @ value, 0.0)
    return out.to(a.query.dtype), lse


def dequantized(a: Any) -> Any:
    """Return the problem with keys and values in float32, including the rows of unused pages."""
    key, value = dequantize_kv(a.key, a.key_scale), dequantize_kv(a.value, a.value_scale)
    return a._replace(key=key, value=value, key_scale=None, value_scale=None)


def gathered(a: Any) -> Any:
    """Return the problem with keys and values gathered from pages, (B, Hkv, Lk, D).

    Rows whose table entry is unused are zero.
    """
    used = a.pages_used
    pages = torch.where(used, a.page_table, 0).to(torch.int64)

    def out_of(pool: torch.Tensor) -> torch.Tensor:
        pool = pool if pool.shape[0] else pool.new_zeros(1, *pool.shape[1:])
        rows = _select(used[..., None, None, None], pool[pages])  # (B, pages, Hkv, page size, D)
        return rows.transpose(1, 2).flatten(2, 3)

    return a._replace(key=out_of(a.key), value=out_of(a.value), page_table=None)


def sink_logits(sinks: torch.Tensor, work: torch.dtype) -> torch.Tensor:
    """Return the sinks (Hq,) as every backend reads them: contiguous, in the dtype of the scores.

    +inf becomes half of the largest number, whose weight is 1 as well.
    """
    return sinks.to(work).clamp(max=torch.finfo(work).max / 2).contiguous()


def above_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """Return the minimum lse of a query that sees a key, one or two ulp above its sink.

    The gap lets lse identify queries without a visible key. A sink of -inf gives -inf.
    """
    finfo, size = torch.finfo(sinks.dtype), sinks.abs()
    return torch.where(sinks == -torch.inf, sinks, sinks + (size * finfo.eps).clamp(min=finfo.tiny))


def _lse_with_sinks(
    a: Any, lse: torch.Tensor, live_queries: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return lse (B, Hq, Lq) raised above the sink for every query that sees a key.

    A query that sees no key gets its sink, and a query past the lengths gets -inf.
    """
    raised = torch.maximum(lse, above_sinks(sinks.detach()))
    i, _, _ = indices(a)
    is_query = True if a.query_lengths is None else i[:, 0] < a.query_lengths[:, None, None]
    alone = torch.where(is_query & (sinks > -math.inf), sinks, -math.inf)
    return torch.where(
        live_queries, lse + torch.where(live_queries, raised - lse, 0.0).detach(), alone
    )


def scores(
    a: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the scores (B, Hq, Lq, Lk) with all terms added, and -inf for invisible pairs.

    query and key are (B, Hq, L, D) in the working precision.
    """
    score = a.scale * (query @ key.transpose(-1, -2))
    if a.softcap:
        score = a.softcap * torch.tanh(score / a.softcap)
    if terms := additive_terms(a, score.dtype, rows):
        score = _saturating_sum([score, *(_select(visible, term) for term in terms)])
    return torch.where(visible, score, -math.inf)


def visible_pairs(a: Any, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return bool (B, Hq, Lq, Lk), true for visible pairs.

    A pair is visible if (causal OR j < prefix) AND window AND lengths AND segments AND mask. A mask
    value of -inf hides the pair.

    ``rows``: absolute indices of the queries, if they are not consecutive.
    """
    batch, heads, num_queries, _ = a.query.shape
    visible = torch.ones(
        batch, heads, num_queries, a.key.shape[2], dtype=torch.bool, device=a.query.device
    )
    for part in visible_parts(a, rows):
        visible = visible & part
    return visible


def visible_parts(
    a: Any, rows: torch.Tensor | None = None, *, causal: bool = True
) -> Iterator[torch.Tensor]:
    """Yield bool tensors that broadcast to (B, Hq, Lq, Lk); a pair is visible if all are true.

    ``causal=False`` omits the causal term.
    """
    i, j, offset = indices(a, rows)
    if a.causal != "none" and causal:
        below = j <= i + offset
        if a.prefix_lengths is not None:
            below = below | (j < _per_batch(a.prefix_lengths))
        yield below
    for bounded, inside in (
        (a.left >= 0, j >= i + offset - a.left),
        (a.right >= 0, j <= i + offset + a.right),
    ):
        if bounded:
            yield inside | (j < a.global_keys)
    if a.query_lengths is not None:
        yield i < _per_batch(a.query_lengths)
    if a.key_lengths is not None:
        yield j < _per_batch(a.key_lengths)
    if a.query_segments is not None:
        yield a.query_segments[:, None, :, None] == a.key_segments[:, None, None, :]
    if a.block_offsets is not None:
        local = (
            torch.arange(a.query.shape[2], device=i.device)
            if rows is None
            else rows - a.query_start
        )
        yield visible_block_pairs(
            a.block_offsets, a.block_entries, a.block_bits, local, a.key.shape[2]
        )
    for dense in (a.mask, a.bias):
        if dense is not None:
            yield dense if dense.dtype == torch.bool else dense.detach() != -math.inf


def indices(
    a: Any, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
    """Return absolute query indices (Lq, 1), key indices (Lk,), and offset (B, 1, 1, 1) or 0."""
    device = a.query.device
    end_i, end_j = a.query_start + a.query.shape[2], a.key_start + a.key.shape[2]
    i = (torch.arange(a.query_start, end_i, device=device) if rows is None else rows)[:, None]
    j = torch.arange(a.key_start, end_j, device=device)
    if a.causal != "bottom_right":
        return i, j, 0
    valid_queries = end_i if a.query_lengths is None else _per_batch(a.query_lengths)
    valid_keys = end_j if a.key_lengths is None else _per_batch(a.key_lengths)
    return i, j, valid_keys - valid_queries


def additive_terms(
    a: Any, work: torch.dtype, rows: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the terms added to the scores, each broadcastable to (B, Hq, Lq, Lk)."""
    limit = torch.finfo(work).max  # finite float64 terms stay finite in float32
    dense = [t for t in (a.mask, a.bias) if t is not None and t.dtype != torch.bool]
    terms = [(t if t.dtype != torch.float64 else t.clamp(-limit, limit)).to(work) for t in dense]
    i, j, offset = indices(a, rows)
    relative = j - i - offset
    if a.slopes is not None:
        terms.append(-a.slopes.to(work)[:, None, None] * relative.abs())
    if a.table is not None:
        bucket = buckets_of(relative, a.table.shape[0], a.bidirectional, a.max_distance)
        bias = a.table.to(work)[bucket]  # (..., Lq, Lk, Hq)
        terms.append(bias.movedim(-1, -3) if bias.dim() == 3 else bias[:, 0].movedim(-1, 1))
    return terms


def _saturating_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum clamped to ±finfo.max, so that finite terms never hide a pair.

    The gradient passes through the clamp. The terms are scaled by 1/8, which is exact and prevents
    overflow.
    """
    first, *more = (term / 8 for term in terms)
    total = sum(more, first)
    limit = torch.finfo(total.dtype).max / 8
    return 8 * (total + (total.clamp(-limit, limit) - total).detach())


def _per_batch(lengths: torch.Tensor) -> torch.Tensor:
    return lengths[:, None, None, None]


def _select(where: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(where, x, 0.0)


def attention_varlen_forward(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute packed attention by padding, so packed equals padded, dropout included."""
    query, query_lengths, rows = _pad(a.query, a.cu_seqlens_q, a.max_seqlen_q)
    if a.page_table is None:
        key, key_lengths, _ = _pad(a.key, a.cu_seqlens_k, a.max_seqlen_k)
        value, _, _ = _pad(a.value, a.cu_seqlens_k, a.max_seqlen_k)
    else:
        a = gathered(a if a.key_scale is None else dequantized(a))
        key, value, key_lengths = a.key, a.value, a.key_lengths
    padded = a._asdict() | dict.fromkeys(PADDED_ONLY)
    padded |= dict(
        query=query, key=key, value=value, query_lengths=query_lengths, key_lengths=key_lengths
    )
    padded |= dict(query_start=0, key_start=0)
    out, lse = attention_forward(SimpleNamespace(**padded))
    return (
        _unpad(out, rows, a.query.shape[0], 0.0),
        _unpad(lse[..., None], rows, a.query.shape[0], -math.inf)[..., 0].T,
    )


def _pad(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the padded rows (B, H, longest, D), the lengths (B,) and the row map (B, longest).

    The row map holds the packed row of each position, or total for padding.
    """
    lengths = cu_seqlens.diff()
    place = torch.arange(longest, device=packed.device)
    rows = torch.where(place < lengths[:, None], cu_seqlens[:-1, None] + place, packed.shape[0])
    return (
        torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])[rows].transpose(1, 2),
        lengths,
        rows,
    )


def _unpad(padded: torch.Tensor, rows: torch.Tensor, total: int, fill: float) -> torch.Tensor:
    """Return (total, H, D) from (B, H, longest, D); rows of no sequence get ``fill``."""
    packed = padded.new_full((total + 1, padded.shape[1], padded.shape[3]), fill)
    return packed.index_put((rows,), padded.transpose(1, 2))[:total]
