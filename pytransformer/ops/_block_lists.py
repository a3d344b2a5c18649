# SPDX-License-Identifier: Apache-2.0
"""Construction of block masks: evaluation by blocks, combination, lists and their transpose.

One number indexes a block: the flattened (batch, head, query block, key block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ._problem.blocks import FULL, Blocks, entry_rows, pack_bits

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Shape = tuple[int, int, int, int]
PAIRS_AT_ONCE = 1 << 21  # pairs per mask_mod call


def keys_of(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flattened block index, ascending, and the bits index or FULL of every entry."""
    rows, entry = entry_rows(blocks.offsets)
    found = blocks.entries[entry].long()
    return rows * (blocks.key_offsets.shape[2] - 1) + found[:, 0], found[:, 1]


def evaluate(
    mod: MaskMod,
    shape: Shape,
    sizes: tuple[int, int],
    device: torch.device,
    candidates: torch.Tensor | None = None,
    vectorized: bool = False,
) -> Blocks:
    """Return the blocks where ``mod`` is true, evaluated in chunks.

    ``candidates`` restricts the evaluation to these blocks. ``vectorized`` means that ``mod``
    accepts tensors of any shape.
    """
    _, heads, lq, lk = shape
    down, across = counts(lq, lk, sizes)
    function = mod if vectorized else torch.vmap(mod, in_dims=(0, 0, 0, 0))
    count = shape[0] * heads * down * across if candidates is None else candidates.numel()
    at_once = max(1, PAIRS_AT_ONCE // (sizes[0] * sizes[1]))
    kept, places, words, partial = [], [], [], 0
    for first in range(0, count, at_once):
        end = min(count, first + at_once)
        key = (
            torch.arange(first, end, device=device) if candidates is None else candidates[first:end]
        )
        i = (key // across % down * sizes[0])[:, None, None] + torch.arange(
            sizes[0], device=device
        )[:, None]
        j = (key % across * sizes[1])[:, None, None] + torch.arange(sizes[1], device=device)
        exists = (i < lq) & (j < lk)
        h, b = key // across // down % heads, key // across // down // heads
        asked = torch.broadcast_tensors(
            b[:, None, None], h[:, None, None], i.clamp(max=lq - 1), j.clamp(max=lk - 1)
        )
        seen = (
            function(*asked)
            if vectorized
            else function(*(t.reshape(-1) for t in asked)).view(exists.shape)
        )
        if seen.dtype != torch.bool:
            raise TypeError(
                f"BlockMask: mask_mod must return a bool, got {seen.dtype}; compare, as in q >= k"
            )
        seen = seen & exists
        some, whole = seen.flatten(1).any(1), (seen | ~exists).flatten(1).all(1)
        part = some & ~whole
        place = torch.where(part, partial + part.cumsum(0) - 1, FULL)
        partial += int(part.sum())
        kept.append(key[some])
        places.append(place[some])
        words.append(pack_bits(seen[part]))
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    bits = torch.cat(
        [torch.zeros(0, sizes[0], sizes[1] // 32, dtype=torch.int32, device=device), *words]
    )
    return assemble(shape, torch.cat([empty, *kept]), torch.cat([empty, *places]), bits)


def assemble(shape: Shape, keys: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> Blocks:
    """Return the lists of ascending flattened block indices with their bits indices."""
    batch, heads, lq, lk = shape
    down, across = counts(lq, lk, (bits.shape[1], 32 * bits.shape[2]))

    def lists(
        rows: torch.Tensor, columns: torch.Tensor, n: int, place: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ends = (
            torch.bincount(rows, minlength=batch * heads * n)
            .view(batch, heads, n)
            .flatten()
            .cumsum(0)
        )
        first = torch.cat([ends.new_zeros(1), ends])
        offsets = (
            torch.stack([first[m * n : (m + 1) * n + 1] for m in range(batch * heads)])
            if batch * heads
            else first[:0]
        )
        return offsets.view(batch, heads, n + 1).int(), torch.stack([columns, place], 1).int()

    outer, q, k = (
        keys // (down * across) if down * across else keys,
        keys // max(across, 1) % max(down, 1),
        keys % max(across, 1),
    )
    by_key = (outer * across + k) * down + q
    order = by_key.argsort()
    transposed = lists((outer * across + k)[order], q[order], across, places[order])
    return Blocks(*lists(outer * down + q, k, down, places), *transposed, bits)


def part(blocks: Blocks, shape: Shape, heads: range, queries: range, keys: range) -> Blocks:
    """Return the mask of some heads, queries and keys, whose indices start at 0.

    The range may cut blocks. Only blocks that overlap a visible block are evaluated.
    """
    sizes, device = blocks.block_size, blocks.offsets.device
    down, across = counts(shape[2], shape[3], sizes)
    counted, places = keys_of(blocks)
    states = torch.full(
        (shape[0] * shape[1] * down * across,), FULL - 1, dtype=torch.int64, device=device
    )
    states[counted] = places
    words = (
        blocks.bits if blocks.bits.shape[0] else blocks.bits.new_zeros(1, *blocks.bits.shape[1:])
    ).flatten()

    def mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        i, j = i + queries.start, j + keys.start
        outer = b * shape[1] + h + heads.start
        place = states[(outer * down + i // sizes[0]) * across + j // sizes[1]]
        word = (place.clamp_min(0) * sizes[0] + i % sizes[0]) * (sizes[1] // 32) + j % sizes[
            1
        ] // 32
        return torch.where(place < 0, place == FULL, ((words[word] >> (j % 32).int()) & 1).bool())

    of = (shape[0], len(heads), len(queries), len(keys))
    rows, columns = counts(of[2], of[3], sizes)
    outer, q, k = counted // (down * across), counted // across % down, counted % across
    batch, head = outer // shape[1], outer % shape[1] - heads.start
    own = (head >= 0) & (head < of[1])
    touched = []
    for i in _blocks_touched(q, sizes[0], queries.start):
        for j in _blocks_touched(k, sizes[1], keys.start):
            inside = own & (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
            touched.append((((batch * of[1] + head) * rows + i) * columns + j)[inside])
    return evaluate(mod, of, sizes, device, torch.cat(touched).unique(), vectorized=True)


def _blocks_touched(
    block: torch.Tensor, size: int, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and last block of a part from ``start`` on that overlap ``block``."""
    return (block * size - start) // size, (block * size + size - 1 - start) // size


def combine(
    shape: Shape, blocks: Blocks, other_shape: Shape, other: Blocks, how: str
) -> tuple[Shape, Blocks]:
    """Return the shape and blocks of the intersection (``&``) or union (``|``) of two masks."""
    if shape[2:] != other_shape[2:] or blocks.block_size != other.block_size:
        raise ValueError(
            f"BlockMask: {how} of {shape} in blocks of {blocks.block_size} and {other_shape} in"
            f" blocks of {other.block_size}; lengths and block sizes must be equal"
        )
    try:
        batch, heads = torch.broadcast_shapes(shape[:2], other_shape[:2])
    except RuntimeError:
        raise ValueError(
            f"BlockMask: {how} of batch and heads {shape[:2]} and {other_shape[:2]}; each equal"
            " or 1"
        ) from None
    joint = (batch, heads, *shape[2:])
    (keys, places), (more, others) = (
        _broadcast(blocks, shape, batch, heads),
        _broadcast(other, other_shape, batch, heads),
    )
    every = torch.cat([keys, more]).unique()
    mine, theirs = _lookup(every, keys, places), _lookup(every, more, others)
    none = FULL - 1
    if how == "&":
        full, live = (mine == FULL) & (theirs == FULL), (mine != none) & (theirs != none)
    else:
        full, live = (mine == FULL) | (theirs == FULL), torch.ones_like(every, dtype=torch.bool)
    part = live & ~full
    a, b = _words(blocks, mine[part]), _words(other, theirs[part])
    words = a & b if how == "&" else a | b
    exists = _existing(blocks, shape, every[part])
    some, whole = (words != 0).flatten(1).any(1), (words == exists).flatten(1).all(1)
    place = torch.full_like(every, FULL)
    keep = some & ~whole
    place[part] = torch.where(keep, keep.cumsum(0) - 1, torch.where(whole & some, FULL, none))
    place[~live] = none
    shown = place != none
    return joint, assemble(joint, every[shown], place[shown], words[keep])


def _broadcast(
    blocks: Blocks, shape: Shape, batch: int, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entries broadcast to this number of batch elements and heads."""
    keys, places = keys_of(blocks)
    per = (blocks.offsets.shape[2] - 1) * (blocks.key_offsets.shape[2] - 1)
    for size, own, unit in ((heads, shape[1], per), (batch, shape[0], per * heads)):
        if own == 1 < size:
            inner = keys % unit if unit else keys
            keys = (
                inner
                + unit * torch.arange(size, device=keys.device)[:, None]
                + (keys - inner) * size
            ).flatten()
            places = places.repeat(size)
            keys, order = keys.sort()
            places = places[order]
    return keys, places


def _words(blocks: Blocks, places: torch.Tensor) -> torch.Tensor:
    """Return the bits of the entries: ones for full blocks, zeros for absent blocks."""
    words = (
        torch.where(places == FULL, -1, 0)[:, None, None].int().expand(-1, *blocks.bits.shape[1:])
    )
    partial = (places >= 0)[:, None, None]
    return (
        torch.where(partial, blocks.bits[places.clamp_min(0)], words)
        if blocks.bits.shape[0]
        else words
    )


def _existing(blocks: Blocks, shape: Shape, keys: torch.Tensor) -> torch.Tensor:
    """Return the bits of the pairs that lie within the tensors."""
    (rows, width), across = blocks.block_size, blocks.key_offsets.shape[2] - 1
    down = blocks.offsets.shape[2] - 1
    i = (keys // across % down * rows)[:, None] + torch.arange(rows, device=keys.device)
    j = (keys % across * width)[:, None] + torch.arange(width, device=keys.device)
    return pack_bits((i < shape[2])[:, :, None] & (j < shape[3])[:, None])


def counts(lq: int, lk: int, sizes: tuple[int, int]) -> tuple[int, int]:
    return -(-lq // sizes[0]), -(-lk // sizes[1])


def band(
    length: int, left: int, right: int, sizes: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return the flattened indices of the blocks that a band around the diagonal crosses."""
    down, across = counts(length, length, sizes)
    q = torch.arange(down, device=device)
    first = ((q * sizes[0] - left).clamp_min(0)) // sizes[1]
    last = ((q + 1) * sizes[0] - 1 + right).clamp_max(max(length - 1, 0)) // sizes[1]
    number = last - first + 1
    row = torch.repeat_interleave(q, number)
    return (
        row * across
        + first[row]
        + torch.arange(row.numel(), device=device)
        - (number.cumsum(0) - number)[row]
    )


def stripes(
    length: int, stride: int, causal: bool, sizes: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Return the flattened indices of the blocks that a strided mask needs.

    A pair is visible if |i - j| < stride or i - j is a multiple of ``stride``.
    """
    down, across = counts(length, length, sizes)
    apart = (
        torch.arange(down, device=device)[:, None] * sizes[0]
        - torch.arange(across, device=device) * sizes[1]
    )
    least, most = apart - (sizes[1] - 1), apart + (sizes[0] - 1)  # distances within the block
    crossed = ((least < stride) & (most > -stride)) | (most // stride * stride >= least)
    if causal:
        crossed &= most >= 0
    return crossed.flatten().nonzero()[:, 0]


def _lookup(every: torch.Tensor, keys: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return for each of ``every`` its entry of places, or FULL - 1 if it is not a key."""
    found = torch.full_like(every, FULL - 1)
    found[torch.searchsorted(every, keys)] = places
    return found


def block_states(blocks: Blocks) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (query block, key block) of the full and then the partial blocks of the first head."""
    keys, places = keys_of(blocks)
    across = blocks.key_offsets.shape[2] - 1
    first = keys < (blocks.offsets.shape[2] - 1) * across
    for chosen in (places == FULL, places != FULL):
        yield keys[first & chosen] // across, keys[first & chosen] % across
