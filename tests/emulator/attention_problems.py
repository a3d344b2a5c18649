# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the portable attention kernels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import pytransformer as pt
from support.attention_check import check_attention

RAW_OP = "attention_fwd"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Problem(NamedTuple):
    """A problem; shapes are (B, Hq, Hkv, Lq, Lk, D, Dv)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int, int, int, int, int]
    keywords: Callable[[Any], dict[str, Any]]  # a function of a generator of normal tensors


def alibi(draw: Any, heads: int) -> pt.AlibiBias:
    return pt.AlibiBias(draw(heads).abs())


def t5(
    draw: Any, heads: int, bidirectional: bool, distance: int = 20, buckets: int = 8
) -> pt.RelativePositionBias:
    return pt.RelativePositionBias(draw(buckets, heads), bidirectional, distance)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def padding(
    num_keys: int, *visible: tuple[int, int], holes: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a key-padding mask: each sequence's range is visible except `holes` above 1.

    `holes` are normal numbers.
    """
    keys = torch.arange(num_keys)
    mask = torch.stack([(keys >= lo) & (keys < hi) for lo, hi in visible])[:, None, None]
    return mask if holes is None else mask & (holes < 1)


def by_blocks(
    draw: Any, shape: tuple[int, int, int, int], queries: int = 128, keys: int = 128
) -> torch.Tensor:
    """Return a boolean mask (B, H, Lq, Lk) of random blocks.

    A third hide all pairs, a sixth all but one, a sixth some.
    """
    down, across = -(-shape[2] // queries), -(-shape[3] // keys)
    spread = lambda t: t.repeat_interleave(queries, 2).repeat_interleave(keys, 3)[
        ..., : shape[2], : shape[3]
    ]
    state = spread(draw(*shape[:2], down, across))
    one = (torch.arange(shape[2]) % queries == queries * 5 // 8 + 3)[:, None] & (
        torch.arange(shape[3]) % keys == keys - 1
    )
    return (state > 0.43) | ((state > 0) & (draw(*shape) > 0)) | ((state > -0.43) & one)


def in_blocks(draw: Any, shape: tuple[int, int, int, int], queries: int, keys: int) -> pt.BlockMask:
    return pt.BlockMask.from_dense(
        by_blocks(draw, shape, queries, keys), block_size=(queries, keys)
    )


# Each class of head dims and each dtype, bounds-only and with a score_mod, forward and backward;
# several tiles with tails on both sides; full, partial and skipped tiles; each bound, score term
# and gradient shape. Rows without visible keys, by bounds and by a mask.
PROBLEMS = (
    Problem("plain 64", BF16, (1, 2, 2, 140, 150, 64, 64), lambda n: {"causal": "top_left"}),
    Problem("plain 128", BF16, (1, 2, 1, 70, 90, 72, 96),
        lambda n: {"causal": "bottom_right", "window": (30, 5)}),
    Problem("plain 256", F16, (1, 1, 1, 40, 70, 160, 256), lambda n: {"window": (20, 40)}),
    Problem(
        "dropout and ALiBi", F16, (2, 2, 1, 70, 100, 40, 48),
        lambda n: {"dropout_p": 0.3, "dropout_seed": -(2**40), "bias": alibi(n, 2),
            "key_lengths": torch.tensor([100, 33])},
    ),
    Problem(
        "T5 of one direction, softcap", F16, (1, 2, 2, 50, 70, 80, 128),
        lambda n: {"softcap": 3.0, "bias": t5(n, 2, False), "causal": "bottom_right",
            "query_lengths": torch.tensor([45])},
    ),
    Problem(
        "hidden keys, segments", BF16, (1, 2, 2, 70, 130, 64, 32),
        lambda n: {"attn_mask": n(1, 1, 1, 130) > -0.5, "bias": n(1, 2, 70, 1),
            "query_segments": torch.arange(70)[None] // 30,
                   "key_segments": torch.arange(130)[None] // 50},
    ),
    # Key padding: at either end, of several words, with gaps; sequences and queries without visible
    # keys.
    Problem(
        "padding", BF16, (4, 4, 2, 40, 150, 64, 64),
        lambda n: {"attn_mask": padding(150, (0, 131), (70, 150), (64, 65), (0, 0)),
            "causal": "bottom_right"},
    ),
    Problem(
        "padding with holes", BF16, (2, 1, 1, 70, 150, 96, 128),
        lambda n: {"attn_mask": padding(150, (0, 150), (9, 140), holes=n(2, 1, 1, 150))},
    ),
    Problem(
        "padding of 1100 keys", F32, (2, 1, 1, 8, 1100, 16, 16),
        lambda n: {"attn_mask": padding(1100, (3, 40), (1060, 1095), holes=n(1100))},
    ),
    Problem(
        "padding and window", F32, (1, 1, 1, 60, 60, 80, 72),
        lambda n: {"attn_mask": (torch.arange(60) < 20) | (torch.arange(60) >= 41),
            "window": (5, 4)},
    ),
    Problem(
        "padding, bias and dropout", F16, (2, 2, 2, 30, 100, 64, 64),
        lambda n: {"attn_mask": padding(100, (0, 90), (33, 100), holes=n(1, 100)),
            "bias": n(1, 2, 1, 100),
                   "dropout_p": 0.3, "dropout_seed": 8},
    ),
    Problem(
        "a mask and T5 of both directions", BF16, (1, 2, 1, 40, 70, 128, 64),
        lambda n: {"attn_mask": n(1, 1, 40, 70).masked_fill(n(1, 1, 40, 70) > 0, -torch.inf),
            "bias": t5(n, 2, True, 50, 16)},
    ),
    Problem(
        "wide heads, prefix", BF16, (1, 2, 2, 50, 70, 256, 200),
        lambda n: {"dropout_p": 0.2, "dropout_seed": 9, "bias": n(2, 1, 70), "causal": "top_left",
                   "prefix_lengths": torch.tensor([21])},
    ),
    Problem("wide heads, T5", F16, (1, 1, 1, 50, 70, 160, 160), lambda n: {"bias": t5(n, 1, True)}),
    Problem(
        "float32", F32, (2, 2, 1, 40, 70, 24, 17),
        lambda n: {"dropout_p": 0.5, "dropout_seed": 3, "bias": t5(n, 2, True), "window": (25, 30)},
    ),
    Problem(
        "wide float32", F32, (1, 2, 1, 35, 50, 80, 96),
        lambda n: {"attn_mask": n(1, 1, 1, 1), "bias": alibi(n, 2), "causal": "top_left",
            "softcap": 5.0},
    ),
    Problem(
        "sinks", BF16, (1, 2, 1, 70, 150, 64, 64),
        lambda n: {"sinks": torch.tensor([1.5, 20.0]), "causal": "bottom_right",
            "window": (100, None)},
    ),
    Problem(
        "sinks alone, finfo.min", F32, (2, 3, 1, 40, 60, 24, 24),
        lambda n: {"attn_mask": n(40, 60).masked_fill(torch.arange(40)[:, None] % 9 == 2,
            -torch.inf).masked_fill(
                       torch.arange(40)[:, None] % 9 == 4, torch.finfo(F32).min),
                   "sinks": torch.tensor([torch.finfo(F32).min, -torch.inf, 3.0]),
                   "key_lengths": torch.tensor([60, 5]),
                   "query_lengths": torch.tensor([33, 40]), "dropout_p": 0.2, "dropout_seed": 3},
    ),
    # Block masks: lists per head and sequence, or shared; blocks of one and of several tiles, and
    # lengths that differ from the tensors'.
    Problem("blocks", BF16, (1, 2, 1, 300, 410, 64, 64),
        lambda n: {"attn_mask": in_blocks(n, (1, 2, 300, 410), 128, 64)}),
    Problem(
        "blocks, causal, lengths", F16, (2, 2, 2, 150, 270, 96, 128),
        lambda n: {"attn_mask": in_blocks(n, (2, 1, 150, 270), 128, 64), "causal": "bottom_right",
            "window": (130, 40),
                   "key_lengths": torch.tensor([270, 140]), "sinks": torch.tensor([0.5, -1.0])},
    ),
    Problem(
        "blocks of 32, T5, dropout", F32, (1, 2, 1, 70, 140, 24, 32),
        lambda n: {"attn_mask": in_blocks(n, (1, 2, 70, 140), 32, 32), "bias": t5(n, 2, True),
            "dropout_p": 0.3, "dropout_seed": 4},
    ),
    Problem(
        "blocks, bias, segments", BF16, (2, 2, 1, 130, 200, 160, 200),
        lambda n: {"attn_mask": in_blocks(n, (1, 1, 130, 200), 64, 128), "bias": n(1, 2, 130, 200),
            "softcap": 4.0,
                   "query_segments": torch.arange(130).expand(2, -1) // 100,
                   "key_segments": torch.arange(200).expand(2, -1) // 140},
    ),
    Problem(
        "blocks, bias of all queries", F32, (2, 2, 1, 100, 70, 80, 72),
        lambda n: {"attn_mask": in_blocks(n, (2, 2, 100, 70), 64, 32), "bias": n(2, 1, 1, 70),
            "causal": "top_left"},
    ),
    # Dense masks with listed blocks: per head and sequence, or shared; rows of whole 16-key words,
    # or not; transposed queries.
    Problem("listed", BF16, (1, 2, 1, 300, 410, 64, 64),
        lambda n: {"attn_mask": by_blocks(n, (1, 2, 300, 410))}),
    Problem(
        "listed, words of 16, causal", F16, (2, 2, 2, 150, 272, 96, 128),
        lambda n: {"attn_mask": by_blocks(n, (2, 1, 150, 272)), "causal": "bottom_right",
            "window": (130, 40),
                   "key_lengths": torch.tensor([272, 140]), "sinks": torch.tensor([0.5, -1.0])},
    ),
    Problem(
        "listed, queries side by side, T5, dropout", F32, (1, 2, 1, 140, 260, 24, 32),
        lambda n: {"attn_mask": by_blocks(n, (1, 1, 140, 260)).mT.contiguous().mT,
            "bias": t5(n, 2, True), "dropout_p": 0.3,
                   "dropout_seed": 4},
    ),
    Problem(
        "listed, bias, segments", BF16, (2, 2, 1, 130, 200, 160, 200),
        lambda n: {"attn_mask": by_blocks(n, (2, 2, 130, 200)), "bias": n(1, 2, 130, 200),
            "softcap": 4.0,
                   "query_segments": torch.arange(130).expand(2, -1) // 100,
                   "key_segments": torch.arange(200).expand(2, -1) // 140},
    ),
    Problem(
        "listed, one column, bias of all queries", F32, (1, 2, 1, 300, 140, 80, 72),
        lambda n: {"attn_mask": by_blocks(n, (1, 1, 300, 1), keys=1), "bias": n(1, 1, 1, 140),
            "causal": "top_left"},
    ),
    # Global keys: tiles between them and the windows that no query sees; in one tile with a window;
    # masks that hide some.
    Problem(
        "global keys", BF16, (1, 2, 1, 70, 300, 64, 64),
        lambda n: {"window": (20, 5), "global_keys": 5, "causal": "bottom_right",
            "key_lengths": torch.tensor([240])},
    ),
    Problem(
        "global keys, prefix", F16, (2, 2, 2, 100, 180, 96, 128),
        lambda n: {"window": (9, 70), "global_keys": 70, "causal": "top_left",
            "prefix_lengths": torch.tensor([40, 90]),
                   "bias": alibi(n, 2), "sinks": torch.tensor([0.5, -1.0])},
    ),
    Problem(
        "global keys, T5, dropout", F32, (2, 2, 1, 70, 200, 24, 32),
        lambda n: {"window": (30, 8), "global_keys": 1, "bias": t5(n, 2, True), "dropout_p": 0.3,
            "dropout_seed": 4,
                   "key_lengths": torch.tensor([200, 33])},
    ),
    Problem(
        "global keys, bias, segments", BF16, (1, 2, 1, 70, 130, 160, 200),
        lambda n: {"window": (10, None), "global_keys": 33, "bias": n(1, 2, 70, 130),
            "attn_mask": n(1, 130), "softcap": 4.0,
                   "query_segments": torch.arange(70)[None] // 50,
                   "key_segments": torch.arange(130)[None] // 100},
    ),
    Problem(
        "global keys, padding", F32, (2, 1, 1, 100, 220, 80, 72),
        lambda n: {"window": (5, 4), "global_keys": 40,
            "attn_mask": padding(220, (35, 220), (100, 180), holes=n(1, 220))},
    ),
    Problem(
        "global keys, blocks", BF16, (1, 2, 1, 300, 410, 64, 64),
        lambda n: {"window": (50, 5), "global_keys": 70,
            "attn_mask": in_blocks(n, (1, 2, 300, 410), 128, 64), "causal": "bottom_right"},
    ),
    Problem(
        "global keys, listed", BF16, (1, 2, 1, 300, 410, 64, 64),
        lambda n: {"window": (50, 5), "global_keys": 70,
            "attn_mask": by_blocks(n, (1, 2, 300, 410)), "causal": "bottom_right"},
    ),
    Problem(
        "rows that see nothing, finfo.min", F16, (1, 1, 1, 40, 40, 32, 32),
        lambda n: {"attn_mask": torch.full((40, 40),
            -torch.inf).masked_fill((n(40, 40) > 0) & (torch.arange(40) != 7)[:, None],
                                                                             torch.finfo(F32).min),
                   "bias": torch.full((1, 40), torch.finfo(F32).min)},
    ),
)  # fmt: skip


def problems() -> Iterator[Problem]:
    yield from PROBLEMS


def arguments(problem: Problem) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return the call's query, key, value and keywords.

    Memory is (B, L, H, D) if there are several sequences.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(problem.name.encode()))
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    batch, heads, key_heads, num_q, num_k, head_dim, value_dim = problem.shape
    shapes = (
        (batch, num_q, heads, head_dim),
        (batch, num_k, key_heads, head_dim),
        (batch, num_k, key_heads, value_dim),
    )
    tensors = (draw(*shape).to(problem.dtype).transpose(1, 2) for shape in shapes)
    return tuple(t if batch > 1 else t.contiguous() for t in tensors), problem.keywords(draw)


def wrong(problem: Problem, poisoned: bool = True) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        check_attention(*arguments(problem), "cuda", poisoned=poisoned)
    except (RuntimeError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    return []
