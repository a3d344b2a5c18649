# SPDX-License-Identifier: Apache-2.0
"""Splits of each op's calls; cross_entropy.py has those with collectives inside.

- Attention splits by batch or by heads. :func:`pytransformer.distributed.ring_attention` splits by
  the sequence.
- Norms split by any dimension that is not normalized, because sums need full rows.
- The feed-forward network splits by rows of x or by the hidden dimension. The hidden split is
  Megatron's: ``out = sum_r act(x w1_rᵀ) w2_rᵀ``, with one all-reduce in forward and one of the
  gradient of x in backward; b2 is added once. Source: Shoeybi et al., "Megatron-LM" (2019),
  section 3.
- Rotary embedding splits by batch, heads or positions. append_kv accepts local tensors, because a
  cache is local to a rank.
"""

from __future__ import annotations

from typing import Any

from .call import Rule, named, rows_from
from .ways import Start, Way

BATCH = ("query_lengths", "key_lengths", "prefix_lengths", "query_segments", "key_segments")
OF_HEADS = {"slopes": 0, "table": 1, "sinks": 0}
QKV = ("query", "key", "value")
SCALES = ("key_scale", "value_scale")
BLOCKS = (
    "a block mask lists the blocks of all sequences and heads: give a dense mask, or redistribute"
    " to Replicate()"
)


def _starts(a: Any, name: str, dim: int) -> dict[str, Start]:
    """Return the starts for dropout, which depends on the index of the sequence and head."""
    return {name: Start("query", dim)} if a.dropout_p else {}


def attention(a: Any) -> list[Way]:
    def way(name: str, dim: int, others: dict[str, int], even: frozenset[str] = frozenset()) -> Way:
        dense = {
            n: dim
            for n in ("mask", "bias")
            if getattr(a, n) is not None and getattr(a, n).shape[dim] > 1
        }
        arguments = {
            **dict.fromkeys(QKV, dim),
            **dense,
            **named({**others, **dict.fromkeys(SCALES, dim)}, a),
        }
        starts = _starts(a, ("batch_start", "head_start")[dim], dim)
        return Way(
            name,
            arguments,
            (dim, dim),
            even=even,
            starts=starts,
            refused=None if a.block_offsets is None else BLOCKS,
        )

    return [way("batch", 0, dict.fromkeys(BATCH, 0)), way("heads", 1, OF_HEADS, frozenset(QKV))]


def attention_varlen(a: Any) -> list[Way]:
    """Return the splits of packed sequences: q, k, v (total, heads, D) and lse (heads, total)."""
    arguments = {**dict.fromkeys(QKV, 1), **named(OF_HEADS, a)}
    return [
        Way("heads", arguments, (1, 0), even=frozenset(QKV), starts=_starts(a, "head_start", 1))
    ]


def norm(a: Any) -> list[Way]:
    return [Way(f"dimension {d} of x", {"x": d}, (d,)) for d in range(a.x.dim() - a.dims)]


def add_norm(a: Any) -> list[Way]:
    lead = a.x.dim() - a.dims
    rows = [(d, named({"x": d, "residual": d}, a)) for d in range(lead)]
    return [
        Way(f"dimension {d} of x", arguments, (d, d), **rows_from(a, d, lead))
        for d, arguments in rows
    ]


HIDDEN = {"w1": 0, "b1": 0, "w2": 1, "gate_weight": 0, "gate_bias": 0}


def feed_forward(a: Any) -> list[Way]:
    lead = a.x.dim() - 1
    ways = [
        Way(f"dimension {d} of x", {"x": d}, (d,), **rows_from(a, d, lead)) for d in range(lead)
    ]
    starts = {"column_start": Start("w1", 0)} if a.dropout_p else {}
    return [*ways, Way("hidden", named(HIDDEN, a), (None,), once=frozenset({"b2"}), starts=starts)]


def rotary(a: Any) -> list[Way]:
    tables = {name: 0 for name in ("cos", "sin") if getattr(a, name).shape[0] > 1}
    return [
        Way("batch", {"x": 0, **tables}, (0,)),
        Way("heads", {"x": 1}, (1,)),
        Way("positions", {"x": 2, "cos": 1, "sin": 1}, (2,)),
    ]


RULES: dict[str, Rule] = {
    "attention": attention,
    "attention_varlen": attention_varlen,
    "layer_norm": norm,
    "rms_norm": norm,
    "add_norm": add_norm,
    "feed_forward": feed_forward,
    "rotary": rotary,
}
