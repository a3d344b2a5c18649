# SPDX-License-Identifier: Apache-2.0
"""Properties of attention's arguments, padded or packed, for backends and kernels.

The arguments of ``attention`` and ``attention_varlen`` are named tuples that inherit these
properties. A packed problem has every field of a padded problem; the fields that packed sequences
do not use are None or 0.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import Self

from .blocks import Blocks, visible_blocks


@dataclass(frozen=True)
class Listing:
    """The conditions under which GPU kernels list the blocks of a dense boolean mask.

    ``block`` is a multiple of every tile. The mask must have at least ``min_blocks`` blocks, and at
    least ``min_pairs`` (sequence, head) pairs must share each of its elements.
    """

    block: int
    min_blocks: int
    min_pairs: int


# The extra pass over the mask reads one byte for ``min_pairs`` pairs of forward: 0.2 ps against
# about 8 x 1 ps on an H200. Two launches, a few microseconds, are negligible for 1,024 x 1,024
# pairs of several heads. Neither is measured.
LISTING = Listing(block=128, min_blocks=64, min_pairs=8)
ALIGN = {"none": 0, "top_left": 1, "bottom_right": 2}
BLOCKS = ("block_offsets", "block_entries", "key_block_offsets", "key_block_entries", "block_bits")


def compact(t: torch.Tensor) -> torch.Tensor:
    """Return a view that has expanded dimensions narrowed to size 1."""
    for d, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[d] > 1:
            t = t.narrow(d, 0, 1)
    return t


@functools.cache
def _names(raw: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in raw._schema.arguments)


def bind(raw: torch._ops.OpOverload, a: AttentionProblem, given: dict[str, Any]) -> list[Any]:
    """Return a raw op's arguments in its order: those of ``given``, else the problem's, by name.

    csrc/common/attention_arguments.h lists the arguments. Slopes, table and sinks are contiguous
    and have the dtype of the scores.
    """
    given = {name: t.to(a.work).contiguous() for name, t in a.by_head.items()} | given
    return [given[name] if name in given else getattr(a, name) for name in _names(raw)]


class AttentionProblem:
    """The lowered arguments of a call; see ARGUMENTS in pytransformer/ops/attention.py."""

    __slots__ = ()
    packed: ClassVar[bool]

    if TYPE_CHECKING:
        query: torch.Tensor
        key: torch.Tensor
        value: torch.Tensor
        mask: torch.Tensor | None
        bias: torch.Tensor | None
        slopes: torch.Tensor | None
        table: torch.Tensor | None
        sinks: torch.Tensor | None
        query_lengths: torch.Tensor | None
        key_lengths: torch.Tensor | None
        prefix_lengths: torch.Tensor | None
        query_segments: torch.Tensor | None
        key_segments: torch.Tensor | None
        cu_seqlens_q: torch.Tensor | None
        cu_seqlens_k: torch.Tensor | None
        dropout_seed: torch.Tensor | None
        block_offsets: torch.Tensor | None
        block_entries: torch.Tensor | None
        key_block_offsets: torch.Tensor | None
        key_block_entries: torch.Tensor | None
        block_bits: torch.Tensor | None
        page_table: torch.Tensor | None
        key_scale: torch.Tensor | None
        value_scale: torch.Tensor | None
        bidirectional: bool
        max_distance: int
        causal: str
        left: int
        right: int
        global_keys: int
        batch_start: int
        head_start: int
        query_start: int
        key_start: int
        scale: float
        softcap: float
        dropout_p: float
        deterministic: bool

        def _replace(self, **changes: Any) -> Self: ...

    # ---- sizes

    @property
    def sequences(self) -> int:
        raise NotImplementedError

    @property
    def num_queries(self) -> int:
        """Number of queries of every sequence, or of the longest."""
        raise NotImplementedError

    @property
    def num_keys(self) -> int:
        raise NotImplementedError

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def key_heads(self) -> int:
        return self.key.shape[1]

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def head_dim(self) -> int:
        return self.query.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.value.shape[-1]

    @property
    def empty(self) -> bool:
        """True without queries or keys; out is 0, and lse is -inf or the sink."""
        return (
            self.query.numel() == 0
            or self.key.numel() == 0
            or 0 in (self.num_queries, self.num_keys)
        )

    @property
    def ragged(self) -> bool:
        """True if sequences may have fewer queries than ``num_queries``."""
        return self.packed or self.query_lengths is not None

    @property
    def pages_used(self) -> torch.Tensor:
        """bool (B, pages), true for entries of page_table that hold a key before key_lengths.

        Only these entries are read.
        """
        assert self.page_table is not None and self.key_lengths is not None
        first_keys = (
            torch.arange(self.page_table.shape[1], device=self.page_table.device)
            * self.key.shape[2]
        )
        return first_keys + self.key_start < self.key_lengths[:, None]

    # ---- visible pairs

    @property
    def align(self) -> int:
        """``causal`` as the integer that kernels read."""
        return ALIGN[self.causal]

    @property
    def bounded(self) -> bool:
        """True if bounds hide pairs or sequences may differ in length; masks do not count."""
        lengths = (self.query_lengths, self.key_lengths, self.cu_seqlens_q)
        return (
            self.causal != "none"
            or self.left >= 0
            or self.right >= 0
            or any(t is not None for t in lengths)
        )

    @property
    def lengths(self) -> tuple[torch.Tensor | None, ...]:
        """Lengths and segments, in the order of every raw op."""
        return (
            self.query_lengths,
            self.key_lengths,
            self.prefix_lengths,
            self.query_segments,
            self.key_segments,
        )

    @property
    def key_padding(self) -> torch.Tensor | None:
        """The mask if it is boolean and equal for all queries, else None.

        The result is a view (B, Hq, 1, Lk) with size 1 in broadcast dimensions. Kernels read it
        once per key; csrc detects the broadcast from strides of 0.
        """
        mask = None if self.mask is None or self.mask.dtype != torch.bool else compact(self.mask)
        return None if mask is None or mask.shape[2] != 1 else mask

    @property
    def mask_by_pair(self) -> torch.Tensor | None:
        """The mask if kernels must read it per (query, key) pair, else None."""
        return None if self.key_padding is not None else self.mask

    @property
    def kind(self) -> str:
        """Return the kind of call, for the table of measured preferences."""
        dense = [
            t for t in (self.bias, self.mask_by_pair) if t is not None and t.dtype != torch.bool
        ]
        signs = (
            ("pages", self.page_table is not None),
            ("one query", not self.packed and self.num_queries == 1),
            ("dropout", bool(self.dropout_p)),
            ("bias", bool(dense)),
            ("t5", self.table is not None),
            ("alibi", self.slopes is not None),
            ("mask", self.mask_by_pair is not None or self.block_offsets is not None),
            ("padding", any(t is not None for t in (self.mask, *self.lengths[:2]))),
            ("window", self.left >= 0 or self.right >= 0),
            ("packed", self.packed),
            ("causal", self.causal != "none"),
        )
        return next((kind for kind, present in signs if present), "full")

    def lists_mask(self, how: Listing) -> bool:
        """Return true if GPU kernels list the blocks of a dense boolean mask first.

        The mask must be read per pair and large enough to repay the pass. Key tiles start at
        absolute multiples of 32 and blocks at the first key, and a tile must not span two blocks.
        """
        mask = self.mask_by_pair
        if mask is None or mask.dtype != torch.bool or self.key_start % 32:
            return False
        shared = self.sequences * self.heads // max(1, math.prod(compact(mask).shape[:2]))
        return self._blocks_of(how.block) >= how.min_blocks and shared >= how.min_pairs

    def lists_bytes(self, how: Listing) -> int:
        """Return the bytes of the block lists, in both directions, and of the block states."""
        if self.mask is None or not self.lists_mask(how):
            return 0
        down, across = (-(-n // how.block) for n in (self.num_queries, self.num_keys))
        return (
            4 * math.prod(compact(self.mask).shape[:2]) * (5 * down * across + 2 * (down + across))
        )

    def lists_note(self, how: Listing) -> str | None:
        """Return the share of a dense mask's blocks that run, for ``explain``; reads the mask."""
        if self.mask is None or self.mask.is_meta or not self.lists_mask(how):
            return None
        visible, total = visible_blocks(
            compact(self.mask).expand(-1, -1, self.num_queries, self.num_keys), how.block
        )
        return (
            f"{visible / total:.1%} of the {total:,} blocks of {how.block} x {how.block} pairs run,"
            " listed by a pass over the mask"
        )

    def _blocks_of(self, size: int) -> int:
        return -(-self.num_queries // size) * -(-self.num_keys // size)

    @property
    def blocks(self) -> Blocks | None:
        """The block mask."""
        found = [t for t in (getattr(self, name) for name in BLOCKS) if t is not None]
        return Blocks(*found) if found else None

    # ---- score_mod

    @property
    def added(self) -> dict[str, torch.Tensor]:
        """Floating mask and bias by name; both are added to the scores, and -inf hides a pair.

        The lse of such a row may lose the log of the row's sum.
        """
        both = (("mask", self.mask), ("bias", self.bias))
        return {name: t for name, t in both if t is not None and t.is_floating_point()}

    @property
    def by_head(self) -> dict[str, torch.Tensor]:
        """Slopes, table and sinks by name, if given."""
        terms = (("slopes", self.slopes), ("table", self.table), ("sinks", self.sinks))
        return {name: t for name, t in terms if t is not None}

    @property
    def by_pair(self) -> int:
        """Number of terms that cost work per (query, key) pair."""
        tensors = (
            self.mask_by_pair,
            self.block_bits,
            self.bias,
            self.slopes,
            self.table,
            self.query_segments,
        )
        return sum(t is not None for t in tensors) + bool(self.softcap) + bool(self.dropout_p)

    @property
    def buckets(self) -> tuple[int, bool, int]:
        """Arguments of masks.bucket_starts for T5's table."""
        assert self.table is not None
        return self.table.shape[0], self.bidirectional, self.max_distance

    @property
    def work(self) -> torch.dtype:
        """Dtype of scores and statistics."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class PaddedAttention(AttentionProblem):
    """Padded tensors: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv).

    With page_table (B, pages) key and value are pools, (num_pages, Hkv, page_size, D). 8-bit key
    and value have scales, views of their first three dimensions.
    """

    __slots__ = ()
    packed = False
    cu_seqlens_q = cu_seqlens_k = None

    @property
    def sequences(self) -> int:
        return self.query.shape[0]

    @property
    def num_queries(self) -> int:
        return self.query.shape[2]

    @property
    def num_keys(self) -> int:
        return self.key.shape[2] * (1 if self.page_table is None else self.page_table.shape[1])


class PackedAttention(AttentionProblem):
    """Packed tensors: query (total_q, Hq, D), key (total_k, Hkv, D), value (total_k, Hkv, Dv).

    Offsets are (B + 1,). With page_table key and value are pools as in PaddedAttention, and
    key_lengths stand in for cu_seqlens_k.
    """

    __slots__ = ()
    packed = True
    block_offsets = block_entries = key_block_offsets = key_block_entries = block_bits = None
    mask = bias = query_lengths = prefix_lengths = query_segments = key_segments = None
    query_start = key_start = 0

    if TYPE_CHECKING:
        cu_seqlens_q: torch.Tensor
        max_seqlen_q: int
        max_seqlen_k: int

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def num_queries(self) -> int:
        return self.max_seqlen_q

    @property
    def num_keys(self) -> int:
        return self.max_seqlen_k
