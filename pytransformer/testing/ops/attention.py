# SPDX-License-Identifier: Apache-2.0
"""Attention: named cases and exact results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .. import exact_attention, oracle
from ..case import Builder, Case, Draw, Work, made
from ..kit import Kit
from ..patterns import PATTERNS, Pattern


def _qkv(d: Draw) -> dict[str, Any]:
    return {
        "query": d.normal(d["B"], d["Hq"], d["Lq"], d["D"]),
        "key": d.normal(d["B"], d["Hkv"], d["Lk"], d["D"]),
        "value": d.normal(d["B"], d["Hkv"], d["Lk"], d.shape.get("Dv", d["D"])),
    }


def _attention(**fixed: Any) -> Builder:
    """Return a builder of q, k, v and keywords; a function as keyword gets the Draw."""
    return lambda d: {**_qkv(d), **{k: v(d) if callable(v) else v for k, v in fixed.items()}}


def _alibi(d: Draw) -> Any:
    from pytransformer import AlibiBias

    slopes = 2.0 ** (-8.0 * torch.arange(1, d["Hq"] + 1) / d["Hq"])
    return AlibiBias(slopes.to(d.device))


def _t5(bidirectional: bool) -> Callable[[Draw], Any]:
    def build(d: Draw) -> Any:
        from pytransformer import RelativePositionBias

        return RelativePositionBias(d.normal(32, d["Hq"], dtype=torch.float32), bidirectional, 128)

    return build


def _spread(length: int, batch: int) -> list[int]:
    """Return lengths of a padded batch, evenly spaced from full down to half."""
    return [length - (length // 2) * b // max(batch - 1, 1) for b in range(batch)]


def _lengths(name: str) -> Callable[[Draw], torch.Tensor]:
    return lambda d: torch.tensor(_spread(d[name], d["B"]), device=d.device)


def _segments(name: str) -> Callable[[Draw], torch.Tensor]:
    """Return four documents of about equal size; equal lengths give equal boundaries."""
    return lambda d: (torch.arange(d[name], device=d.device) * 4 // max(d[name], 1)).repeat(
        d["B"], 1
    )


def _random_mask(d: Draw) -> torch.Tensor:
    keep = torch.rand(d["B"], 1, d["Lq"], d["Lk"], generator=d.generator) > 0.2
    keep[..., :1] = True
    return keep.to(d.device)


def _blocks(d: Draw) -> Any:
    """Return full, partial and empty blocks that differ by head.

    The block size is 32, so that tails and small tiles have several, or 128.
    """
    from pytransformer import BlockMask

    size = 128 if d["Lq"] >= 512 else 32
    return BlockMask.from_function(
        lambda b, h, i, j: ((j // size + h) % 3 != 1) & (j <= i) & (i - j < 4 * size), None,
        d["Hq"], d["Lq"], d["Lk"],
        block_size=size, device=d.device,
    )  # fmt: skip


def _left_padding(d: Draw) -> torch.Tensor:
    start = torch.randint(0, d["Lk"] // 2 + 1, (d["B"], 1), generator=d.generator)
    start[:1] = 0
    return (torch.arange(d["Lk"]) >= start)[:, None, None, :].to(d.device)


def _pages(d: Draw) -> dict[str, Any]:
    """Return a padded batch's KV in shuffled pages.

    Rows past the lengths are zero, because peers gather them.
    """
    named, lengths, page_size = _qkv(d), _lengths("Lk")(d), d["page_size"]
    batch, num_pages = d["B"], -(-d["Lk"] // page_size)
    table = torch.randperm(batch * num_pages, generator=d.generator).view(batch, num_pages)
    table = table.to(d.device, torch.int32)
    filled = torch.arange(num_pages * page_size, device=d.device) < lengths[:, None]

    def pool(rows: torch.Tensor) -> torch.Tensor:
        padded = F.pad(rows, (0, 0, 0, num_pages * page_size - d["Lk"]))
        padded = padded.masked_fill(~filled[:, None, :, None], 0.0)
        pages = padded.unflatten(2, (num_pages, page_size)).transpose(1, 2).flatten(0, 1)
        return torch.empty_like(pages).index_copy_(0, table.flatten().long(), pages)

    return {
        **named, "key": pool(named["key"]), "value": pool(named["value"]), "page_table": table,
        "key_lengths": lengths, "causal": "bottom_right",
    }  # fmt: skip


def _packed_pages(d: Draw) -> dict[str, Any]:
    """Return packed queries of unequal length, a chunk of each sequence, over the pages."""
    offsets = torch.tensor(_offsets(d["Lq"], d["B"]))
    query = d.normal(d["B"] * d["Lq"], d["Hq"], d["D"])
    return {
        **_pages(d), "query": query, "cu_seqlens_q": offsets.to(d.device), "cu_seqlens_k": None,
        "max_seqlen_q": int(offsets.diff().max()), "max_seqlen_k": None,
    }  # fmt: skip


def _offsets(length: int, batch: int) -> list[int]:
    """Return row offsets of `batch` packed sequences of increasing length.

    They have batch * length rows in total.
    """
    total, parts = batch * length, batch * (batch + 1) // 2
    return [total * (i * (i + 1) // 2) // parts for i in range(batch + 1)]


def _packed(d: Draw) -> dict[str, Any]:
    cu_q, cu_k = (torch.tensor(_offsets(d[name], d["B"])) for name in ("Lq", "Lk"))
    return {
        "query": d.normal(d["B"] * d["Lq"], d["Hq"], d["D"]),
        "key": d.normal(d["B"] * d["Lk"], d["Hkv"], d["D"]),
        "value": d.normal(d["B"] * d["Lk"], d["Hkv"], d.shape.get("Dv", d["D"])),
        "cu_seqlens_q": cu_q.to(d.device),
        "cu_seqlens_k": cu_k.to(d.device),
        "max_seqlen_q": int(cu_q.diff().max()),
        "max_seqlen_k": int(cu_k.diff().max()),
    }


def _varlen(**fixed: Any) -> Builder:
    return lambda d: {**_packed(d), **{k: v(d) if callable(v) else v for k, v in fixed.items()}}


def _prefix(d: Draw) -> torch.Tensor:
    return d.integers(0, d["Lk"] // 2, d["B"])


def _dense(*dims: str | int) -> Callable[[Draw], torch.Tensor]:
    return lambda d: d.normal(*(d[n] if isinstance(n, str) else n for n in dims))


WINDOW = 32  # visible keys on each side of the diagonal in the window cases


# Share of the Lq * Lk pairs, for Case.flops.
Share = Callable[[Mapping[str, int]], float]


def _all(_: Mapping[str, int]) -> float:
    return 1.0


def _half(_: Mapping[str, int]) -> float:
    return 0.5


def _window_share(s: Mapping[str, int]) -> float:
    return min(1.0, (WINDOW + 1) / max(s["Lk"], 1))


def _padded_share(*names: str) -> Share:
    def share(s: Mapping[str, int]) -> float:
        rows = zip(*(_spread(s[n], s["B"]) for n in names))
        return sum(math.prod(row) for row in rows) / max(s["B"] * math.prod(s[n] for n in names), 1)

    return share


def _packed_share(s: Mapping[str, int]) -> float:
    """Return the share of B * Lq * Lk that the unequal sequences cover."""
    q, k = _offsets(s["Lq"], s["B"]), _offsets(s["Lk"], s["B"])
    pairs = sum((q[i + 1] - q[i]) * (k[i + 1] - k[i]) for i in range(s["B"]))
    return pairs / max(s["B"] * s["Lq"] * s["Lk"], 1)


def _packed_pages_share(s: Mapping[str, int]) -> float:
    """Return the share of B * Lq * Lk, almost all of it visible: a chunk sees all earlier keys."""
    q, k = _offsets(s["Lq"], s["B"]), _spread(s["Lk"], s["B"])
    pairs = sum((q[i + 1] - q[i]) * k[i] for i in range(s["B"]))
    return pairs / max(s["B"] * s["Lq"] * s["Lk"], 1)


def _packed_half(s: Mapping[str, int]) -> float:
    return 0.5 * _packed_share(s)


PADDED: dict[str, tuple[Builder, str, Share]] = {
    "full": (_attention(), "core self_check", _all),
    "causal": (_attention(causal="top_left"), "core causal", _half),
    "causal_bottom_right": (_attention(causal="bottom_right"), "causal", _half),
    "key_padding": (_attention(key_lengths=_lengths("Lk")), "core padding", _padded_share("Lk")),
    "padding": (
        _attention(query_lengths=_lengths("Lq"), key_lengths=_lengths("Lk")),
        "padding",
        _padded_share("Lq", "Lk"),
    ),
    "left_padding": (
        _attention(attn_mask=_left_padding, causal="top_left"),
        "padding mask causal",
        _half,
    ),
    "window": (
        _attention(causal="top_left", window=(WINDOW, 0)),
        "core window causal",
        _window_share,
    ),
    "global_keys": (
        _attention(causal="top_left", window=(WINDOW, 0), global_keys=4),
        "window causal",
        _window_share,
    ),
    "segments": (
        _attention(query_segments=_segments("Lq"), key_segments=_segments("Lk")),
        "segments",
        lambda s: 0.25,
    ),
    "prefix": (_attention(causal="top_left", prefix_lengths=_prefix), "prefix causal", _half),
    "bool_mask": (_attention(attn_mask=_random_mask), "core mask large", _all),
    "blocks": (_attention(attn_mask=_blocks), "apart large", _half),
    "float_mask": (_attention(attn_mask=_dense("B", 1, "Lq", "Lk")), "mask bias_grad", _all),
    "bias": (_attention(bias=_dense(1, "Hq", "Lq", "Lk")), "core bias bias_grad", _all),
    "alibi": (_attention(causal="top_left", bias=_alibi), "bias bias_grad causal", _half),
    "t5_bias": (_attention(bias=_t5(True), scale=1.0), "core bias bias_grad", _all),
    "t5_bias_causal": (
        _attention(bias=_t5(False), scale=1.0, causal="top_left"),
        "bias bias_grad causal",
        _half,
    ),
    "sinks": (
        _attention(sinks=_dense("Hq"), causal="top_left", window=(WINDOW, 0)),
        "sinks window causal",
        _window_share,
    ),
    "softcap": (_attention(softcap=20.0, causal="top_left"), "softcap causal", _half),
    "dropout": (_attention(dropout_p=0.1, dropout_seed=1234), "core dropout", _all),
    "everything": (
        _attention(
            causal="bottom_right",
            window=(WINDOW, 0),
            key_lengths=_lengths("Lk"),
            query_lengths=_lengths("Lq"),
            attn_mask=_random_mask,
            bias=_t5(False),
            softcap=20.0,
            dropout_p=0.1,
            dropout_seed=1234,
        ),
        "causal window padding mask bias bias_grad softcap dropout self_check",
        _window_share,
    ),
}

VARLEN: dict[str, tuple[Builder, str, Share]] = {
    "varlen": (_varlen(), "core varlen", _packed_share),
    "varlen_causal": (_varlen(causal="bottom_right"), "varlen causal", _packed_half),
    "varlen_alibi": (
        _varlen(causal="bottom_right", bias=_alibi),
        "varlen causal bias bias_grad",
        _packed_half,
    ),
    "varlen_sinks": (
        _varlen(causal="bottom_right", sinks=_dense("Hq")),
        "varlen causal sinks",
        _packed_half,
    ),
    "varlen_t5": (_varlen(bias=_t5(True)), "varlen bias bias_grad self_check", _packed_share),
}


DIMS = "B Hq Hkv Lq Lk D"
PLAIN, VARLEN_OP = "attention", "attention_varlen"


def _work(share: Share, s: Mapping[str, int]) -> Work:
    """Return 4 B H Lq Lk D times the share forward, and 2.5 times that backward."""
    dv = s.get("Dv", s["D"])
    flops = 2.0 * s["B"] * s["Hq"] * s["Lq"] * s["Lk"] * (s["D"] + dv) * share(s)
    q, out = s["B"] * s["Hq"] * s["Lq"] * s["D"], s["B"] * s["Hq"] * s["Lq"] * dv
    kv = s["B"] * s["Hkv"] * s["Lk"] * (s["D"] + dv)
    return Work((flops, 2.5 * flops), (q + kv + out, 2 * q + 2 * kv + 2 * out))


# Cases at other shapes: op, builder, tags, share, and the dimensions that differ from the size's.
Changes = Callable[[Mapping[str, int]], dict[str, int]]
PAGES, PACKED_PAGES = "apart forward_only padding", "apart forward_only varlen causal"
RESHAPED: dict[str, tuple[str, Builder, str, Share, Changes]] = {
    "gqa": (PLAIN, _attention(causal="top_left"), "core gqa causal", _half,
        lambda s: {"Hkv": max(1, s["Hq"] // 4)}),
    "cross": (PLAIN, _attention(key_lengths=_lengths("Lk")), "padding cross", _padded_share("Lk"),
        lambda s: {"Lk": 2 * s["Lk"] + 1}),
    "decode": (PLAIN, _attention(causal="bottom_right"), "core decode", _all,
        lambda s: {"Lq": 1, "Lk": 4 * s["Lk"]}),
    "value_dim": (PLAIN, _attention(), "value_dim", _all, lambda s: {"Dv": s["D"] // 2 * 3}),
    "pages": (PLAIN, _pages, PAGES, _padded_share("Lk"), lambda s: {"page_size": 16}),
    "decode_pages": (PLAIN, _pages, PAGES, _padded_share("Lk"),
        lambda s: {"Lq": 1, "Lk": 4 * s["Lk"], "page_size": 16}),
    **{name: (VARLEN_OP, *case, lambda s: {}) for name, case in VARLEN.items()},
    "varlen_pages": (VARLEN_OP, _packed_pages, PACKED_PAGES, _packed_pages_share,
        lambda s: {"page_size": 16}),
}  # fmt: skip


def _of_pattern(pattern: Pattern) -> tuple[Builder, str, Share]:
    """Return a pattern's builder, for Lq = Lk, and the share of blocks that run."""
    builder = _attention(attn_mask=lambda d: pattern.make(d["Lk"], d.device))
    return builder, "apart pattern", lambda s: pattern.share(s["Lk"])


def _cases(size: Mapping[str, int]) -> Iterator[Case]:
    patterns = {name: _of_pattern(pattern) for name, pattern in PATTERNS.items()}
    same: dict[str, Any] = {
        name: (PLAIN, *c, lambda s: {}) for name, c in {**PADDED, **patterns}.items()
    }
    for name, (op, build, tags, share, changes) in {**same, **RESHAPED}.items():
        found = made(name, op, DIMS, size, build, tags, partial(_work, share))
        yield replace(found, shape={**found.shape, **changes(size)})


def _solve(op: str, named: Mapping[str, Any], grads: list[torch.Tensor] | None) -> oracle.Solution:
    return (exact_attention.padded if op == "attention" else exact_attention.packed)(named, grads)


KIT = Kit(
    cases=_cases,
    solve=_solve,
    rows_of=exact_attention.rows_of,
    solve_rows=exact_attention.some_rows,
)
