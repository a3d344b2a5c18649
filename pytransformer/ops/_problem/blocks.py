# SPDX-License-Identifier: Apache-2.0
"""Block masks as tensors: lists of full and partial blocks, and the partial blocks' pairs as bits.

The raw op takes these tensors; kernels and the reference read them.
:class:`pytransformer.BlockMask` builds and checks them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SIZES = (32, 64, 128, 256, 512)  # queries or keys of a block
# The raw op's arguments that carry the fields of Blocks, in their order.
BLOCK_TENSORS = (
    "block_offsets",
    "block_entries",
    "key_block_offsets",
    "key_block_entries",
    "block_bits",
)
FULL = -1  # replaces the bits index of a block with all pairs visible


class Blocks(NamedTuple):
    """The tensors of a block mask; their batch and head dimensions are full or 1.

    Attributes:
        offsets: (B, H, query blocks + 1) int32; entries offsets[n] to offsets[n + 1] belong to
            query block n.
        entries: (entries, 2) int32: a key block, ascending, and its index in ``bits``, or FULL.
        key_offsets, key_entries: the transpose: query blocks by key block.
        bits: (partial blocks, queries of a block, keys of a block / 32) int32; bit k of word w is
            key 32 w + k. Pairs beyond the tensors are 0.
    """

    offsets: torch.Tensor
    entries: torch.Tensor
    key_offsets: torch.Tensor
    key_entries: torch.Tensor
    bits: torch.Tensor

    @property
    def block_size(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.bits.shape[1], 32 * self.bits.shape[2]

    @property
    def total(self) -> int:
        """Number of blocks, visible or not, over the batch and head dimensions of the mask."""
        batch, heads, queries = self.offsets.shape
        return batch * heads * (queries - 1) * (self.key_offsets.shape[2] - 1)

    @property
    def share(self) -> float:
        """Share of the blocks that have a visible pair and run; computed from shapes alone."""
        return self.entries.shape[0] / self.total if self.total else 0.0

    @property
    def note(self) -> str:
        rows, keys = self.block_size
        partial = f"{self.bits.shape[0]:,} of them read pair by pair"
        return (
            f"{self.share:.1%} of the {self.total:,} blocks of {rows} x {keys} pairs run, {partial}"
        )


def entry_rows(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flattened (batch, head, query block) and the index of every entry, in order."""
    first, counts = offsets[..., :-1].flatten().long(), offsets.diff(dim=-1).flatten().long()
    rows = torch.repeat_interleave(torch.arange(counts.numel(), device=offsets.device), counts)
    before = counts.cumsum(0) - counts
    return rows, (first - before)[rows] + torch.arange(rows.numel(), device=offsets.device)


def visible_blocks(mask: torch.Tensor, size: int) -> tuple[int, int]:
    """Return (visible blocks of size x size pairs, all blocks) of a bool (B, H, Lq, Lk)."""
    visible, pad = 0, -mask.shape[3] % size
    for rows in mask.split(size, dim=2):
        keys = torch.nn.functional.pad(rows.any(2), (0, pad))
        visible += int(keys.unflatten(-1, (-1, size)).any(-1).sum())
    return visible, mask.shape[0] * mask.shape[1] * -(-mask.shape[2] // size) * -(
        -mask.shape[3] // size
    )


def unpack_bits(words: torch.Tensor) -> torch.Tensor:
    """Return bool (..., 32 n) of int32 (..., n)."""
    return (
        ((words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1)
        .bool()
        .flatten(-2)
    )


def pack_bits(pairs: torch.Tensor) -> torch.Tensor:
    """Return int32 (..., n) of bool (..., 32 n)."""
    weights = 1 << torch.arange(32, dtype=torch.int64, device=pairs.device)
    words = (pairs.unflatten(-1, (-1, 32)).long() * weights).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def visible_block_pairs(
    offsets: torch.Tensor,
    entries: torch.Tensor,
    bits: torch.Tensor,
    rows: torch.Tensor,
    num_keys: int,
) -> torch.Tensor:
    """Return bool (B, H, len(rows), num_keys), the visible pairs of the queries ``rows``.

    B and H are the first dimensions of ``offsets``.
    """
    batch, heads, queries = offsets.shape
    size, width = bits.shape[1], 32 * bits.shape[2]
    columns = -(-num_keys // width)
    state = torch.full(
        (batch * heads * (queries - 1), columns), FULL - 1, dtype=torch.int64, device=offsets.device
    )
    place, entry = entry_rows(offsets)
    state[place, entries[entry, 0].long()] = entries[entry, 1].long()
    # (B, H, rows, columns)
    state = state.view(batch, heads, queries - 1, columns)[:, :, rows // size]
    if bits.shape[0]:
        pairs = unpack_bits(bits[state.clamp_min(0), (rows % size)[:, None]])
    else:
        pairs = torch.zeros(*state.shape, width, dtype=torch.bool, device=offsets.device)
    pairs = torch.where(state[..., None] < 0, state[..., None] == FULL, pairs)
    return pairs.flatten(-2)[..., :num_keys]


def check_blocks(b: Blocks, shape: tuple[int, int, int, int]) -> None:
    """Raise ValueError for any tensor from which a kernel would compute an invalid address."""
    for name, t in b._asdict().items():
        if not isinstance(t, torch.Tensor) or t.dtype != torch.int32:
            raise ValueError(
                f"BlockMask: {name} must be an int32 tensor, got"
                f" {getattr(t, 'dtype', type(t).__name__)}"
            )
        if t.device != b.offsets.device:
            raise ValueError(f"BlockMask: {name} is on {t.device}, offsets on {b.offsets.device}")
    if b.bits.dim() != 3:
        raise ValueError(
            "BlockMask: bits must be (partial blocks, queries, keys / 32), got"
            f" {tuple(b.bits.shape)}"
        )
    rows, keys = b.block_size
    if rows not in SIZES or keys not in SIZES:
        raise ValueError(
            f"BlockMask: the block size must be one or two of {', '.join(map(str, SIZES))}, got"
            f" {b.block_size}"
        )
    down, across = -(-shape[2] // rows), -(-shape[3] // keys)
    for names, offsets, entries, n, columns in (
        (("offsets", "entries"), b.offsets, b.entries, down, across),
        (("key_offsets", "key_entries"), b.key_offsets, b.key_entries, across, down),
    ):
        _check_lists(names, offsets, entries, (*shape[:2], n + 1), columns, b.bits.shape[0])
    if b.entries.shape != b.key_entries.shape:
        raise ValueError(
            f"BlockMask: {b.entries.shape[0]} entries, but {b.key_entries.shape[0]} in the"
            " transpose"
        )


def _check_lists(
    names: tuple[str, str],
    offsets: torch.Tensor,
    entries: torch.Tensor,
    shape: tuple[int, ...],
    columns: int,
    places: int,
) -> None:
    """Raise ValueError unless offsets and entries are valid and ascend."""
    if tuple(offsets.shape) != shape:
        raise ValueError(
            f"BlockMask: {names[0]} must have shape {shape}, got {tuple(offsets.shape)}"
        )
    if entries.dim() != 2 or entries.shape[1] != 2:
        raise ValueError(f"BlockMask: {names[1]} must be (entries, 2), got {tuple(entries.shape)}")
    if offsets.numel() and (
        bool((offsets.diff(dim=-1) < 0).any())
        or int(offsets.min()) < 0
        or int(offsets.max()) > len(entries)
    ):
        raise ValueError(
            f"BlockMask: {names[0]} must rise from 0 to at most {len(entries)}, the number of"
            " entries"
        )
    if not len(entries):
        return
    low, high = entries.amin(0).tolist(), entries.amax(0).tolist()
    if low[0] < 0 or high[0] >= columns:
        raise ValueError(
            f"BlockMask: {names[1]} names block {low[0] if low[0] < 0 else high[0]}; there are"
            f" {columns}"
        )
    if low[1] < FULL or high[1] >= places:
        raise ValueError(
            f"BlockMask: {names[1]} names bits {low[1] if low[1] < FULL else high[1]}; there are"
            f" {places} partial blocks"
        )
    rows, entry = entry_rows(offsets)
    found = entries[entry, 0]
    if bool(((found[1:] <= found[:-1]) & (rows[1:] == rows[:-1])).any()):
        raise ValueError(f"BlockMask: {names[1]} of a list must rise")
