# SPDX-License-Identifier: Apache-2.0
"""Splits of attention by batch or by heads.

:func:`pytransformer.distributed.ring_attention` splits by the sequence.
"""

from __future__ import annotations

from typing import Any

from .call import Rule, named
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


RULES: dict[str, Rule] = {"attention": attention, "attention_varlen": attention_varlen}
