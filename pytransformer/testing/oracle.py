"""Attention in float64, forward and backward written out, with the magnitude of every result.

A second implementation of the semantics of docs/ops/attention.md that shares nothing with
`pytransformer.reference`: dense tensors, explicit gradients instead of autograd, its own Philox and its own
T5 buckets. Slow and quadratic on purpose.

For each result it also returns what an error bound is made of (docs/accuracy.md):

    S       absolute values propagated through the same formula, the amplification of the scores' rounding
    inside floor   what underflow of a probability may add: the least positive normal number times the sums of
    its partners
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Finite scores beyond this in float32 (and likewise in float64) are all alike: base-2 arithmetic saturates
# there.
LN2 = 0.6931471805599453
LOST = 2.0**100  # a term this large swallows the score in float64 as in float32, so its rounding adds nothing


@dataclass(frozen=True)
class Result:
    """One tensor of the answer: its value, S and the underflow floor (all float64), and whether the bound is
    that of a gradient."""

    value: Tensor
    S: Tensor
    floor: Tensor
    gradient: bool
    dtype: torch.dtype  # what a backend returns it in


@dataclass(frozen=True)
class Solution:
    """What `solve` returns: results by name, and the rows of the query and of the key that take part in no
    pair."""

    results: dict[str, Result]
    head_dim: int
    dead_queries: Tensor  # (B, Hq, Lq)
    unseen_keys: Tensor  # (B, Hkv, Lk)


# ---- dropout: Philox-4x32-7 over the layout of DESIGN "Dropout"


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * x, both below 2**32, in int64 arithmetic that cannot overflow."""
    high, low = constant * (x >> 16), constant * (x & 0xFFFF)
    return (high + (low >> 16)) >> 16, (constant * x) & 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = 7) -> tuple[Tensor, ...]:
    """Philox-4x32 (Random123); the counter words are int64 tensors that broadcast, holding 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(rounds):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_factor(seed: int, p: float, batch: int, heads: int, rows: Tensor, columns: Tensor) -> Tensor:
    """(B, H, Lq, Lk) float64: 0 where a weight is dropped, else 1 / (1 - p) with p in steps of 2**-16."""
    threshold = round(65536 * p)
    if threshold in (0, 65536):
        return torch.full((batch, heads, len(rows), len(columns)), 1.0 if threshold == 0 else 0.0, dtype=torch.float64)
    group = 4 * (columns // 32) + (columns % 8) // 2
    slot = 2 * ((columns % 32) // 8) + columns % 2
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    low, high = int(group.min()) if len(group) else 0, int(group.max()) + 1 if len(group) else 0
    counter = (torch.arange(low, high), rows[:, None], h, b)
    words = philox(tuple(torch.broadcast_tensors(*(c & 0xFFFFFFFF for c in counter))), seed)
    draws = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)])  # (8, B, H, Lq, groups)
    kept = draws[slot, ..., group - low].permute(1, 2, 3, 0) >= threshold
    return kept.double() * (65536.0 / (65536 - threshold))


# ---- positions


@functools.lru_cache(maxsize=256)
def _side_buckets(n: int, max_distance: int, distances: int) -> Tensor:
    """Bucket of each distance below `distances` among the n buckets of one direction, in exact integer
    arithmetic."""
    exact = n // 2
    out, k = [], 0
    for d in range(distances):
        if d < exact:
            out.append(d)
            continue
        while k + 1 < n - exact and d ** (n - exact) * exact ** (k + 1) >= max_distance ** (k + 1) * exact ** (n - exact):
            k += 1
        out.append(exact + k)
    return torch.tensor(out, dtype=torch.int64)


def t5_bucket(relative: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Bucket of the relative position key - query - offset."""
    n = buckets // 2 if bidirectional else buckets
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    side = _side_buckets(n, max_distance, int(distance.max()) + 1 if distance.numel() else 1)[distance]
    return side + n * (relative > 0) if bidirectional else side


def _per_sequence(x: Tensor | None, default: int, batch: int) -> Tensor:
    return torch.full((batch,), default) if x is None else x.to("cpu", torch.int64)


def visible_pairs(
    batch: int,
    Lq: int,
    Lk: int,
    *,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    query_lengths: Tensor | None,
    key_lengths: Tensor | None,
    prefix_lengths: Tensor | None,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    query_start: int,
    key_start: int,
) -> tuple[Tensor, Tensor]:
    """((B, 1, Lq, Lk) bool by everything but masks and biases, (B, 1, Lq, Lk) int64 key - query - offset)."""
    lq, lk = (
        _per_sequence(x, default, batch)[:, None, None, None]
        for x, default in ((query_lengths, query_start + Lq), (key_lengths, key_start + Lk))
    )
    i = (query_start + torch.arange(Lq))[:, None]
    j = key_start + torch.arange(Lk)
    offset = lk - lq if causal == "bottom_right" else torch.zeros_like(lk)
    relative = j - i - offset
    visible = (i < lq) & (j < lk)
    if causal is not None:
        before = relative <= 0
        visible = visible & (before if prefix_lengths is None else before | (j < prefix_lengths.cpu()[:, None, None, None]))
    left, right = window or (None, None)
    if left is not None:
        visible = visible & (relative >= -left)
    if right is not None:
        visible = visible & (relative <= right)
    if query_segments is not None and key_segments is not None:
        visible = visible & (query_segments.cpu()[:, None, :, None] == key_segments.cpu()[:, None, None, :])
    return visible, relative


def _reduce_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x.sum_to_size(shape) if x.shape != shape else x


# ---- the answer


def solve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    bias: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,  # changes no value
    query_start: int = 0,
    key_start: int = 0,
) -> Solution:
    """Results "out", "lse" and, given grad_out (grad_lse may be None), gradients by argument name, "slopes"
    and "table".

    Arguments as of `pytransformer.attention`, any dtype; the dtype of `query` is the one whose rounding the
    bound allows.
    """
    dtype = query.dtype
    wide = dtype == torch.float64
    unit, accumulate = torch.finfo(dtype).eps, torch.finfo(torch.float64 if wide else torch.float32)
    ratio = accumulate.eps / unit
    # Exponentials may flush to zero some way before the least normal number: 2**-120 in float32.
    flushed = 64 * accumulate.tiny
    tiny = 2.0**-24 if dtype == torch.float16 else flushed
    saturation = accumulate.max * LN2
    B, Hq, Lq, D = query.shape
    Hkv, Lk = key.shape[1], key.shape[2]
    G = Hq // Hkv
    scale = D**-0.5 if scale is None else scale

    visible, relative = visible_pairs(
        B,
        Lq,
        Lk,
        causal=causal,
        window=window,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        prefix_lengths=prefix_lengths,
        query_segments=query_segments,
        key_segments=key_segments,
        query_start=query_start,
        key_start=key_start,
    )
    visible = visible.expand(B, Hq, Lq, Lk)

    # Additive terms, read only where the pair is visible; -inf hides the pair.
    terms: dict[str, Tensor] = {}
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask.cpu()
    dense = {
        "attn_mask": attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None,
        "bias": bias if isinstance(bias, Tensor) else None,
    }
    for name, term in dense.items():
        if term is not None:
            terms[name] = torch.where(visible, term.detach().cpu().double().expand(B, Hq, Lq, Lk), 0.0)
            shapes[name] = term.shape, term.dtype
            visible = visible & (terms[name] != -torch.inf)
    distance = relative.abs().double()
    if hasattr(bias, "slopes"):
        terms["slopes"] = -bias.slopes.detach().cpu().double()[:, None, None] * distance
        shapes["slopes"] = bias.slopes.shape, bias.slopes.dtype
    if hasattr(bias, "table"):
        bucket = t5_bucket(relative, bias.table.shape[0], bias.bidirectional, bias.max_distance)
        table = bias.table.detach().cpu().double()
        terms["table"] = table.t()[:, bucket].transpose(0, 1).squeeze(2)
        shapes["table"] = bias.table.shape, bias.table.dtype

    # Rows that take part in no pair hold anything and reach nothing.
    dead = ~visible.any(-1)
    unseen = ~visible.reshape(B, Hkv, G * Lq, Lk).any(2) if visible.numel() else torch.ones(B, Hkv, Lk, dtype=torch.bool)

    def rows(x: Tensor, gone: Tensor) -> Tensor:
        return x.detach().cpu().double().masked_fill(gone[..., None], 0.0)

    q, k, v = rows(query, dead), rows(key, unseen), rows(value, unseen)
    kk, vv = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    ka, va, qa = kk.abs(), vv.abs(), q.abs()

    x = scale * (q @ kk.mT)
    a = abs(scale) * (qa @ ka.mT)  # what the rounding of the score is relative to
    if softcap:
        t = torch.tanh(x / softcap)
        slope = 1 - t * t
        slope_S = slope + ratio * (2 * t * t + 2 * t.abs() * slope * a / softcap)
        x = softcap * t
    else:
        slope = slope_S = torch.ones((), dtype=torch.float64)
    for term in terms.values():
        x = x + term
        a = a + torch.where(term.abs() < LOST, term.abs(), 0.0)
    x = x.clamp(-saturation, saturation).masked_fill(~visible, -torch.inf)
    # Maximum and log of the sum apart: in rows of finfo.min their sum has lost the latter.
    top = x.amax(-1) if Lk else torch.full((B, Hq, Lq), -torch.inf, dtype=torch.float64)
    weight = torch.exp(x - top.masked_fill(dead, 0.0)[..., None])
    total = weight.sum(-1).masked_fill(dead, 1.0)
    lse, P = top + total.log(), weight / total[..., None]

    heaviest = a.masked_fill(P == 0, 0.0).amax(-1) if Lk else torch.zeros_like(lse)
    # A probability carries the rounding of its score, and one more eps from the exponential and the
    # normaliser.
    amp = 1 + ratio * (1 + heaviest[..., None])
    M = keep_factor(int(dropout_seed or 0), dropout_p, B, Hq, query_start + torch.arange(Lq), key_start + torch.arange(Lk))
    PM, seen = P * M, visible.double()
    out, out_S = PM @ vv, PM @ va
    results = {
        "out": Result(out, amp * out_S, tiny * ((seen * M) @ va + ~dead[..., None]), False, dtype),
        "lse": Result(
            lse,
            (1 + heaviest + lse.abs().nan_to_num(posinf=0.0)) * ~dead,
            torch.zeros_like(lse),
            False,
            torch.float64 if wide else torch.float32,
        ),
    }
    if grad_out is None:
        return Solution(results, query.shape[-1], dead, unseen)

    do = rows(grad_out, dead)
    doa = do.abs()
    dl = torch.zeros_like(lse) if grad_lse is None else grad_lse.detach().cpu().double().masked_fill(dead, 0.0)
    dP = M * (do @ vv.mT)
    dS = P * (dP - (do * out).sum(-1, keepdim=True) + dl[..., None])
    factor_S = M * (doa @ va.mT) + (doa * out_S).sum(-1, keepdim=True) + dl.abs()[..., None]
    dS_S = amp * P * factor_S
    # Underflow of dS itself, of its weight, and of the output that rowsum(dO * O) is taken from.
    lost = (doa * results["out"].floor).sum(-1, keepdim=True)
    dS_floor = seen * (tiny + flushed * factor_S + P * lost)
    dX, dX_S = dS * slope, dS_S * slope_S

    def per_key(x: Tensor) -> Tensor:
        return x.reshape(B, Hkv, G, Lk, x.shape[-1]).sum(2)

    def gradient(name: str, value: Tensor, S: Tensor, floor: Tensor, kind: torch.dtype) -> None:
        results[name] = Result(value, S, floor, True, kind)

    gradient(
        "query",
        scale * (dX @ kk),
        abs(scale) * (dX_S @ ka),
        abs(scale) * (dS_floor @ ka) + tiny * ~dead[..., None],
        dtype,
    )
    gradient(
        "key",
        per_key(scale * (dX.mT @ q)),
        per_key(abs(scale) * (dX_S.mT @ qa)),
        abs(scale) * per_key(dS_floor.mT @ qa) + tiny * ~unseen[..., None],
        dtype,
    )
    gradient(
        "value",
        per_key(PM.mT @ do),
        per_key((amp * PM).mT @ doa),
        tiny * (per_key((seen * M).mT @ doa) + ~unseen[..., None]),
        dtype,
    )
    parts = (dS, dS_S, dS_floor)
    for name, (shape, kind) in shapes.items():
        if name == "slopes":
            sums = [(y * w).sum((0, 2, 3)) for y, w in zip(parts, (-distance, distance, distance))]
        elif name == "table":
            index = bucket.expand(B, Hq, Lq, Lk).permute(0, 2, 3, 1).reshape(-1, Hq)
            sums = [
                torch.zeros(shape, dtype=torch.float64).scatter_add_(0, index, y.permute(0, 2, 3, 1).reshape(-1, Hq))
                for y in parts
            ]
        else:
            sums = [_reduce_to(y, shape) for y in parts]
        value_of, S_of, floor_of = sums
        gradient(name, value_of, S_of, floor_of, kind)
    return Solution(results, query.shape[-1], dead, unseen)
