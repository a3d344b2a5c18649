# SPDX-License-Identifier: Apache-2.0
"""``pt.BlockMask``, the blocks of pairs that attention computes.

See docs/ops/attention-sparse.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import Self

from ._block_lists import (
    MaskMod,
    Shape,
    assemble,
    band,
    block_states,
    combine,
    counts,
    evaluate,
    part,
    stripes,
)
from ._problem.blocks import FULL, SIZES, Blocks, check_blocks, visible_block_pairs

BLOCK_SIZE = {"cuda": 128}  # a tile of the GPU kernels and of FlexAttention
BLOCK_SIZE_ELSEWHERE = 64  # a panel of keys of the CPU kernels
_FLEX = "torch.nn.attention.flex_attention"
_CACHE = "_pytransformer_block_mask"
ROWS, COLUMNS = 16, 32  # maximum number of characters of a picture
SHADES = " ░▒▓█"


class BlockMask:
    """The visible pairs of (B, H, Lq, Lk) by blocks; empty blocks take neither memory nor time.

    A constructor builds the mask once for many calls, which take it as ``attn_mask``. If B or H is
    1, all batch elements or heads share it. A visible block takes 8 bytes, and a partial block one
    more bit per pair.

    ``block_size`` of the constructors is 32, 64, 128, 256 or 512, or a pair for queries and keys if
    the signature accepts one. None means 128 on CUDA and 64 elsewhere.

    Attributes:
        shape: (B, H, Lq, Lk).
        block_size: (queries, keys) of a block.
        blocks: the tensors that the kernels read.
    """

    def __init__(self, shape: Sequence[int], blocks: Blocks) -> None:
        self.shape: Shape = _shape(shape)
        self.blocks = blocks
        check_blocks(blocks, self.shape)

    # ---- constructors

    @classmethod
    def from_dense(
        cls, mask: torch.Tensor, *, block_size: int | tuple[int, int] | None = None
    ) -> Self:
        """Build from a boolean mask (True = attend), (Lq, Lk), (H, Lq, Lk) or (B, H, Lq, Lk)."""
        if (
            not isinstance(mask, torch.Tensor)
            or mask.dtype != torch.bool
            or not 2 <= mask.dim() <= 4
        ):
            what = (
                f"{mask.dtype} of {tuple(mask.shape)}"
                if isinstance(mask, torch.Tensor)
                else type(mask).__name__
            )
            raise ValueError(
                "BlockMask.from_dense: mask must be bool and (Lq, Lk), (H, Lq, Lk) or (B, H, Lq,"
                f" Lk), got {what}"
            )
        mask = mask[(None,) * (4 - mask.dim())]

        def mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            return mask[b, h, i, j]

        shape = _shape(mask.shape)
        return cls(
            shape,
            evaluate(mod, shape, _sizes(block_size, mask.device), mask.device, vectorized=True),
        )

    @classmethod
    def from_function(
        cls,
        mask_mod: MaskMod,
        B: int | None,
        H: int | None,
        Lq: int,
        Lk: int,
        *,
        block_size: int | tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build from ``mask_mod(b, h, q, k)``, which is True if query q attends to key k.

        ``mask_mod`` is as in FlexAttention: its arguments are 0-dimensional integer tensors, and it
        runs under ``torch.vmap``. The function evaluates a few blocks at a time, never (Lq, Lk) at
        once.

        Args:
            B, H: None or 1 if ``mask_mod`` does not depend on b or h.
        """
        shape = _shape((B or 1, H or 1, Lq, Lk))
        return cls(
            shape, evaluate(mask_mod, shape, _sizes(block_size, device), torch.device(device))
        )

    @classmethod
    def sliding_window(
        cls,
        length: int,
        window: tuple[int, int],
        *,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build ``i - window[0] <= j <= i + window[1]``.

        Attention's keyword ``window`` gives the same pairs without a mask; this mask can be
        combined with other masks.
        """
        left, right = _naturals("window", window)
        device, shape = torch.device(device), _shape((1, 1, length, length))
        sizes = _sizes(block_size, device)
        crossed = band(length, left, right, sizes, device)
        mod = lambda b, h, i, j: (j >= i - left) & (j <= i + right)
        return cls(shape, evaluate(mod, shape, sizes, device, crossed, vectorized=True))

    @classmethod
    def strided(
        cls,
        length: int,
        stride: int,
        *,
        causal: bool = True,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build ``|i - j| < stride or (i - j) % stride == 0``.

        Source: Child et al., "Generating long sequences with sparse transformers" (2019), section
        4.2.
        """
        if isinstance(stride, bool) or not isinstance(stride, int) or stride < 1:
            raise ValueError(
                f"BlockMask.strided: stride must be an int of at least 1, got {stride!r}"
            )

        def mod(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
            seen = ((i - j).abs() < stride) | ((i - j) % stride == 0)
            return seen & (j <= i) if causal else seen

        device, shape = torch.device(device), _shape((1, 1, length, length))
        sizes = _sizes(block_size, device)
        crossed = stripes(length, stride, causal, sizes, device)
        return cls(shape, evaluate(mod, shape, sizes, device, crossed, vectorized=True))

    @classmethod
    def longformer(
        cls,
        length: int,
        window: int,
        global_tokens: int | Sequence[int] = 0,
        *,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build ``window // 2`` keys per side plus global tokens, visible to and seeing all tokens.

        Args:
            global_tokens: the number of leading global tokens, or their positions.

        Source: Beltagy et al., "Longformer: the long-document transformer" (2020), section 3.1.
        """
        device, sizes = torch.device(device), _sizes(block_size, device)
        (half,) = (n // 2 for n in _naturals("window", (window,)))
        places = (
            list(range(global_tokens))
            if isinstance(global_tokens, int)
            else [int(n) for n in global_tokens]
        )
        if any(not 0 <= n < length for n in places):
            raise ValueError(
                f"BlockMask.longformer: global_tokens must be between 0 and {length - 1}, got"
                f" {global_tokens!r}"
            )
        is_global = torch.zeros(length, dtype=torch.bool, device=device)
        is_global[torch.tensor(places, dtype=torch.long, device=device)] = True
        down, across = counts(length, length, sizes)
        keys = band(length, half, half, sizes, device)
        rows = torch.tensor(
            sorted({n // sizes[0] for n in places}), dtype=torch.long, device=device
        )
        columns = torch.tensor(
            sorted({n // sizes[1] for n in places}), dtype=torch.long, device=device
        )
        more = [
            rows[:, None] * across + torch.arange(across, device=device),
            torch.arange(down, device=device)[:, None] * across + columns,
        ]
        candidates = torch.cat([keys, *(m.flatten() for m in more)]).unique()
        shape = _shape((1, 1, length, length))
        mod = lambda b, h, i, j: ((i - j).abs() <= half) | is_global[i] | is_global[j]
        return cls(shape, evaluate(mod, shape, sizes, device, candidates, vectorized=True))

    @classmethod
    def big_bird(
        cls,
        length: int,
        *,
        window_blocks: int = 3,
        global_blocks: int = 2,
        random_blocks: int = 3,
        seed: int = 0,
        heads: int = 1,
        block_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Build a mask of full blocks: a band, global blocks and random blocks.

        The band has ``window_blocks`` blocks around the diagonal. The first ``global_blocks`` are
        visible to and see all blocks. Each query block of each head sees ``random_blocks``, drawn
        from ``seed``.

        Source: Zaheer et al., "Big Bird: transformers for longer sequences" (2020), section 2
        (ITC).
        """
        window_blocks, global_blocks, random_blocks = _naturals(
            "blocks", (window_blocks, global_blocks, random_blocks)
        )
        sizes = _sizes(block_size, device)
        down, across = counts(length, length, sizes)
        generator = torch.Generator().manual_seed(seed)
        seen = []
        for h in range(heads):
            q, side = torch.arange(down), window_blocks // 2
            pairs = [
                (q[:, None] + torch.arange(-side, window_blocks - side)),
                torch.arange(min(global_blocks, across)).expand(down, -1),
            ]
            pairs.append(
                torch.stack(
                    [
                        torch.randperm(across, generator=generator)[:random_blocks]
                        for _ in range(down)
                    ]
                )
            )
            columns = torch.cat(pairs, 1)
            keys = (q[:, None] * across + columns)[(columns >= 0) & (columns < across)]
            keys = torch.cat([keys, torch.arange(min(global_blocks, down) * across)]).unique()
            seen.append(keys + h * down * across)
        keys = torch.cat(seen).to(device)
        bits = torch.zeros(0, sizes[0], sizes[1] // 32, dtype=torch.int32, device=device)
        shape = _shape((1, heads, length, length))
        return cls(shape, assemble(shape, keys, torch.full_like(keys, FULL), bits))

    @classmethod
    def from_flex(cls, mask: Any) -> Self:
        """Convert FlexAttention's block mask; only its partial blocks evaluate ``mask_mod``.

        An attribute of FlexAttention's mask caches the result.
        """
        if (found := getattr(mask, _CACHE, None)) is not None:
            return found
        sizes = _sizes(tuple(mask.BLOCK_SIZE), mask.kv_indices.device)
        batch, heads, down = mask.kv_num_blocks.shape
        across = mask.kv_indices.shape[-1]
        lq, lk = getattr(mask, "seq_lengths", None) or (down * sizes[0], across * sizes[1])

        def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
            if counts is None or indices is None:
                return torch.zeros(0, dtype=torch.int64, device=mask.kv_indices.device)
            row = (
                torch.arange(batch * heads * down, device=indices.device).view(
                    batch, heads, down, 1
                )
                * across
            )
            return (row + indices)[torch.arange(across, device=indices.device) < counts[..., None]]

        partial = listed(mask.kv_num_blocks, mask.kv_indices)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        shape = _shape((batch, heads, lq, lk))
        made = cls(shape, evaluate(mask.mask_mod, shape, sizes, mask.kv_indices.device, partial))
        whole = assemble(shape, full.sort()[0], torch.full_like(full, FULL), made.blocks.bits[:0])
        setattr(mask, _CACHE, both := made | cls(shape, whole))
        return both

    # ---- properties and combination

    @property
    def block_size(self) -> tuple[int, int]:
        return self.blocks.block_size

    @property
    def device(self) -> torch.device:
        return self.blocks.offsets.device

    @property
    def share(self) -> float:
        """Share of the blocks that run."""
        return self.blocks.share

    def to_dense(self) -> torch.Tensor:
        """Return bool (B, H, Lq, Lk)."""
        rows = torch.arange(self.shape[2], device=self.device)
        return visible_block_pairs(
            self.blocks.offsets, self.blocks.entries, self.blocks.bits, rows, self.shape[3]
        )

    def part(self, heads: range, queries: range, keys: range) -> Self:
        """Return the mask of these heads, queries and keys, whose indices start at 0.

        The block size stays, and the ranges may cut blocks. If all heads share the mask, ``heads``
        is ``range(1)``.
        """
        for name, given, n in zip(
            ("heads", "queries", "keys"), (heads, queries, keys), self.shape[1:]
        ):
            if (
                not isinstance(given, range)
                or given.step != 1
                or not 0 <= given.start <= given.stop <= n
            ):
                raise ValueError(
                    f"BlockMask.part: {name} must be a range within range({n}), of step 1, got"
                    f" {given!r}"
                )
        shape = (self.shape[0], len(heads), len(queries), len(keys))
        return type(self)(shape, part(self.blocks, self.shape, heads, queries, keys))

    def to(self, device: torch.device | str) -> Self:
        """Return the same mask on another device."""
        made = object.__new__(type(self))
        made.shape, made.blocks = self.shape, Blocks(*(t.to(device) for t in self.blocks))
        return made

    def __and__(self, other: Self) -> Self:
        return self._combined(other, "&")

    def __or__(self, other: Self) -> Self:
        return self._combined(other, "|")

    def __repr__(self) -> str:
        rows, keys = self.block_size
        partial = self.blocks.bits.shape[0]
        return (
            f"BlockMask(shape={self.shape}, blocks of {rows} x {keys}: {self.share:.1%} run,"
            f" {partial} of them hide some pairs, {self.device})\n{_picture(self.blocks)}"
        )

    def _combined(self, other: Self, how: str) -> Self:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return type(self)(*combine(self.shape, self.blocks, other.shape, other.blocks, how))


def as_block_mask(mask: Any) -> BlockMask | None:
    """Return the mask if it is a block mask, ours or FlexAttention's, else None."""
    if isinstance(mask, BlockMask):
        return mask
    flex = sys.modules.get(_FLEX)
    return (
        BlockMask.from_flex(mask) if flex is not None and isinstance(mask, flex.BlockMask) else None
    )


# ---- checks and helpers


def _shape(shape: Sequence[int]) -> Shape:
    if len(shape) != 4 or any(
        isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape
    ):
        raise ValueError(f"BlockMask: the shape must be (B, H, Lq, Lk), got {tuple(shape)}")
    return (shape[0], shape[1], shape[2], shape[3])


def _sizes(block_size: Any, device: torch.device | str) -> tuple[int, int]:
    """Return (queries, keys) of a block; None selects the device's default."""
    if block_size is None:
        block_size = BLOCK_SIZE.get(torch.device(device).type, BLOCK_SIZE_ELSEWHERE)
    sizes = (block_size, block_size) if isinstance(block_size, int) else tuple(block_size)
    if len(sizes) != 2 or any(n not in SIZES for n in sizes):
        raise ValueError(
            f"BlockMask: the block size must be one or two of {', '.join(map(str, SIZES))}, got"
            f" {block_size!r}"
        )
    return sizes[0], sizes[1]


def _naturals(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(numbers, (tuple, list)):
        raise TypeError(f"BlockMask: {name} must be a tuple of ints, got {numbers!r}")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise ValueError(f"BlockMask: {name} must be ints of at least 0, got {tuple(numbers)}")
    return tuple(numbers)


def _picture(blocks: Blocks) -> str:
    """Return a picture of the first batch element and head.

    A character covers one or more blocks and is darker if more of its pairs are visible. A partial
    block counts as half.
    """
    down, across = blocks.offsets.shape[2] - 1, blocks.key_offsets.shape[2] - 1
    if not down or not across:
        return ""
    tall, wide = -(-down // ROWS), -(-across // COLUMNS)
    weight = torch.zeros(-(-down // tall), -(-across // wide))
    for amount, (q, k) in zip((1.0, 0.5), block_states(blocks)):
        weight.index_put_((q.cpu() // tall, k.cpu() // wide), torch.tensor(amount), accumulate=True)
    rows = torch.full((weight.shape[0],), float(tall))
    rows[-1] = down - tall * (weight.shape[0] - 1)
    columns = torch.full((weight.shape[1],), float(wide))
    columns[-1] = across - wide * (weight.shape[1] - 1)
    shade = (weight / (rows[:, None] * columns) * (len(SHADES) - 1)).ceil().long()
    return "\n".join("".join(SHADES[n] for n in line) for line in shade.tolist())
