# SPDX-License-Identifier: Apache-2.0
"""Arguments of the attention kernels: ``Problem`` has sizes, strides and optional tensors, which a
launch passes; ``Kind`` has the compile-time constants.

Triton accepts a tuple as one argument and an absent tensor in it as a constant, so a kernel has few
parameters and no code for absent features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pytransformer.ops._problem.attention import AttentionProblem
from pytransformer.ops.masks import bucket_row
from pytransformer.reference.philox import keep_scale, threshold

if TYPE_CHECKING:
    from .configs import Config

UNBOUNDED = 1 << 29
EIGHT_BITS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class Rows(NamedTuple):
    """Strides of a tensor of rows; the last dimension is contiguous. Packed: batch is 0."""

    batch: int
    head: int
    row: int


class Dense(NamedTuple):
    """A mask or bias: strides of (B, Hq, Lq, Lk), 0 in broadcast dimensions. bool is passed as
    uint8.

    Always present, and kernels check ``data``: Triton 3.6 cannot compare a tuple that contains a
    tuple with None.
    """

    LAYOUT = True
    data: torch.Tensor | None = None
    batch: int | None = None
    head: int | None = None
    query: int | None = None
    key: int | None = None  # None is 1


class BlockLists(NamedTuple):
    """A block mask's lists in kernel form: a run of entries per block of queries or keys; see
    mask.py.

    Always present, and kernels check ``Kind.BLOCK_KEYS``.
    """

    offsets: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    bits: torch.Tensor | None = None  # None: kernels read the dense mask
    batch: int = 0  # strides of offsets, 0 in broadcast dimensions
    head: int = 0
    row: int = 1  # 2 if each list stores its end next to its start
    num_entries: int = 0
    num_partial: int = 0
    columns: int = 0  # blocks that an entry may name


class ForwardStrides(NamedTuple):
    LAYOUT = True
    q: Rows
    k: Rows
    v: Rows
    o: Rows


class SplitKV(NamedTuple):
    """Split KV of a decoded sequence: see fwd.py."""

    # Maximum rows (queries times heads that share a key head) of a decoded sequence.
    max_rows: int
    rows: int  # of the longest sequence, at most max_rows
    splits: int  # of the longest sequence
    min_tiles: int  # KV tiles per split
    max_splits: int


class Diagonals(NamedTuple):
    """T5's bias of every head as a row over the distance d = j - i - offset, wide enough on both
    sides for any tile.
    """

    bias: torch.Tensor  # (Hq, width) float32
    bucket: torch.Tensor  # (width,) int32
    width: int
    zero: int  # index of d = 0
    # First diagonals of tiles are clamped to [d_min, d_max]; the bias is constant beyond.
    d_min: int
    d_max: int


class Pages(NamedTuple):
    """Paged keys and values; see tiles.py, load_keys."""

    table: torch.Tensor  # (B, width) int32 or int64
    width: int
    count: int  # pages in the pool


class Scales(NamedTuple):
    """Scales of eight-bit keys and values: float32, with row strides."""

    key: torch.Tensor
    value: torch.Tensor
    of_key: Rows
    of_value: Rows


class Problem(NamedTuple):
    """One attention problem; see pytransformer.ops.attention.ARGUMENTS."""

    heads: int
    group: int  # query heads per key head
    num_queries: int  # per sequence, or of the longest if packed
    num_keys: int
    total_queries: int  # rows of the packed tensors
    total_keys: int
    batch_start: int | None  # Philox counter words of dropout; None is 0
    head_start: int | None
    query_start: int
    key_start: int
    left: int
    right: int
    global_keys: int
    query_lengths: torch.Tensor | None
    key_lengths: torch.Tensor | None
    prefix_lengths: torch.Tensor | None
    cu_queries: torch.Tensor | None
    cu_keys: torch.Tensor | None
    query_segments: torch.Tensor | None
    key_segments: torch.Tensor | None
    pages: Pages | None
    scales: Scales | None
    mask: Dense
    bias: Dense
    blocks: BlockLists
    slopes: torch.Tensor | None
    diagonals: Diagonals | None
    sinks: torch.Tensor | None  # (Hq,) float32
    split_kv: SplitKV | None
    seed: torch.Tensor | None
    threshold: int
    keep_scale: float
    scale: float
    score_scale: float  # scale, times log2 e if scores are in base 2
    softcap: float


@dataclass(frozen=True)
class Kind:
    """Compile-time constants of a kernel."""

    D: int
    DV: int
    BD: int  # D and DV, padded to powers of two
    BDV: int
    BM: int
    BN: int
    CAUSAL: bool
    BOTTOM_RIGHT: bool
    LEFT: bool  # the window ends on this side
    RIGHT: bool
    GLOBAL: bool  # global keys join the window
    GROUPED: bool  # several query heads share a key head
    ALIGNED: bool  # key_start is a multiple of 32, so tiles start at key 0
    KEY_MASK: bool  # a bool mask that hides full keys
    SOFTCAP: bool
    DROPOUT: bool
    BASE2: bool  # scores are in base 2, because nothing is added to them
    SPLIT_LSE: bool  # lse may lose the log of the sum, so row_max and log2_sum are separate
    PRECISION: str
    BUCKETS: int = 0  # of T5, padded to a power of two
    SUM_QUERIES: bool = False  # a gradient has one row for all queries, or one column for all keys
    SUM_KEYS: bool = False
    PACK_GQA: bool = False  # decode: a tile's rows are the queries of all heads of a key head
    SPLIT_KV: bool = False  # keys are split over programs
    KEYS_FIRST: bool = False  # the rows of a tile are keys, its columns queries
    BLOCK_QUERIES: int = 0  # of a block mask; both 0 without one
    BLOCK_KEYS: int = 0
    DECODE_APART: bool = False  # decoded sequences have a separate launch
    PAGE_SIZE: int = 0  # keys per page; 0 without pages
    EIGHT_BITS: int = 0  # keys and values are int8 (1) or float8_e4m3fn (2), which arrives as uint8

    @property
    def FIRST_PART(self) -> int:
        """Return the first range with tiles of a loop over KV tiles: see Steps in mask.py."""
        return 2 if self.BLOCK_KEYS else 0 if self.LEFT or not self.ALIGNED else 1

    @property
    def FIRST_QUERY_PART(self) -> int:
        """Return the first range with tiles of a loop over Q tiles."""
        return 2 if self.BLOCK_KEYS else 0 if self.CAUSAL or self.RIGHT else 1

    @property
    def GAP(self) -> bool:
        """Return True if keys may lie between the global keys and a query's window."""
        return self.GLOBAL and self.LEFT


def padded(n: int) -> int:
    """Return the next power of two, at least 16: the minimum side of a tile."""
    return max(16, 1 << (n - 1).bit_length())


def rows(t: torch.Tensor) -> Rows:
    """Return the strides of (B, H, L, D), or of packed (total, H, D)."""
    found = strides(t)
    return Rows(*found[:3]) if t.dim() == 4 else Rows(0, found[1], found[0])


def strides(t: torch.Tensor) -> tuple[int, ...]:
    """Return the strides; 0 for dimensions of size 1, which are never stepped over."""
    return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride()))


def lower(a: AttentionProblem) -> Problem:
    """Return the kernels' view of the op's arguments, without T5's bias (at_tile) and block lists
    (mask.py).
    """
    mask = a.key_padding
    return Problem(
        heads=a.heads,
        group=a.group,
        num_queries=a.num_queries,
        num_keys=a.num_keys,
        total_queries=a.query.shape[0],
        total_keys=a.key.shape[0],
        batch_start=a.batch_start & 0xFFFFFFFF or None,
        head_start=a.head_start & 0xFFFFFFFF or None,
        query_start=a.query_start,
        key_start=a.key_start,
        left=min(a.left, UNBOUNDED) if a.left >= 0 else UNBOUNDED,
        right=min(a.right, UNBOUNDED) if a.right >= 0 else UNBOUNDED,
        global_keys=min(a.global_keys, UNBOUNDED),
        query_lengths=a.query_lengths,
        key_lengths=a.key_lengths,
        prefix_lengths=a.prefix_lengths,
        query_segments=a.query_segments,
        key_segments=a.key_segments,
        pages=(
            None
            if a.page_table is None
            else Pages(a.page_table, a.page_table.shape[1], a.key.shape[0])
        ),
        scales=scales_of(a),
        cu_queries=a.cu_seqlens_q,
        cu_keys=a.cu_seqlens_k,
        mask=dense_of(a.mask if mask is None else mask),
        bias=dense_of(a.bias),
        blocks=BlockLists(),
        slopes=None if a.slopes is None else a.slopes.float().contiguous(),
        diagonals=None,
        sinks=None if a.sinks is None else a.sinks.float().contiguous(),
        split_kv=None,
        seed=a.dropout_seed,
        threshold=threshold(a.dropout_p),
        keep_scale=keep_scale(a.dropout_p),
        scale=a.scale,
        score_scale=a.scale * (math.log2(math.e) if in_base2(a) else 1.0),
        softcap=a.softcap,
    )


def at_tile(a: AttentionProblem, p: Problem, tile: Config) -> Problem:
    """Return the problem for this tile, which determines the width of T5's bias rows."""
    return p if a.table is None else p._replace(diagonals=_diagonals(a, a.table, tile))


def scales_of(a: AttentionProblem) -> Scales | None:
    if a.key_scale is None or a.value_scale is None:
        return None
    return Scales(
        a.key_scale, a.value_scale, Rows(*strides(a.key_scale)), Rows(*strides(a.value_scale))
    )


def block_lists(a: AttentionProblem, by_keys: bool = False) -> BlockLists:
    """Return a block mask's lists by blocks of queries, or by_keys its transpose."""
    b = a.blocks
    if b is None:
        return BlockLists()
    offsets, entries, other = (
        (b.offsets, b.entries, b.key_offsets)
        if not by_keys
        else (b.key_offsets, b.key_entries, b.offsets)
    )
    offsets = offsets.contiguous()
    return BlockLists(
        offsets, entries.contiguous(), b.bits.contiguous(), *strides(offsets)[:2],
        num_entries=entries.shape[0], num_partial=b.bits.shape[0], columns=other.shape[2] - 1,
    )  # fmt: skip


def in_base2(a: AttentionProblem) -> bool:
    """Return True if nothing is added to scores and softcap is off."""
    return not (a.added or a.softcap or a.slopes is not None or a.table is not None)


def dense_of(t: torch.Tensor | None) -> Dense:
    if t is None:
        return Dense()
    return Dense(t.view(torch.uint8) if t.dtype == torch.bool else t, *dense_strides(t))


def dense_strides(t: torch.Tensor) -> tuple[int, int, int, int | None]:
    """Return the strides of (B, Hq, Lq, Lk) in Dense's form."""
    batch, head, query, key = strides(t)
    return batch, head, query, None if key == 1 else key


def _diagonals(a: AttentionProblem, table: torch.Tensor, tile: Config) -> Diagonals:
    pad = tile.BM + tile.BN
    bucket, before, after = bucket_row(*a.buckets, pad, table.device)
    return Diagonals(
        bias=table.float().t()[:, bucket].contiguous(),
        bucket=bucket,
        width=bucket.shape[0],
        zero=before + pad,
        d_min=-before - tile.BN,
        d_max=after + tile.BM,
    )
