# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 with explicit gradients, and the magnitude of every result.

This second implementation of docs/ops/attention.md shares nothing with `pytransformer.reference`:
dense tensors, explicit gradients instead of autograd, separate Philox and T5 buckets. It is slow
and quadratic on purpose.

For each result it also returns the terms of the error bound (docs/accuracy.md):

    S       absolute values propagated through the same formula, with the amplification
            of the scores' rounding inside
    floor   the effect of an underflowing probability: the min positive normal number
            times the sums of its partners
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Finite scores beyond this limit in float32 (and likewise in float64) count as equal, because
# base-2 arithmetic saturates there.
LN2 = 0.6931471805599453
# A term this large absorbs the score in float64 as in float32, so its rounding adds nothing.
LOST = 2.0**100


@dataclass(frozen=True)
class Result:
    """One tensor of the solution: value, S, underflow floor (all float64), and the bound's kind."""

    value: Tensor
    S: Tensor
    floor: Tensor
    gradient: bool
    dtype: torch.dtype  # the dtype that a backend returns


@dataclass(frozen=True)
class Solution:
    """The results of `solve` by name, and the query and key rows without a visible pair."""

    results: dict[str, Result]
    head_dim: int
    dead_queries: Tensor  # (B, Hq, Lq)
    unseen_keys: Tensor  # (B, Hkv, Lk)


def exact(results: dict[str, Result]) -> Solution:
    """Return the solution of an op in which every row has a pair."""
    return Solution(results, 1, torch.empty(0), torch.empty(0))


# ---- dropout: Philox-4x32-7 over the layout of DESIGN "Dropout"


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of constant * x, both below 2**32; int64 cannot overflow here."""
    high, low = constant * (x >> 16), constant * (x & 0xFFFF)
    return (high + (low >> 16)) >> 16, (constant * x) & 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = 7
) -> tuple[Tensor, ...]:
    """Compute Philox-4x32 (Random123) on broadcastable int64 counters with 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(rounds):
        high0, low0 = _multiply(0xD2511F53, c0)
        high1, low1 = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_factor(
    seed: int, p: float, batch: int, heads: int, rows: Tensor, columns: Tensor
) -> Tensor:
    """Return (B, H, Lq, Lk) float64: 0 at dropped weights, else 1 / (1 - p).

    p is in steps of 2**-16.
    """
    threshold = round(65536 * p)
    if threshold in (0, 65536):
        return torch.full(
            (batch, heads, len(rows), len(columns)),
            1.0 if threshold == 0 else 0.0,
            dtype=torch.float64,
        )
    group = 4 * (columns // 32) + (columns % 8) // 2
    slot = 2 * ((columns % 32) // 8) + columns % 2
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    low, high = int(group.min()) if len(group) else 0, int(group.max()) + 1 if len(group) else 0
    counter = (torch.arange(low, high), rows[:, None], h, b)
    words = philox(tuple(torch.broadcast_tensors(*(c & 0xFFFFFFFF for c in counter))), seed)
    # (8, B, H, Lq, groups)
    draws = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)])
    kept = draws[slot, ..., group - low].permute(1, 2, 3, 0) >= threshold
    return kept.double() * (65536.0 / (65536 - threshold))


# ---- positions


@functools.lru_cache(maxsize=256)
def _side_buckets(n: int, max_distance: int, distances: int) -> Tensor:
    """Return the bucket of each distance below `distances` in one direction, in exact integers."""
    exact = n // 2
    out, k = [], 0
    for d in range(distances):
        if d < exact:
            out.append(d)
            continue
        while k + 1 < n - exact and d ** (n - exact) * exact ** (k + 1) >= max_distance ** (
            k + 1
        ) * exact ** (n - exact):
            k += 1
        out.append(exact + k)
    return torch.tensor(out, dtype=torch.int64)


def t5_bucket(relative: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """Return the bucket of the relative position key - query - offset."""
    n = buckets // 2 if bidirectional else buckets
    distance = relative.abs() if bidirectional else (-relative).clamp(min=0)
    side = _side_buckets(n, max_distance, int(distance.max()) + 1 if distance.numel() else 1)[
        distance
    ]
    return side + n * (relative > 0) if bidirectional else side


def _per_sequence(x: Tensor | None, default: int, batch: int) -> Tensor:
    return torch.full((batch,), default) if x is None else x.to("cpu", torch.int64)


@dataclass(frozen=True)
class Keywords:
    """The keywords of `pytransformer.attention`, and the indices of the first query and key."""

    attn_mask: Tensor | None = None
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    global_keys: int = 0
    query_lengths: Tensor | None = None
    key_lengths: Tensor | None = None
    prefix_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    bias: Any = None
    sinks: Tensor | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    return_lse: bool = False
    deterministic: bool = True  # does not affect values
    query_start: int = 0
    key_start: int = 0


def visible_pairs(k: Keywords, batch: int, Lq: int, Lk: int) -> tuple[Tensor, Tensor]:
    """Return visibility without masks and biases, and relative positions, both (B, 1, Lq, Lk).

    The relative position is int64 key - query - offset.
    """
    lq, lk = (
        _per_sequence(x, default, batch)[:, None, None, None]
        for x, default in ((k.query_lengths, k.query_start + Lq), (k.key_lengths, k.key_start + Lk))
    )
    i = (k.query_start + torch.arange(Lq))[:, None]
    j = k.key_start + torch.arange(Lk)
    offset = lk - lq if k.causal == "bottom_right" else torch.zeros_like(lk)
    relative = j - i - offset
    visible = (i < lq) & (j < lk)
    if k.causal is not None:
        before = relative <= 0
        prefix = k.prefix_lengths
        visible = visible & (
            before if prefix is None else before | (j < prefix.cpu()[:, None, None, None])
        )
    left, right = k.window or (None, None)
    if left is not None:
        visible = visible & ((relative >= -left) | (j < k.global_keys))
    if right is not None:
        visible = visible & ((relative <= right) | (j < k.global_keys))
    if k.query_segments is not None and k.key_segments is not None:
        visible = visible & (
            k.query_segments.cpu()[:, None, :, None] == k.key_segments.cpu()[:, None, None, :]
        )
    return visible, relative


def _reduce_to(x: Tensor, shape: torch.Size) -> Tensor:
    return x.sum_to_size(shape) if x.shape != shape else x


# ---- the solution


def solve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    **keywords: Any,
) -> Solution:
    """Return "out", "lse" and, given grad_out, gradients by name, with "slopes" and "table".

    grad_lse may be None. Arguments are those of `pytransformer.attention` in any dtype; the bound
    allows the rounding of query's dtype. Block masks are converted to dense masks.
    """
    if (mask := keywords.get("attn_mask")) is not None and not isinstance(mask, Tensor):
        keywords["attn_mask"] = mask.to_dense()
    answer = _Answer(query, key, value, Keywords(**keywords))
    answer.outputs()
    if grad_out is not None:
        answer.gradients(grad_out, grad_lse)
    return Solution(answer.results, query.shape[-1], answer.dead, answer.unseen)


class _Answer:
    """One problem in progress: visibility, terms, scores, outputs, gradients.

    Tensors are (B, Hq, Lq, Lk) float64 unless stated otherwise. The score's rounding is relative to
    `a`, and `amp` is its amplification in a result. A probability has its score's rounding plus one
    eps from the exponential and the normalizer.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, keywords: Keywords) -> None:
        self.k, self.dtype, self.results = keywords, query.dtype, dict[str, Result]()
        self.wide = query.dtype == torch.float64
        accumulate = torch.finfo(torch.float64 if self.wide else torch.float32)
        self.ratio = accumulate.eps / torch.finfo(query.dtype).eps
        # Exponentials may flush to zero above the min normal number: 2**-120 in float32.
        self.flushed = 64 * accumulate.tiny
        self.tiny = 2.0**-24 if query.dtype == torch.float16 else self.flushed
        self.saturation = accumulate.max * LN2
        self.B, self.Hq, self.Lq, D = query.shape
        self.Hkv, self.Lk = key.shape[1], key.shape[2]
        self.G = self.Hq // self.Hkv
        self.shape = (self.B, self.Hq, self.Lq, self.Lk)
        self.scale = D**-0.5 if keywords.scale is None else keywords.scale
        visible, self.relative = visible_pairs(keywords, self.B, self.Lq, self.Lk)
        self.visible = visible.expand(self.shape)
        self.sources: dict[str, Tensor] = {}  # tensors of the additive terms that need gradients
        terms = self._terms()
        # Rows without a visible pair may hold anything and must not affect results.
        self.dead = ~self.visible.any(-1)
        self.unseen = torch.ones(self.B, self.Hkv, self.Lk, dtype=torch.bool)
        if self.visible.numel():
            self.unseen = ~self.visible.reshape(self.B, self.Hkv, self.G * self.Lq, self.Lk).any(2)
        self.q, k, v = _rows(query, self.dead), _rows(key, self.unseen), _rows(value, self.unseen)
        self.kk, self.vv = k.repeat_interleave(self.G, 1), v.repeat_interleave(self.G, 1)
        self._scores(terms)

    def _terms(self) -> list[Tensor]:
        """Return the additive terms, read only at visible pairs; -inf hides the pair."""
        mask, bias = self.k.attn_mask, self.k.bias
        if mask is not None and mask.dtype == torch.bool:
            self.visible, mask = self.visible & mask.cpu(), None
        terms = []
        for name, term in (
            ("attn_mask", mask),
            ("bias", bias if isinstance(bias, Tensor) else None),
        ):
            if term is not None:
                terms.append(
                    torch.where(self.visible, term.detach().cpu().double().expand(self.shape), 0.0)
                )
                self.sources[name] = term
                self.visible = self.visible & (terms[-1] != -torch.inf)
        self.distance = self.relative.abs().double()
        if hasattr(bias, "slopes"):
            terms.append(-bias.slopes.detach().cpu().double()[:, None, None] * self.distance)
            self.sources["slopes"] = bias.slopes
        if hasattr(bias, "table"):
            self.bucket = t5_bucket(
                self.relative, bias.table.shape[0], bias.bidirectional, bias.max_distance
            )
            terms.append(
                bias.table.detach().cpu().double().t()[:, self.bucket].transpose(0, 1).squeeze(2)
            )
            self.sources["table"] = bias.table
        return terms

    def _scores(self, terms: list[Tensor]) -> None:
        x = self.scale * (self.q @ self.kk.mT)
        a = abs(self.scale) * (self.q.abs() @ self.kk.abs().mT)
        self.slope = self.slope_S = torch.ones((), dtype=torch.float64)
        if softcap := self.k.softcap:
            t = torch.tanh(x / softcap)
            self.slope = 1 - t * t
            self.slope_S = self.slope + self.ratio * (
                2 * t * t + 2 * t.abs() * self.slope * a / softcap
            )
            x = softcap * t
        for term in terms:
            x = x + term
            a = a + torch.where(term.abs() < LOST, term.abs(), 0.0)
        x = x.clamp(-self.saturation, self.saturation).masked_fill(~self.visible, -torch.inf)
        # The sink is one more column with value zero.
        sink = self._sink()[..., None]
        x = torch.cat(
            [
                x,
                torch.where(
                    sink == -torch.inf, sink, sink.clamp(-self.saturation, self.saturation)
                ),
            ],
            -1,
        )
        a = torch.cat([a, torch.where(sink.abs() < LOST, sink.abs(), 0.0)], -1)
        # Store row max and log of the sum apart; in rows of finfo.min their sum loses the latter.
        top = x.amax(-1)
        nothing = top == -torch.inf
        weight = torch.exp(x - top.masked_fill(nothing, 0.0)[..., None])
        total = weight.sum(-1).masked_fill(nothing, 1.0)
        P = weight / total[..., None]
        self.lse, self.P, self.sink_P = top + total.log(), P[..., :-1], P[..., -1]
        self.heaviest = a.masked_fill(P == 0, 0.0).amax(-1)
        self.amp = 1 + self.ratio * (1 + self.heaviest[..., None])

    def _sink(self) -> Tensor:
        """Return the sink of each query, (B, Hq, Lq): -inf without a sink or past the lengths."""
        if self.k.sinks is None:
            return torch.full(self.shape[:3], -torch.inf, dtype=torch.float64)
        sinks = self.k.sinks.detach().cpu().double()[:, None].expand(self.shape[:3])
        ends = _per_sequence(self.k.query_lengths, self.k.query_start + self.Lq, self.B)[
            :, None, None
        ]
        return sinks.masked_fill(self.k.query_start + torch.arange(self.Lq) >= ends, -torch.inf)

    def outputs(self) -> None:
        k, seed = self.k, int(self.k.dropout_seed or 0)
        rows, columns = k.query_start + torch.arange(self.Lq), k.key_start + torch.arange(self.Lk)
        self.M = keep_factor(seed, k.dropout_p, self.B, self.Hq, rows, columns)
        self.PM, self.seen = self.P * self.M, self.visible.double()
        self.out, self.out_S = self.PM @ self.vv, self.PM @ self.vv.abs()
        floor = self.tiny * ((self.seen * self.M) @ self.vv.abs() + ~self.dead[..., None])
        self.results["out"] = Result(self.out, self.amp * self.out_S, floor, False, self.dtype)
        S = (1 + self.heaviest + self.lse.abs().nan_to_num(posinf=0.0)) * ~self.dead
        kind = torch.float64 if self.wide else torch.float32
        self.results["lse"] = Result(self.lse, S, torch.zeros_like(self.lse), False, kind)

    def gradients(self, grad_out: Tensor, grad_lse: Tensor | None) -> None:
        do = _rows(grad_out, self.dead)
        doa, ka, va, amp = do.abs(), self.kk.abs(), self.vv.abs(), self.amp
        dl = torch.zeros_like(self.lse)
        if grad_lse is not None:
            dl = grad_lse.detach().cpu().double().masked_fill(self.lse == -torch.inf, 0.0)
        dP = self.M * (do @ self.vv.mT)
        dS = self.P * (dP - (do * self.out).sum(-1, keepdim=True) + dl[..., None])
        factor_S = (
            self.M * (doa @ va.mT) + (doa * self.out_S).sum(-1, keepdim=True) + dl.abs()[..., None]
        )
        dS_S = amp * self.P * factor_S
        # Cover the underflow of dS, of its weight, and of the output in rowsum(dO * O).
        lost = (doa * self.results["out"].floor).sum(-1, keepdim=True)
        dS_floor = self.seen * (self.tiny + self.flushed * factor_S + self.P * lost)
        dX, dX_S = dS * self.slope, dS_S * self.slope_S

        def gradient(name: str, value: Tensor, S: Tensor, floor: Tensor) -> None:
            self.results[name] = Result(value, S, floor, True, self.dtype)

        scale, size, qa, per_key = self.scale, abs(self.scale), self.q.abs(), self._per_key
        floor = size * (dS_floor @ ka) + self.tiny * ~self.dead[..., None]
        gradient("query", scale * (dX @ self.kk), size * (dX_S @ ka), floor)
        floor = size * per_key(dS_floor.mT @ qa) + self.tiny * ~self.unseen[..., None]
        gradient("key", per_key(scale * (dX.mT @ self.q)), per_key(size * (dX_S.mT @ qa)), floor)
        floor = self.tiny * (per_key((self.seen * self.M).mT @ doa) + ~self.unseen[..., None])
        gradient("value", per_key(self.PM.mT @ do), per_key((amp * self.PM).mT @ doa), floor)
        if self.k.sinks is not None:
            delta, delta_S = dl - (do * self.out).sum(-1), (doa * self.out_S).sum(-1) + dl.abs()
            parts = (
                self.sink_P * delta,
                self.sink_P * amp[..., 0] * delta_S,
                self.tiny + self.flushed * delta_S + self.sink_P * lost[..., 0],
            )
            value, S, floor = (part.sum((0, 2)) for part in parts)
            self.results["sinks"] = Result(value, S, floor, True, self.k.sinks.dtype)
        for name, source in self.sources.items():
            value, S, floor = (
                self._sum(name, p, source.shape, i == 0) for i, p in enumerate((dS, dS_S, dS_floor))
            )
            self.results[name] = Result(value, S, floor, True, source.dtype)

    def _per_key(self, x: Tensor) -> Tensor:
        return x.reshape(self.B, self.Hkv, self.G, self.Lk, x.shape[-1]).sum(2)

    def _sum(self, name: str, part: Tensor, shape: torch.Size, is_value: bool) -> Tensor:
        """Reduce the pairs' part of a term's gradient to the shape of its tensor.

        The derivative of ALiBi's term is minus the distance; magnitudes have no sign.
        """
        if name == "slopes":
            return (part * (-self.distance if is_value else self.distance)).sum((0, 2, 3))
        if name == "table":
            index = self.bucket.expand(self.shape).permute(0, 2, 3, 1).reshape(-1, self.Hq)
            sums = torch.zeros(shape, dtype=torch.float64)
            return sums.scatter_add_(0, index, part.permute(0, 2, 3, 1).reshape(-1, self.Hq))
        return _reduce_to(part, shape)


def _rows(x: Tensor, gone: Tensor) -> Tensor:
    return x.detach().cpu().double().masked_fill(gone[..., None], 0.0)
