# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the attention kernels for sm_90a."""

from __future__ import annotations

from collections.abc import Iterator

import attention_problems
import torch
from attention_problems import (
    BF16,
    F16,
    Problem,
    alibi,
    arguments,
    by_blocks,
    in_blocks,
    integers,
    padding,
    t5,
)
from fused_problems import IN_ORDER, any_order

import pytransformer as pt

RAW_OP = attention_problems.RAW_OP


def some(t: torch.Tensor) -> torch.Tensor:
    """Return a mask with -inf in a third of the pairs and in the full third row."""
    hidden = (t > 0.4) | (torch.arange(t.shape[-2]) == 2)[:, None]
    return t.masked_fill(hidden, -torch.inf)


# Blocks of 128 rows, in forward also of 192; tiles of 128 streamed rows, 64 or 96 in some passes.
# More tiles than the emulated GPU has multiprocessors, and full attention, give persistent blocks.
# Head dims of each class, full and padded.
BOTH_WAYS = (
    Problem("grouped", BF16, (1, 2, 1, 150, 300, 64, 64), lambda n: {}),
    Problem("full", F16, (1, 2, 2, 200, 140, 128, 128), lambda n: {}),
    Problem("causal", BF16, (1, 1, 1, 300, 300, 128, 128), lambda n: {"causal": "top_left"}),
    # Three consumers: several tiles of 192 queries and a tail that leaves one consumer without
    # rows; heads in groups; persistent blocks and others.
    Problem("three consumers", BF16, (1, 4, 2, 440, 300, 64, 64), lambda n: {}),
    Problem(
        "three consumers, causal", F16, (2, 2, 2, 330, 400, 40, 64),
        lambda n: {"causal": "top_left", "prefix_lengths": integers(250, 10)},
    ),
    Problem(
        "three consumers, lengths and window", BF16, (2, 2, 1, 360, 290, 64, 64),
        lambda n: {"query_lengths": integers(330, 200), "key_lengths": integers(290, 150),
            "window": (140, 60),
                   "causal": "bottom_right"},
    ),
    Problem("causal, grouped", F16, (1, 4, 2, 150, 180, 40, 40),
        lambda n: {"causal": "bottom_right"}),
    Problem(
        "lengths", BF16, (3, 1, 1, 130, 300, 64, 64),
        lambda n: {"query_lengths": integers(130, 40, 60), "key_lengths": integers(300, 77, 0)},
    ),
    Problem(
        "lengths and window", BF16, (2, 1, 1, 200, 300, 96, 96),
        lambda n: {"query_lengths": integers(200, 130), "key_lengths": integers(290, 150),
            "window": (40, 30),
                   "causal": "bottom_right"},
    ),
    Problem("window", F16, (2, 1, 1, 140, 150, 64, 64), lambda n: {"window": (50, None)}),
    Problem("prefix", BF16, (2, 1, 1, 150, 200, 64, 64),
        lambda n: {"causal": "top_left", "prefix_lengths": integers(100, 10)}),
    Problem("weights of all sizes", F16, (1, 1, 1, 130, 140, 64, 64), lambda n: {"scale": 2.0}),
    Problem("one tile", BF16, (1, 1, 1, 40, 40, 72, 72), lambda n: {"scale": 0.05}),
    # lse beyond 2^24, of which float32 represents only even numbers: the weights exceed 1.
    Problem("large scores", F16, (1, 1, 1, 130, 140, 64, 64), lambda n: {"scale": 1e6}),
)  # fmt: skip
# Three consumers in snake order, on two persistent blocks: rounds without a rest, and with one in
# either direction; tiles without keys.
SNAKE = (
    Problem("snake", BF16, (1, 3, 1, 330, 330, 64, 64), lambda n: {"causal": "top_left"}),
    Problem("snake, bottom right", F16, (1, 7, 7, 140, 300, 64, 40),
        lambda n: {"causal": "bottom_right"}),
    Problem("snake, window", BF16, (5, 1, 1, 150, 200, 40, 64), lambda n: {"window": (100, 50)}),
    Problem("snake, few keys", F16, (2, 2, 1, 390, 150, 64, 64), lambda n: {"causal": "top_left"}),
    Problem("snake, hidden queries", BF16, (1, 3, 3, 384, 100, 64, 64),
        lambda n: {"causal": "bottom_right"}),
)  # fmt: skip
# Backward consumers share 64 keys: several tiles, persistent and not; one consumer passes weights
# to the other.
WIDE = (
    Problem("wide", F16, (1, 1, 1, 70, 140, 256, 256), lambda n: {}),
    Problem("wide, grouped", BF16, (1, 2, 1, 150, 330, 256, 256), lambda n: {}),
    Problem("wide, causal", BF16, (1, 1, 1, 200, 200, 200, 256), lambda n: {"causal": "top_left"}),
    Problem(
        "wide, lengths and window", F16, (2, 2, 1, 200, 210, 248, 200),
        lambda n: {"query_lengths": integers(200, 75), "key_lengths": integers(190, 100),
            "window": (60, 40),
                   "causal": "bottom_right"},
    ),
    # Tiles of 80 keys: bounds end in the last 16 keys of a tile, and before them.
    Problem(
        "wide, bottom right", F16, (2, 1, 1, 140, 250, 160, 256),
        lambda n: {"key_lengths": integers(235, 150), "causal": "bottom_right"},
    ),
    Problem("wide, window", BF16, (1, 2, 1, 150, 410, 192, 256), lambda n: {"window": (100, 75)}),
    Problem("wide, prefix", BF16, (2, 1, 1, 140, 250, 256, 160),
        lambda n: {"causal": "top_left", "prefix_lengths": integers(158, 79)}),
    Problem("wide, large scores", F16, (1, 1, 1, 70, 140, 256, 256), lambda n: {"scale": 5e5}),
    Problem("wide, one tile", BF16, (1, 1, 1, 40, 40, 256, 256), lambda n: {"scale": 0.05}),
)  # fmt: skip
# Column panels that only some of query, key and value have, per class.
UNLIKE = (
    Problem("192 and 128", BF16, (1, 2, 1, 140, 150, 192, 128),
        lambda n: {"causal": "bottom_right"}),
    Problem("160", F16, (1, 1, 1, 70, 200, 160, 160), lambda n: {"window": (90, 90)}),
    Problem("32 and 256", F16, (1, 1, 1, 40, 100, 32, 256), lambda n: {}),
    Problem("128 and 40", BF16, (1, 2, 2, 140, 150, 128, 40), lambda n: {"causal": "top_left"}),
    Problem("64 and 128, ALiBi", F16, (1, 2, 1, 130, 150, 64, 128),
        lambda n: {"bias": alibi(n, 2), "key_lengths": integers(140)}),
    Problem("72 and 16, mask", BF16, (1, 1, 1, 40, 160, 72, 16),
        lambda n: {"attn_mask": n(40, 160) > 0}),
)  # fmt: skip
# With score terms: tiles of 96, 64 or 48 in backward, in pieces of 16. Some tiles lie fully beyond
# the distances of T5's tables.
TERMS = (
    Problem("sinks", BF16, (1, 2, 1, 140, 200, 64, 64),
        lambda n: {"sinks": torch.tensor([1.5, 20.0]), "causal": "bottom_right"}),
    Problem(
        "sinks, wide", F16, (2, 2, 2, 70, 150, 128, 256),
        lambda n: {"sinks": torch.tensor([-2.0, -torch.inf]), "causal": "bottom_right",
            "query_lengths": integers(70, 50),
                   "key_lengths": integers(150, 20)},
    ),
    Problem("softcap", BF16, (1, 2, 1, 140, 200, 64, 64),
        lambda n: {"softcap": 3.0, "scale": -0.3}),
    Problem("ALiBi", BF16, (1, 2, 1, 130, 260, 128, 128),
        lambda n: {"causal": "bottom_right", "bias": alibi(n, 2)}),
    Problem(
        "ALiBi, lengths", F16, (2, 2, 2, 140, 150, 40, 40),
        lambda n: {"bias": alibi(n, 2), "query_lengths": integers(140, 90),
            "key_lengths": integers(40, 150)},
    ),
    Problem("T5, dropout", F16, (1, 2, 2, 140, 250, 64, 64),
        lambda n: {"bias": t5(n, 2, True), "dropout_p": 0.3, "dropout_seed": 77}),
    Problem(
        "T5 of one direction, softcap", BF16, (1, 2, 1, 200, 220, 128, 128),
        lambda n: {"bias": t5(n, 2, False, 300, 32), "causal": "bottom_right", "softcap": 4.0,
            "query_lengths": integers(170)},
    ),
    Problem(
        "dropout", BF16, (2, 2, 1, 130, 200, 72, 96),
        lambda n: {"dropout_p": 0.5, "dropout_seed": -(2**40), "window": (60, 40),
            "key_lengths": integers(200, 77)},
    ),
    Problem(
        "softcap, dropout", BF16, (2, 2, 1, 130, 200, 72, 96),
        lambda n: {"dropout_p": 0.5, "dropout_seed": 3, "window": (60, 40),
            "key_lengths": integers(200, 77), "softcap": 20.0},
    ),
    Problem(
        "dropout, grouped", F16, (1, 4, 2, 200, 260, 64, 64),
        lambda n: {"dropout_p": 0.2, "dropout_seed": 5, "causal": "top_left"},
    ),
    Problem("wide, softcap", BF16, (1, 2, 1, 140, 150, 256, 256),
        lambda n: {"softcap": 3.0, "causal": "top_left", "window": (90, None)}),
    Problem(
        "wide, T5, dropout", F16, (1, 1, 1, 130, 200, 200, 256),
        lambda n: {"bias": t5(n, 1, True), "dropout_p": 0.3, "dropout_seed": 7},
    ),
    Problem(
        "wide, ALiBi", BF16, (2, 2, 1, 140, 150, 256, 192),
        lambda n: {"bias": alibi(n, 2), "query_lengths": integers(140, 90),
            "key_lengths": integers(40, 150), "softcap": 5.0},
    ),
    Problem("wide, ALiBi, grouped", F16, (1, 2, 1, 70, 80, 256, 256),
        lambda n: {"bias": alibi(n, 2)}),
    Problem(
        "wide, T5 of one direction", BF16, (1, 2, 1, 200, 220, 256, 256),
        lambda n: {"bias": t5(n, 2, False, 300, 32), "causal": "top_left"},
    ),
)  # fmt: skip
# Key padding: bounds, and bits for keys hidden between them; hidden rows contain NaN.
PADDING = (
    Problem(
        "padding", BF16, (4, 2, 1, 140, 300, 64, 64),
        lambda n: {"attn_mask": padding(300, (0, 290), (0, 130), (129, 300), (0, 0))},
    ),
    Problem(
        "padding, bottom right", F16, (2, 2, 1, 70, 270, 128, 128),
        lambda n: {"attn_mask": padding(270, (9, 270), (150, 268)), "causal": "bottom_right"},
    ),
    Problem(
        "padding with holes", BF16, (3, 2, 1, 30, 300, 64, 64),
        lambda n: {"attn_mask": padding(300, (0, 300), (40, 200), (0, 0), holes=n(3, 1, 1, 300))},
    ),
    Problem(
        "holes, 128", F16, (2, 1, 1, 140, 290, 128, 96),
        lambda n: {"attn_mask": padding(290, (0, 290), holes=n(290)),
            "key_lengths": integers(290, 150)},
    ),
    # With a left window, queries within padding gaps have no visible keys.
    Problem(
        "holes and window", BF16, (1, 1, 1, 200, 200, 64, 64),
        lambda n: {"attn_mask": (torch.arange(200) < 60) | (torch.arange(200) >= 150),
            "window": (20, 10)},
    ),
    Problem(
        "holes and left window", F16, (2, 1, 1, 70, 200, 128, 128),
        lambda n: {"attn_mask": padding(200, (0, 200), (40, 180), holes=n(2, 1, 1, 200)),
            "window": (50, None)},
    ),
    Problem(
        "wide heads, holes", BF16, (2, 1, 1, 70, 140, 256, 256),
        lambda n: {"attn_mask": padding(140, (0, 140), (70, 130), holes=n(140))},
    ),
    Problem(
        "wide heads, holes in many tiles", F16, (3, 2, 1, 140, 410, 200, 256),
        lambda n: {"attn_mask": padding(410, (0, 410), (75, 395), (81, 159), holes=n(3, 1, 1, 410)),
            "window": (None, 250)},
    ),
    Problem(
        "holes, T5, dropout", F16, (2, 1, 1, 130, 150, 128, 128),
        lambda n: {"attn_mask": padding(150, (0, 150), (7, 130), holes=n(150)),
            "bias": t5(n, 1, True),
                   "dropout_p": 0.3, "dropout_seed": 3},
    ),
    Problem(
        "holes, ALiBi, softcap", BF16, (1, 2, 2, 130, 260, 64, 64),
        lambda n: {"attn_mask": padding(260, (100, 250), holes=n(260)), "bias": alibi(n, 2),
            "softcap": 5.0,
                   "causal": "bottom_right"},
    ),
)  # fmt: skip
# With elementwise masks too. These, and every backward, recompute tiles that met NaN, so they also
# run without it.
PADDED_LOOKUPS = (
    Problem(
        "holes and bias", F16, (2, 1, 1, 40, 264, 128, 128),
        lambda n: {"attn_mask": padding(264, (0, 250), (140, 264), holes=n(264)),
            "bias": n(1, 1, 40, 264).half()},
    ),
    Problem(
        "wide, holes and segments", BF16, (1, 1, 1, 60, 200, 256, 256),
        lambda n: {"attn_mask": padding(200, (10, 190), holes=n(200)),
            "query_segments": torch.arange(60)[None] // 40,
                   "key_segments": torch.arange(200)[None] // 120},
    ),
    Problem(
        "holes and segments", BF16, (1, 1, 1, 60, 200, 64, 64),
        lambda n: {"attn_mask": padding(200, (10, 190), holes=n(200)),
            "query_segments": torch.arange(60)[None] // 40,
                   "key_segments": torch.arange(200)[None] // 120},
    ),
)  # fmt: skip
# Elementwise masks, in backward as bits of a tile's pairs.
LOOKUPS = (
    # Boolean masks: 16 keys per load, or one by one; of every broadcast shape.
    Problem("mask", BF16, (2, 1, 1, 150, 272, 64, 64),
        lambda n: {"attn_mask": n(2, 1, 150, 272) > 0, "causal": "bottom_right"}),
    Problem(
        "mask of heads", F16, (2, 2, 2, 40, 160, 128, 128),
        lambda n: {"attn_mask": n(1, 2, 40, 160) > 0.5, "key_lengths": integers(160, 77),
            "query_lengths": integers(30, 40)},
    ),
    Problem("mask, odd", BF16, (1, 2, 2, 40, 271, 128, 128),
        lambda n: {"attn_mask": n(1, 2, 40, 271) > 0, "window": (10, None)}),
    Problem("mask, transposed", F16, (1, 1, 1, 130, 144, 64, 64),
        lambda n: {"attn_mask": (n(1, 1, 144, 130) > 0).mT}),
    Problem("hidden queries", BF16, (2, 1, 1, 140, 40, 64, 64),
        lambda n: {"attn_mask": n(2, 1, 140, 1) > 0}),
    Problem("hidden keys of heads", BF16, (1, 2, 1, 40, 144, 64, 64),
        lambda n: {"attn_mask": n(1, 2, 1, 144) > 0}),
    # Hidden keys contain NaN: more blocks than one recompute tiles of several sequences and
    # queries.
    Problem("hidden keys", BF16, (6, 1, 1, 40, 300, 64, 64),
        lambda n: {"attn_mask": (n(6, 1, 1, 300) > -0.5).repeat(1, 1, 40, 1)}),
    Problem(
        "hidden keys, dropout", F16, (1, 1, 1, 130, 150, 128, 128),
        lambda n: {"attn_mask": (n(150) > -0.5).repeat(130, 1), "dropout_p": 0.3,
            "dropout_seed": 3},
    ),
    # A hidden key and a hidden query in the last head; the window keeps them from the first tiles,
    # so few flags are set.
    Problem(
        "one hidden key", BF16, (2, 2, 2, 300, 300, 64, 64),
        lambda n: {"attn_mask": (torch.arange(4).view(2, 2, 1,
            1) < 3) | (torch.arange(300) != 290) & (torch.arange(300) != 290)[:, None],
                   "window": (20, 20)},
    ),
    # Each pass has 136 tiles, and one of a few blocks requests each; the last is recomputed.
    Problem(
        "the last of many heads", BF16, (34, 4, 4, 33, 20, 64, 64),
        lambda n: {"attn_mask": (torch.arange(34 * 4).view(34, 4, 1,
            1) < 135) | (torch.arange(20) != 7)},
    ),
    Problem("mask and T5", F16, (1, 1, 1, 40, 160, 128, 128),
        lambda n: {"attn_mask": n(1, 1, 40, 160) > 0, "bias": t5(n, 1, True)}),
    Problem(
        "segments", BF16, (2, 1, 1, 150, 200, 64, 64),
        lambda n: {"query_segments": torch.arange(150).expand(2, -1) // 40,
            "key_segments": torch.arange(200).expand(2, -1) // 50},
    ),
    Problem(
        "segments and causal", F16, (1, 1, 1, 140, 140, 128, 128),
        lambda n: {"query_segments": torch.arange(140)[None] // 45 * 2**40,
            "key_segments": torch.arange(140)[None] // 45 * 2**40,
                   "causal": "top_left"},
    ),
    Problem(
        "segments, window, dropout", BF16, (2, 2, 1, 60, 150, 40, 40),
        lambda n: {"query_segments": (n(2, 60) > 0).long(), "key_segments": (n(2, 150) > 0).long(),
            "window": (20, 90),
                   "dropout_p": 0.3, "dropout_seed": 11},
    ),
    Problem(
        "mask and segments", F16, (1, 2, 1, 130, 160, 64, 64),
        lambda n: {"attn_mask": n(1, 2, 130, 160) > -0.5,
            "query_segments": torch.arange(130)[None] // 70,
                   "key_segments": torch.arange(160)[None] // 70, "softcap": 3.0},
    ),
    # Floating masks and biases with copied rows of 16 and 32 bits; some rows have no visible keys,
    # some pairs are -inf.
    Problem(
        "bf16 mask", BF16, (1, 2, 2, 130, 272, 128, 128),
        lambda n: {"attn_mask": some(n(1, 1, 130, 272)).to(BF16), "causal": "top_left",
            "dropout_p": 0.2, "dropout_seed": 5},
    ),
    Problem("window and bias", F16, (1, 1, 1, 140, 140, 64, 64),
        lambda n: {"bias": n(1, 140), "window": (10, None)}),
    Problem(
        "mask and bias", BF16, (1, 2, 1, 140, 160, 64, 64),
        lambda n: {"attn_mask": n(1, 1, 140, 160) > 0, "bias": n(1, 1, 160).to(BF16)},
    ),
    Problem(
        "rows of f16 bias", F16, (2, 2, 1, 40, 264, 64, 64),
        lambda n: {"bias": n(1, 2, 40, 264).half(), "softcap": 3.0},
    ),
    Problem(
        "rows of f32 mask", BF16, (2, 4, 2, 70, 140, 64, 64),
        lambda n: {"attn_mask": some(n(2, 1, 70, 140)), "bias": alibi(n, 4),
            "key_lengths": integers(140, 90)},
    ),
    Problem("rows of f32 bias", F16, (1, 1, 1, 130, 272, 128, 128),
        lambda n: {"bias": n(1, 1, 130, 272), "window": (250, 60)}),
    Problem(
        "rows of finfo.min", F16, (1, 1, 1, 140, 140, 64, 64),
        lambda n: {"attn_mask": torch.full((140, 140), -torch.inf).masked_fill(
            (n(140, 140) > 0) & (torch.arange(140) % 50 != 7)[:, None],
            torch.finfo(torch.float32).min)},
    ),
    Problem(
        "large rows", BF16, (1, 1, 1, 130, 140, 128, 128),
        lambda n: {"attn_mask": 3e4 * n(1, 1, 130, 1).expand(1, 1, 130, 140) + n(1, 1, 130, 140)},
    ),
    Problem("padded rows of bf16 bias", BF16, (1, 2, 2, 140, 150, 128, 128),
        lambda n: {"bias": n(2, 140, 160).to(BF16)[..., :150], "causal": "bottom_right"}),
    Problem("f16 bias", F16, (2, 2, 1, 40, 260, 64, 64),
        lambda n: {"bias": n(1, 2, 40, 260).half(), "softcap": 3.0}),
    Problem("f32 bias", F16, (1, 1, 1, 130, 270, 128, 128),
        lambda n: {"bias": n(1, 1, 130, 270), "window": (250, 60)}),
    # Rows at any alignment.
    Problem(
        "odd bf16 mask", BF16, (2, 2, 1, 71, 151, 128, 128),
        lambda n: {"attn_mask": some(n(2, 2, 71, 151)).to(BF16), "causal": "bottom_right",
            "dropout_p": 0.2, "dropout_seed": 4},
    ),
    Problem("odd f16 bias of keys", F16, (2, 2, 2, 140, 77, 64, 64),
        lambda n: {"bias": n(2, 2, 1, 77).half()}),
    Problem("odd f32 bias", BF16, (1, 2, 2, 130, 141, 64, 64),
        lambda n: {"bias": n(1, 2, 130, 141), "key_lengths": integers(120)}),
    Problem("wide, hidden keys", BF16, (2, 1, 1, 40, 150, 248, 256),
        lambda n: {"attn_mask": (n(2, 1, 1, 150) > -0.5).repeat(1, 1, 40, 1)}),
    Problem("wide, mask", F16, (2, 1, 1, 40, 144, 256, 208),
        lambda n: {"attn_mask": n(2, 1, 40, 144) > 0}),
    Problem("wide, hidden queries", BF16, (2, 2, 1, 140, 70, 192, 256),
        lambda n: {"attn_mask": n(2, 1, 140, 1) > 0}),
    Problem(
        "wide, segments", BF16, (2, 2, 1, 140, 200, 256, 256),
        lambda n: {"query_segments": torch.arange(140).expand(2, -1) // 45,
            "key_segments": torch.arange(200).expand(2, -1) // 60,
                   "causal": "bottom_right"},
    ),
    Problem(
        "rows and T5", BF16, (1, 2, 1, 140, 144, 64, 64),
        lambda n: {"attn_mask": some(n(1, 1, 140, 144)).index_fill(-1, integers(5, 60),
            -torch.inf).half(), "bias": t5(n, 2, True),
                   "dropout_p": 0.2, "dropout_seed": 6},
    ),
)  # fmt: skip
# Problems whose d_query, d_key and d_value use the portable kernels.
FORWARD = (
    # Wide heads: elementwise masks with a score_mod.
    Problem(
        "192 and 64, mask, softcap", F16, (1, 2, 2, 40, 144, 192, 64),
        lambda n: {"attn_mask": n(2, 40, 144) > 0, "softcap": 4.0},
    ),
    Problem(
        "wide, bf16 mask and bias", BF16, (1, 2, 2, 130, 140, 256, 256),
        lambda n: {"attn_mask": some(n(1, 1, 130, 140)).to(BF16), "bias": n(2, 130, 140),
            "softcap": 4.0},
    ),
    Problem(
        "wide, f32 mask, dropout", F16, (1, 1, 1, 40, 150, 256, 256),
        lambda n: {"attn_mask": some(n(1, 1, 40, 150)), "dropout_p": 0.3, "dropout_seed": 3},
    ),
    # Block masks, and a dense one with listed blocks; blocks of one tile and of two.
    Problem("blocks", BF16, (1, 2, 1, 300, 520, 64, 64),
        lambda n: {"attn_mask": in_blocks(n, (1, 2, 300, 520), 128, 128)}),
    Problem(
        "blocks, causal, ALiBi", F16, (2, 2, 2, 150, 540, 128, 128),
        lambda n: {"attn_mask": in_blocks(n, (2, 1, 150, 540), 128, 256), "causal": "bottom_right",
            "window": (400, None),
                   "key_lengths": integers(540, 300), "bias": alibi(n, 2), "dropout_p": 0.2,
                   "dropout_seed": 4},
    ),
    Problem("blocks, wide", BF16, (1, 1, 1, 140, 300, 256, 200),
        lambda n: {"attn_mask": in_blocks(n, (1, 1, 140, 300), 256, 128)}),
    Problem(
        "listed, T5", F16, (1, 2, 1, 300, 410, 128, 128),
        lambda n: {"attn_mask": by_blocks(n, (1, 1, 300, 410)), "bias": t5(n, 2, True),
            "sinks": n(2)},
    ),
    # Floating masks and biases one by one, and two of them; some rows have no visible keys, some
    # pairs are -inf.
    Problem(
        "f32 mask and bias", BF16, (2, 2, 2, 70, 140, 64, 64),
        lambda n: {"attn_mask": some(n(2, 1, 70, 140)), "bias": n(2, 70, 140),
            "key_lengths": integers(140, 90)},
    ),
    Problem(
        "f64 mask, odd bias", BF16, (1, 2, 2, 40, 151, 128, 128),
        lambda n: {"attn_mask": some(n(1, 1, 40, 151)).double(), "bias": n(2, 1, 151).to(BF16)},
    ),
    Problem("transposed bias", F16, (1, 2, 1, 136, 40, 64, 64),
        lambda n: {"bias": n(2, 40, 136).mT, "window": (90, 90)}),
    Problem("wide, odd bias", BF16, (1, 1, 1, 40, 151, 200, 256),
        lambda n: {"bias": n(40, 151).to(BF16)}),
    Problem("shifted f16 bias", F16, (1, 2, 1, 40, 136, 64, 64),
        lambda n: {"bias": n(2, 40, 144).half()[..., 1:137]}),
    Problem("wide, rows of bf16 bias", BF16, (2, 2, 1, 140, 168, 200, 256),
        lambda n: {"bias": some(n(2, 1, 140, 168)).to(BF16)}),
    Problem("bias of queries", F16, (1, 2, 2, 140, 30, 64, 64), lambda n: {"bias": n(2, 140, 1)}),
    Problem(
        "finfo.min", F16, (1, 1, 1, 40, 140, 64, 64),
        lambda n: {"attn_mask": torch.full((40, 140),
            -torch.inf).masked_fill((n(40, 140) > 0) & (torch.arange(40) != 7)[:, None],
                                                                              torch.finfo(torch.float32).min),
                   "bias": torch.full((1, 140), torch.finfo(torch.float32).min)},
    ),
)  # fmt: skip
# Gradients of masks and biases: several parts per block, visible and hidden KV tiles, sums over
# sequences, heads, both or neither. Other problems have such gradients too, stored in pairs or one
# by one; the portable kernels compute sums over queries or keys.
DENSE = (
    Problem(
        "gradient of all heads", BF16, (3, 2, 1, 270, 304, 64, 64),
        lambda n: {"bias": n(1, 1, 270, 304), "key_lengths": integers(304, 77, 0),
            "causal": "bottom_right"},
    ),
    Problem("gradient of each head", F16, (2, 2, 2, 140, 136, 128, 72),
        lambda n: {"attn_mask": some(n(2, 2, 140, 136)).half()}),
    Problem("gradient of sequences", BF16, (2, 4, 2, 40, 200, 96, 128),
        lambda n: {"attn_mask": n(2, 1, 40, 200).to(BF16), "softcap": 3.0}),
    Problem("gradient behind a mask", BF16, (1, 2, 2, 140, 144, 64, 64),
        lambda n: {"attn_mask": n(1, 2, 140, 144) > 0, "bias": n(1, 1, 140, 144).to(BF16)}),
)  # fmt: skip


FUSED = any_order((*BOTH_WAYS, *PADDING[:4]))


def problems() -> Iterator[Problem]:
    yield from (
        *BOTH_WAYS,
        *SNAKE,
        *WIDE,
        *UNLIKE,
        *TERMS,
        *PADDING,
        *PADDED_LOOKUPS,
        *LOOKUPS,
        *FORWARD,
        *DENSE,
        *FUSED,
        *IN_ORDER,
    )


def gradients(problem: Problem, schedule: int) -> list[torch.Tensor]:
    """Return the gradients of the first three arguments in another thread and block order."""
    tensors, keywords = arguments(problem)
    torch.ops.pytransformer_C.emulator_schedule(schedule)
    inputs = [t.detach().requires_grad_() for t in tensors[:3]]
    out = pt.attention(*inputs, **keywords, backend="cuda")
    return list(torch.autograd.grad(out.float().square().sum(), inputs))


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the sm_90a kernels on this problem."""
    args, keywords = arguments(problem)
    products, by_warps = (
        [torch.ops.pytransformer_C.emulator_products()],
        torch.ops.pytransformer_C.emulator_products(True),
    )
    try:
        pt.attention(*args, **keywords, backend="cuda", strict=True)
    except RuntimeError as error:
        return [str(error)]
    if torch.ops.pytransformer_C.emulator_products(True) != by_warps:
        return ["forward made tiles again, though all numbers are finite"]
    products.append(torch.ops.pytransformer_C.emulator_products())
    found = attention_problems.wrong(problem)
    if problem in (*PADDING, *PADDED_LOOKUPS):
        found += attention_problems.wrong(problem, poisoned=False)
    products.append(torch.ops.pytransformer_C.emulator_products())
    if problem in IN_ORDER and not found:
        first, *others = (gradients(problem, schedule) for schedule in range(1, 5))
        if not all(torch.equal(a, b) for other in others for a, b in zip(first, other)):
            found.append("bits that differ from run to run")
    for output in "; ".join(pt.explain("attention", *args, **keywords, backend="cuda").notes).split(
        "; "
    ):  # nothing to compare without _C
        left = ("d_query", "d_key") if problem in FORWARD else ()
        if (
            "portable" in output
            and "the gradient is a sum" not in output
            and not output.startswith(left)
        ):
            found.append(output)
    forward, both = products[1] - products[0], products[2] - products[1]
    if not forward or (problem not in FORWARD and forward == both):
        found.append(f"{forward} products of warpgroups in forward, {both} in forward and backward")
    return found
