# SPDX-License-Identifier: Apache-2.0
"""How attention may be split: by batch or by heads. By the sequence it is :func:`pytransformer.distributed.ring_attention`."""

from __future__ import annotations

from typing import Any

from .call import Rule, named
from .ways import Way

BATCH = ("query_lengths", "key_lengths", "prefix_lengths", "query_segments", "key_segments")
OF_HEADS = {"slopes": 0, "table": 1, "sinks": 0}
QKV = ("query", "key", "value")
DROPOUT = (
    "dropout goes by the number of the {}, which every rank would count from 0: use dropout_p=0, or redistribute query, key and value to "
    "Replicate()"
)
BLOCKS = "a block mask lists the blocks of all sequences and heads: give a dense mask, or redistribute to Replicate()"


def _refused(a: Any, of: str) -> str | None:
    if getattr(a, "block_offsets", None) is not None:
        return BLOCKS
    return DROPOUT.format(of) if a.dropout_p else None


def attention(a: Any) -> list[Way]:
    def way(name: str, dim: int, others: dict[str, int], even: frozenset[str] = frozenset()) -> Way:
        dense = {n: dim for n in ("mask", "bias") if getattr(a, n) is not None and getattr(a, n).shape[dim] > 1}
        refused = _refused(a, "sequence" if dim == 0 else "head")
        return Way(name, {**dict.fromkeys(QKV, dim), **dense, **named(others, a)}, (dim, dim), even=even, refused=refused)

    return [way("batch", 0, dict.fromkeys(BATCH, 0)), way("heads", 1, OF_HEADS, frozenset(QKV))]


def attention_varlen(a: Any) -> list[Way]:
    """Packed sequences: query, key and value (total, heads, D), lse (heads, total)."""
    arguments = {**dict.fromkeys(QKV, 1), **named(OF_HEADS, a)}
    return [Way("heads", arguments, (1, 0), even=frozenset(QKV), refused=_refused(a, "head"))]


RULES: dict[str, Rule] = {"attention": attention, "attention_varlen": attention_varlen}
