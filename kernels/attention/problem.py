# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels get: sizes, strides and optional tensors at run time, and what is fixed when they are compiled.

Triton takes a tuple as one argument and an absent tensor in it as a constant, so a kernel has few parameters and no code
for what a problem does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pytransformer.ops._problem.attention import AttentionProblem
from pytransformer.ops.masks import bucket_row
from pytransformer.reference.philox import keep_scale, threshold

from .. import tuned
from .._lang import INTERPRETED, precision
from .configs import INTERPRETER, Config, Listing, config, listing, within

UNBOUNDED = 1 << 29
EIGHT_BITS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class Rows(NamedTuple):
    """Strides of a tensor of rows; the last dimension is contiguous. Packed tensors have batch 0."""

    batch: int
    head: int
    row: int


class Dense(NamedTuple):
    """A mask or bias: strides of (B, Hq, Lq, Lk), 0 where it is broadcast. bool arrives as uint8.

    Without one it is there still, and kernels ask ``data``: Triton 3.6 cannot compare with None a tuple that holds one.
    """

    LAYOUT = True
    data: torch.Tensor | None = None
    batch: int | None = None
    head: int | None = None
    query: int | None = None
    key: int | None = None  # None is 1


class BlockLists(NamedTuple):
    """A block mask as the kernels walk it: for each block of queries, or of keys, a run of entries; see blocks.py.

    Without one it is there still, and kernels ask ``Kind.BLOCK_KEYS``.
    """

    offsets: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    bits: torch.Tensor | None = None  # None: a dense mask is asked
    batch: int = 0  # strides of offsets, 0 where it is broadcast
    head: int = 0
    row: int = 1  # 2 where each list has its end beside its start
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
    """How the keys of a decoded sequence are split: see decode.py."""

    max_rows: int  # a sequence with at most so many rows, queries times heads that share a key head, is decoded
    rows: int  # of the longest sequence, at most max_rows
    splits: int  # of the longest sequence
    min_tiles: int  # of keys to a split
    max_splits: int


class Diagonals(NamedTuple):
    """T5's bias of every head as a row over the distance d = j - i - offset, long enough on both sides for any tile."""

    bias: torch.Tensor  # (Hq, width) float32
    bucket: torch.Tensor  # (width,) int32
    width: int
    zero: int  # where d = 0 is
    d_min: int  # a tile whose first diagonal is below d_min, or above d_max, is taken to be there: its values are the same
    d_max: int


class Pages(NamedTuple):
    """Where keys and values in pages are; see tiles.py, key_pointers."""

    table: torch.Tensor  # (B, width) int32 or int64
    width: int
    count: int  # of the pool


class Scales(NamedTuple):
    """Of keys and values in eight bits: float32, with the strides of one number to each row."""

    key: torch.Tensor
    value: torch.Tensor
    of_key: Rows
    of_value: Rows


class Problem(NamedTuple):
    """One attention problem; see pytransformer.ops.attention.ARGUMENTS."""

    heads: int
    group: int  # query heads to a key head
    num_queries: int  # of every sequence, or of the longest if packed
    num_keys: int
    total_queries: int  # rows of the packed tensors
    total_keys: int
    batch_start: int | None  # counter words of dropout; None is 0
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
    score_scale: float  # scale, times log2 e if scores are kept in base 2
    softcap: float


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for."""

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
    ALIGNED: bool  # key_start is a multiple of 32, so that tiles start at key 0
    KEY_MASK: bool  # a bool mask that hides whole keys
    SOFTCAP: bool
    DROPOUT: bool
    BASE2: bool  # scores are kept in base 2: nothing is added to them
    SPLIT_LSE: bool  # scores may be so large that lse loses the log of the sum: row_max and log2_sum are kept apart
    PRECISION: str
    BUCKETS: int = 0  # of T5, padded to a power of two
    SUM_QUERIES: bool = False  # a gradient has one row for all queries, or one column for all keys
    SUM_KEYS: bool = False
    PACK_GQA: bool = False  # the rows of a tile are the queries of all heads of a key head: decode
    SPLIT_KV: bool = False  # keys are split over programs
    KEYS_FIRST: bool = False  # the rows of a tile are keys, its columns queries
    BLOCK_QUERIES: int = 0  # of a block mask; both 0 without one
    BLOCK_KEYS: int = 0
    DECODE_APART: bool = False  # decoded sequences have a launch of their own
    PAGE_SIZE: int = 0  # keys of a page; 0 without pages
    EIGHT_BITS: int = 0  # keys and values are int8 (1) or float8_e4m3fn (2), which arrives as uint8

    @property
    def GAP(self) -> bool:
        """Whether keys may lie between the global ones and a query's window."""
        return self.GLOBAL and self.LEFT


def capability(device: torch.device) -> int:
    return INTERPRETER if INTERPRETED else 10 * torch.cuda.get_device_capability(device)[0]


def choose(kernel: str, a: AttentionProblem) -> Config:
    """The tile for a kernel and the op's arguments: within a block of a block mask."""
    found = config(
        kernel, capability(a.query.device), padded(max(a.head_dim, a.value_dim)), a.query.element_size(), score_mods=a.by_pair,
        tuned=tuned.table("attention", a.query.device),
    )  # fmt: skip
    if a.key_scale is not None:  # the bits of a tile and what they are widened to take registers: half of most tiles
        stages = 1 if a.query.dtype == torch.float32 else found.stages
        found = replace(found, BM=min(found.BM, 64), BN=min(found.BN, 32), stages=stages)
    queries, keys = block_size(a)
    return within(found, queries, keys, by_keys=kernel.endswith("dkdv")) if keys else found


def listing_of(a: AttentionProblem) -> Listing | None:
    """How the blocks of a dense boolean mask are listed, or None: there is none that must be asked by pair, or it is not worth it."""
    found = listing(capability(a.query.device))
    return found if a.lists_mask(found) else None


def block_size(a: AttentionProblem) -> tuple[int, int]:
    """Queries and keys of a listed block, 0 and 0 where kernels walk no lists."""
    if a.blocks is not None:
        return a.blocks.block_size
    found = listing_of(a)
    return (0, 0) if found is None else (found.block, found.block)


def padded(n: int) -> int:
    """The next power of two, at least 16: what a tile's side has to be."""
    return max(16, 1 << (n - 1).bit_length())


def rows(t: torch.Tensor) -> Rows:
    """Strides of (B, H, L, D), or of packed (total, H, D)."""
    found = strides(t)
    return Rows(*found[:3]) if t.dim() == 4 else Rows(0, found[1], found[0])


def strides(t: torch.Tensor) -> tuple[int, ...]:
    """0 where there is one element, whatever the tensor says: it is never stepped over."""
    return tuple(0 if n == 1 else s for n, s in zip(t.shape, t.stride()))


def lower(a: AttentionProblem) -> Problem:
    """The kernels' view of the op's arguments; of T5's bias only at_tile knows, of lists of blocks only mask_lists.py."""
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
        pages=None if a.page_table is None else Pages(a.page_table, a.page_table.shape[1], a.key.shape[0]),
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
        score_scale=a.scale * (math.log2(math.e) if _base2(a) else 1.0),
        softcap=a.softcap,
    )


def at_tile(a: AttentionProblem, p: Problem, tile: Config) -> Problem:
    """The problem for a kernel with this tile, over which a row of T5's bias has to reach."""
    return p if a.table is None else p._replace(diagonals=_diagonals(a, a.table, tile))


def kind_of(a: AttentionProblem) -> Kind:
    """What to compile for the op's arguments, but for the tile: BM and BN are 0."""
    block_queries, block_keys = block_size(a)
    return Kind(
        D=a.head_dim,
        DV=a.value_dim,
        BD=padded(a.head_dim),
        BDV=padded(a.value_dim),
        BM=0,
        BN=0,
        CAUSAL=a.causal != "none",
        BOTTOM_RIGHT=a.causal == "bottom_right",
        LEFT=a.left >= 0,
        RIGHT=a.right >= 0,
        GLOBAL=a.global_keys > 0,
        GROUPED=a.heads > a.key_heads,
        ALIGNED=a.key_start % 32 == 0,
        KEY_MASK=a.key_padding is not None,
        SOFTCAP=bool(a.softcap),
        DROPOUT=0 < threshold(a.dropout_p) < 65536,
        BASE2=_base2(a),
        SPLIT_LSE=bool(a.added),
        PRECISION=precision(a.query.dtype),
        BUCKETS=0 if a.table is None else padded(a.table.shape[0]),
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=block_keys,
        PAGE_SIZE=0 if a.page_table is None else a.key.shape[2],
        EIGHT_BITS=EIGHT_BITS.get(a.key.dtype, 0),
    )


def scales_of(a: AttentionProblem) -> Scales | None:
    if a.key_scale is None or a.value_scale is None:
        return None
    return Scales(a.key_scale, a.value_scale, Rows(*strides(a.key_scale)), Rows(*strides(a.value_scale)))


def block_lists(a: AttentionProblem, by_keys: bool = False) -> BlockLists:
    """The lists of a block mask by blocks of queries, or by_keys its transpose."""
    b = a.blocks
    if b is None:
        return BlockLists()
    offsets, entries, other = (
        (b.offsets, b.entries, b.key_offsets) if not by_keys else (b.key_offsets, b.key_entries, b.offsets)
    )
    offsets = offsets.contiguous()
    return BlockLists(
        offsets, entries.contiguous(), b.bits.contiguous(), *strides(offsets)[:2],
        num_entries=entries.shape[0], num_partial=b.bits.shape[0], columns=other.shape[2] - 1,
    )  # fmt: skip


def _base2(a: AttentionProblem) -> bool:
    """Nothing is added to scores, nor is their size limited."""
    return not (a.added or a.softcap or a.slopes is not None or a.table is not None)


def dense_of(t: torch.Tensor | None) -> Dense:
    if t is None:
        return Dense()
    return Dense(t.view(torch.uint8) if t.dtype == torch.bool else t, *dense_strides(t))


def dense_strides(t: torch.Tensor) -> tuple[int, int, int, int | None]:
    """Of (B, Hq, Lq, Lk), as Dense has them."""
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
