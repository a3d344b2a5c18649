# SPDX-License-Identifier: Apache-2.0
"""The host side of the CUDA backend selects kernels, tiles and blocks: pure functions, no GPU."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

needs_bindings = pytest.mark.skipif(
    importlib.util.find_spec("pytransformer._C") is None,
    reason="_C was not built (_build_info.json says why)",
)


# ---- heuristics


def plan(rows: int, columns: int, **changed: Any) -> dict[str, Any]:
    from pytransformer import _C

    given = {
        "x": "bfloat16",
        "residual_out": "bfloat16",
        "aligned": True,
        "backward": False,
        "multiprocessors": 132,
    } | changed
    return _C.cuda_layer_norm_plan(rows, columns, **given)


@needs_bindings
@pytest.mark.parametrize(
    ("columns", "changed", "kernel", "lanes", "threads"),
    [
        (64, {}, "lanes", 8, 128),
        (128, {}, "lanes", 8, 128),
        (256, {}, "lanes", 16, 128),
        (768, {}, "lanes", 32, 128),
        (1024, {"backward": True}, "lanes", 32, 128),
        (1032, {}, "block", 64, 64),
        (4096, {}, "block", 128, 128),
        (4096, {"backward": True}, "block", 256, 256),
        (8192, {"backward": True}, "block", 512, 512),
        (8200, {"backward": True}, "any", 512, 512),
        (12288, {}, "block", 384, 384),
        (12296, {}, "any", 512, 512),
        (768, {"aligned": False}, "any", 96, 96),
        (1, {"aligned": False}, "any", 32, 32),
        (768, {"residual_out": "float32"}, "lanes", 32, 128),
        (768, {"x": "float32"}, "any", 96, 96),  # a stream narrower than x
        (768, {"residual_out": "float16"}, "any", 96, 96),
    ],
)
def test_norm_kernel_depends_on_shape_and_dtype(
    columns: int, changed: dict[str, Any], kernel: str, lanes: int, threads: int
) -> None:
    chosen = plan(1000, columns, **changed)
    assert (chosen["kernel"], chosen["lanes"], chosen["threads"]) == (kernel, lanes, threads)


@needs_bindings
def test_norm_blocks_depend_on_rows() -> None:
    assert plan(1000, 768)["blocks"] == 250
    assert plan(1, 4096)["blocks"] == 1
    assert (
        plan(2**40, 768, aligned=False)["blocks"] == 2**30
    )  # max grid size; blocks loop over further rows
    assert (
        plan(100_000, 768)["blocks"] == plan(100_000, 4096)["blocks"] == 132 * 4
    )  # persistent, like the others
    assert plan(10, 4096, backward=True)["blocks"] == 10
    assert plan(100_000, 768, backward=True)["blocks"] == 132 * 2
    assert plan(100_000, 4096, backward=True, multiprocessors=2)["blocks"] == 4


@needs_bindings
@pytest.mark.parametrize("backward", [False, True])
def test_every_row_fits_its_kernel(backward: bool) -> None:
    """No shape needs more threads or shared memory than a block has, or a wider kernel."""
    for columns in (
        1,
        7,
        8,
        64,
        96,
        128,
        136,
        256,
        512,
        1024,
        1032,
        2048,
        8192,
        8200,
        12288,
        16384,
        131072,
    ):
        for aligned in (False, columns % 8 == 0):
            chosen = plan(5000, columns, backward=backward, aligned=aligned)
            assert chosen["threads"] % 32 == 0 and 32 <= chosen["threads"] <= 512
            assert chosen["smem_bytes"] <= 99 * 1024  # on sm_120
            vectors = {"lanes": 4, "block": 2 if backward else 4, "any": 2**31}[chosen["kernel"]]
            assert columns <= chosen["lanes"] * 8 * vectors


# ---- attention for sm_90a


def sm90_plan(direction: str = "forward", **changed: Any) -> dict[str, Any]:
    from pytransformer import _C

    given = dict(
        dtype="bfloat16",
        sequences=2,
        heads=16,
        key_heads=16,
        num_queries=4096,
        num_keys=4096,
        head_dim=128,
        value_dim=128,
    )
    return _C.cuda_sm90_attention_plan(direction, **given | changed)


@needs_bindings
@pytest.mark.parametrize(
    ("direction", "changed", "reason"),
    [
        ("forward", {}, None),
        ("forward", {"dtype": "float16", "head_dim": 72, "value_dim": 96}, None),
        ("forward", {"head_dim": 256, "value_dim": 200}, None),
        ("forward", {"bounds_only": False}, None),
        ("forward", {"head_dim": 256, "value_dim": 256, "bounds_only": False}, None),
        ("forward", {"head_dim": 160, "value_dim": 160}, None),
        ("forward", {"head_dim": 64}, None),
        ("forward", {"head_dim": 192, "bounds_only": False, "elementwise_mask": True}, None),
        ("forward", {"value_dim": 97}, "a result is not aligned"),
        ("forward", {"dtype": "float32"}, "float32"),
        ("forward", {"elementwise_mask": True}, None),
        (
            "forward",
            {"elementwise_mask": True, "bounds_only": False, "head_dim": 64, "value_dim": 64},
            None,
        ),
        ("forward", {"head_dim": 256, "value_dim": 256, "elementwise_mask": True}, None),
        ("forward", {"head_dim": 256, "value_dim": 256, "padded": True}, None),
        ("bwd_dq", {"padded": True}, None),
        ("bwd_dkdv", {"padded": True, "bounds_only": False, "head_dim": 64, "value_dim": 64}, None),
        ("bwd_dkdv", {"padded": True, "head_dim": 136, "value_dim": 64}, None),
        ("bwd_dkdv", {"padded": True, "left_window": True, "head_dim": 136, "value_dim": 64}, None),
        ("bwd_dq", {"padded": True, "left_window": True, "head_dim": 136, "value_dim": 64}, None),
        ("bwd_fused", {"padded": True}, None),
        ("bwd_fused", {"padded": True, "left_window": True}, None),
        (
            "bwd_dkdv",
            {"padded": True, "left_window": True, "head_dim": 136, "bounds_only": False},
            "to head size 128",
        ),
        ("bwd_dq", {"padded": True, "head_dim": 136, "bounds_only": False}, None),
        ("bwd_dkdv", {"padded": True, "bounds_only": False, "value_dim": 64}, None),
        ("bwd_dq", {"elementwise_mask": True}, None),
        (
            "bwd_dkdv",
            {"elementwise_mask": True, "bounds_only": False, "head_dim": 64, "value_dim": 64},
            None,
        ),
        ("bwd_dkdv", {"adds": "rows"}, None),
        ("bwd_dq", {"adds": "elements"}, "whose rows are contiguous"),
        ("bwd_dkdv", {"adds": "two biases"}, "add one floating mask or bias"),
        ("bwd_dkdv", {"elementwise_mask": True, "head_dim": 256, "value_dim": 256}, None),
        ("bwd_dkdv", {"adds": "rows", "head_dim": 256, "value_dim": 256}, "to head size 128"),
        ("bwd_dkdv", {"head_dim": 64, "value_dim": 64}, None),
        ("bwd_dq", {"bounds_only": False}, None),
        ("bwd_dkdv", {"bounds_only": False, "head_dim": 64, "value_dim": 40}, None),
        ("bwd_dkdv", {"head_dim": 256, "value_dim": 200}, None),
        ("bwd_dq", {"head_dim": 200, "value_dim": 256, "dtype": "float16"}, None),
        ("bwd_dkdv", {"head_dim": 256, "value_dim": 256, "bounds_only": False}, None),
        ("bwd_fused", {"even": False, "key_heads": 4}, None),
        ("bwd_fused", {"head_dim": 64, "value_dim": 64, "dtype": "float16"}, None),
        ("bwd_fused", {"bounds_only": False}, "only in the two passes"),
        ("bwd_fused", {"elementwise_mask": True}, None),
        ("bwd_fused", {"elementwise_mask": True, "num_keys": 100, "deterministic": True}, None),
        ("bwd_fused", {"elementwise_mask": True, "bounds_only": False}, "only in the two passes"),
        ("bwd_fused", {"elementwise_mask": True, "num_queries": 2**19}, "more than 256 MB of bits"),
        ("bwd_fused", {"elementwise_mask": True, "head_dim": 136}, "no room for the sums"),
        ("bwd_dkdv", {"head_dim": 192}, None),
        ("bwd_fused", {"head_dim": 64}, None),
        ("bwd_fused", {"head_dim": 64, "value_dim": 192}, "no room for the sums"),
        ("bwd_fused", {"deterministic": True, "num_keys": 1024}, None),
        ("bwd_fused", {"deterministic": True, "num_keys": 1023}, "of few keys"),
        ("bwd_dbias", {"adds": "rows"}, None),
        (
            "bwd_dbias",
            {"adds": "two biases", "bounds_only": False, "head_dim": 64, "value_dim": 256},
            None,
        ),
        ("bwd_dbias", {"adds": "elements", "summed": True}, "a sum over queries or keys"),
        ("bwd_dbias", {"adds": "rows", "dtype": "float32"}, "float32"),
    ],
)
def test_sm90_kernels_support_listed_problems(
    direction: str, changed: dict[str, Any], reason: str | None
) -> None:
    found = sm90_plan(direction, **changed)["why_not"]
    assert found is None if reason is None else found is not None and reason in found


@needs_bindings
def test_blocks_accumulate_d_query_per_tile() -> None:
    """Each head's Q tile has full sums; blocks are not persistent."""
    assert sm90_plan("bwd_fused", num_queries=65)["dq_accum"] == 2 * 16 * 128 * 128
    assert (
        sm90_plan("bwd_fused", num_queries=65, head_dim=40, value_dim=40)["dq_accum"]
        == 2 * 16 * 128 * 64
    )
    assert sm90_plan("bwd_fused", num_queries=65, head_dim=40)["dq_accum"] == 2 * 16 * 128 * 128
    assert (
        sm90_plan("bwd_fused", bounds_only=False)["dq_accum"]
        == sm90_plan("bwd_dkdv")["dq_accum"]
        == 0
    )
    assert (
        sm90_plan("bwd_fused", key_heads=2)["blocks"] == 2 * 2 * 32
        and sm90_plan("bwd_dkdv")["blocks"] == 132
    )
    # In order, blocks that start together belong to many heads.
    assert (
        sm90_plan("bwd_fused")["section"] == 1
        and sm90_plan("bwd_fused", deterministic=True)["section"] == 16
        and sm90_plan("bwd_fused", elementwise_mask=True)["section"] == 16
    )
    # To head size 128 the two passes have elementwise masks beside score_mod alone.
    for direction, head_dim, score_mod in (
        ("bwd_fused", 128, False),
        ("bwd_dq", 128, True),
        ("bwd_dkdv", 128, True),
        ("bwd_dq", 256, False),
        ("bwd_dkdv", 256, False),
    ):
        found = sm90_plan(direction, elementwise_mask=True, head_dim=head_dim)
        assert found["elementwise_mask"] and found["has_score_mod"] == score_mod


@needs_bindings
def test_persistent_blocks_get_equal_tiles_or_pairs() -> None:
    """Equal tiles, or pairs, use persistent blocks, head by head.

    Others use one block per tile, in sections of heads that fit L2.
    """
    full, causal, window = (
        sm90_plan(),
        sm90_plan(even=False),
        sm90_plan(even=False, left_window=True),
    )
    assert (full["tiles"], full["section"], full["blocks"], full["paired"]) == (32, 1, 132, False)
    assert (causal["tiles"], causal["section"], causal["blocks"], causal["paired"]) == (
        32,
        1,
        132,
        True,
    )
    # 2 MB of keys and values per head
    assert (window["tiles"], window["section"], window["blocks"], window["paired"]) == (
        32,
        16,
        32 * 32,
        False,
    )
    assert (
        sm90_plan("bwd_dq", even=False, num_keys=4352)["section"] == 11
    )  # at most 15: three sections, none small
    assert (
        sm90_plan("bwd_dq", even=False, num_keys=65536)["section"] == 1
        and sm90_plan(even=False, num_keys=128)["section"] == 32
    )
    # Pairs: an even number of tiles, and almost no block without one in the last round.
    for changed in ({"num_queries": 4000}, {"heads": 16 + 4, "key_heads": 4}):
        assert sm90_plan(even=False, **changed)["paired"]
    for changed in (
        {"num_queries": 3960},
        {"heads": 18, "key_heads": 18},
        {"heads": 4, "key_heads": 4},
        {"padded": True},
    ):
        assert not sm90_plan(even=False, **changed)["paired"]
    assert (
        not sm90_plan("bwd_dq", even=False)["paired"]
        and not sm90_plan("bwd_dkdv", even=False)["paired"]
    )
    assert sm90_plan("bwd_dkdv", even=False, key_heads=4)["blocks"] == 32 * 8
    assert sm90_plan(num_queries=100, heads=2, key_heads=1)["blocks"] == 4
    assert (
        sm90_plan("bwd_dkdv", head_dim=256)["blocks"]
        == sm90_plan("bwd_dq", bounds_only=False)["blocks"]
        == 132
    )
    # Wide heads with a score_mod or an elementwise mask keep one tile per block.
    assert sm90_plan("bwd_dkdv", head_dim=256, bounds_only=False)["blocks"] == 64 * 32
    assert sm90_plan("bwd_dq", head_dim=256, elementwise_mask=True)["blocks"] == 32 * 32
    # Parts of a dense gradient are 128 x 128, and their blocks persistent.
    dense = sm90_plan(
        "bwd_dbias", adds="rows", num_queries=300, num_keys=140, sequences=1, heads=4, key_heads=4
    )
    assert (dense["tiles"], dense["blocks"]) == (3 * 2, 24) and sm90_plan("bwd_dbias", adds="rows")[
        "blocks"
    ] == 132
    many = dict(heads=2**10, key_heads=2**10, num_queries=128, num_keys=128)
    assert sm90_plan(sequences=2**20 - 1, **many)["why_not"] is None
    assert sm90_plan(sequences=2**20, **many)["why_not"] == "more than 2^30 tiles"


@needs_bindings
@pytest.mark.parametrize(
    ("keys", "changed"),
    [
        (80, {}),
        (80, {"even": False, "head_dim": 136, "left_window": True}),
        (80, {"padded": True, "value_dim": 8}),
        (64, {"bounds_only": False}),
        (64, {"elementwise_mask": True}),
        (64, {"adds": "rows"}),
        (128, {"head_dim": 128, "value_dim": 128}),
    ],
)
def test_wide_heads_have_tiles_of_80_keys_with_bounds_only(
    keys: int, changed: dict[str, Any]
) -> None:
    assert sm90_plan(**{"head_dim": 256, "value_dim": 256} | changed)["streamed"] == keys


@needs_bindings
@pytest.mark.parametrize(
    ("consumers", "changed"),
    [
        (3, {}),
        (3, {"dtype": "float16", "value_dim": 40, "key_heads": 2}),
        (3, {"padded": True}),
        (3, {"even": False, "left_window": True}),
        (3, {"even": False, "num_queries": 3960}),  # 31 tiles for two consumers cannot be paired
        (3, {"even": False}),
        (3, {"even": False, "num_queries": 3072, "num_keys": 3072}),
        # Pairs of two consumers: their rounds are full, and they waste less of the diagonal.
        (2, {"even": False, "num_queries": 2048, "num_keys": 2048}),
        (2, {"even": False, "sequences": 1}),
        (2, {"bounds_only": False}),
        (2, {"elementwise_mask": True}),
        (2, {"value_dim": 72}),
        (2, {"num_queries": 197, "sequences": 64}),  # two tiles of 192 rows or of 128
        (3, {"num_queries": 300, "sequences": 64}),
        (
            2,
            {"num_queries": 1024, "sequences": 1},
            # Six tiles per head would leave a quarter of the multiprocessors idle.
        ),
        (3, {"num_queries": 1152, "sequences": 1}),
    ],
)
def test_three_consumers_need_faster_tiles(consumers: int, changed: dict[str, Any]) -> None:
    """Head dim is 64, bounds only.

    Tiles of 192 queries must finish sooner than tiles of 128.
    """
    plan = sm90_plan(**{"head_dim": 64, "value_dim": 64} | changed)
    assert plan["consumers"] == consumers and not (consumers == 3 and plan["paired"])
    assert plan["tiles"] == -(-changed.get("num_queries", 4096) // (64 * consumers))


@needs_bindings
@pytest.mark.parametrize(
    ("blocks", "section", "changed"),
    [
        (132, 32, {}),
        (132, 33, {"heads": 33, "key_heads": 33}),
        (132, 64, {"num_queries": 1900, "num_keys": 1900, "heads": 32, "key_heads": 32}),
        (132, 48, {"num_keys": 8192, "heads": 24, "key_heads": 24}),
        (132, 48, {"num_keys": 65536, "left_window": True, "heads": 24, "key_heads": 24}),
        (2, 32, {"multiprocessors": 2}),
        # One block per tile: long tiles, where a start matters less; keys that lengths give.
        (22 * 32, 11, {"num_keys": 8193}),
        (22 * 32, 32, {"padded": True}),
        (80, 40, {"num_queries": 192, "heads": 40, "key_heads": 40}),
    ],
)
def test_three_consumers_take_uneven_tiles_in_snake_order(
    blocks: int, section: int, changed: dict[str, Any]
) -> None:
    plan = sm90_plan(**{"head_dim": 64, "value_dim": 64, "even": False} | changed)
    assert plan["consumers"] == 3 and (plan["blocks"], plan["section"]) == (blocks, section)


@needs_bindings
@pytest.mark.parametrize(
    ("pass_", "dtype", "head_dim", "bounds_only", "head_class", "has_score_mod"),
    [
        ("forward", "bfloat16", 40, True, 64, False),
        ("forward", "float16", 65, True, 128, False),
        ("forward", "float16", 160, False, 256, True),
        (
            "forward",
            "float32",
            65,
            True,
            256,
            True,
        ),  # bounds-only kernels do not support float32 or head dim 128
        ("bwd_dq", "bfloat16", 128, True, 128, False),
        ("bwd_dq", "bfloat16", 256, True, 256, True),
        ("bwd_dkdv", "bfloat16", 64, True, 64, False),
        ("bwd_dkdv", "bfloat16", 128, True, 128, True),
        ("bwd_dkdv", "float16", 64, True, 64, True),
        ("bwd_dbias", "bfloat16", 64, False, 256, True),
    ],
)
def test_attention_kernel_depends_on_dtype_and_head_dim(
    pass_: str, dtype: str, head_dim: int, bounds_only: bool, head_class: int, has_score_mod: bool
) -> None:
    from pytransformer import _C

    chosen = _C.cuda_sm80_attention_plan(pass_, dtype, head_dim, 8, bounds_only, False)
    assert (chosen["head_class"], chosen["has_score_mod"]) == (head_class, has_score_mod)


@needs_bindings
def test_every_attention_kernel_fits_every_gpu() -> None:
    """This covers sm_80 and later: sm_120 has 99 KB per block."""
    from pytransformer import _C

    for pass_, dtype in itertools.product(
        ("forward", "bwd_dq", "bwd_dkdv", "bwd_dbias"), ("float32", "bfloat16", "float16")
    ):
        for head_dim, bounds_only in itertools.product((8, 64, 72, 128, 160, 256), (False, True)):
            chosen = _C.cuda_sm80_attention_plan(
                pass_, dtype, head_dim, head_dim, bounds_only, True
            )
            assert (
                chosen["smem_bytes"] <= 99 * 1024
                and chosen["threads"] <= 256
                and head_dim <= chosen["head_class"]
            )


# ---- products for sm_90a


def matmul_plan(
    rows: int = 8192, columns: int = 16384, depth: int = 4096, **changed: Any
) -> dict[str, Any]:
    from pytransformer import _C

    return _C.cuda_matmul_plan(
        rows, columns, depth, **({"dtype": "bfloat16", "layout": "nt"} | changed)
    )


@needs_bindings
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"layout": "nn", "dtype": "float16", "depth": 13}, None),
        ({"layout": "tn", "columns": 5}, None),
        ({"gated": True}, None),
        ({"dtype": "float32"}, "float32"),
        ({"layout": "tt"}, "both operands"),
        ({"layout": "nn", "gated": True}, "a gated product is of rows with rows"),
        ({"rows": 0}, "nothing to multiply"),
        ({"rows": 2**31}, "a side of 2^31"),
        ({"rows": 2**30, "columns": 2**30}, "more than 2^31 tiles"),
    ],
)
def test_sm90_gemm_supports_listed_operands(changed: dict[str, Any], reason: str | None) -> None:
    found = matmul_plan(**changed)["why_not"]
    assert found is None if reason is None else found is not None and reason in found


@needs_bindings
def test_gemm_blocks_share_tiles() -> None:
    """Blocks are persistent; tiles are 128 x 256, or 128 columns if two products share them.

    Groups have 16 rows of tiles.
    """
    large, few, gated = matmul_plan(), matmul_plan(rows=100, columns=300), matmul_plan(gated=True)
    assert (large["down"], large["across"], large["group"], large["blocks"], large["halves"]) == (
        64,
        64,
        16,
        132,
        2,
    )
    assert (few["down"], few["across"], few["group"], few["blocks"], few["halves"]) == (
        1,
        3,
        1,
        3,
        1,
    )
    assert (gated["down"], gated["across"], gated["halves"]) == (64, 128, 2)


@needs_bindings
@pytest.mark.parametrize(
    ("rows", "columns", "gated", "halves", "tiles"),
    [
        (
            1024,
            2048,
            False,
            1,
            128,
        ),  # 64 wide tiles would leave more than half of 132 multiprocessors idle
        (1024, 2112, False, 2, 72),  # 72: narrow ones would need two rounds
        (2048, 2048, False, 2, 128),
        (2048, 2304, False, 1, 288),  # 144: the second round would be almost empty
        (2048, 3072, False, 1, 384),  # 192 of two rounds' 264: just enough
        (2048, 3328, False, 2, 208),
        (2048, 1024, True, 2, 128),
        (1024, 1024, True, 1, 128),
        (65536, 128, False, 1, 512),  # wide tiles would be at most half full
        (8192, 4096, False, 2, 1024),
    ],
)
def test_gemm_tile_width_depends_on_occupancy(
    rows: int, columns: int, gated: bool, halves: int, tiles: int
) -> None:
    """Tiles are half as wide if wide ones leave multiprocessors idle and narrow ones are faster."""
    found = matmul_plan(rows=rows, columns=columns, gated=gated)
    assert (found["halves"], found["down"] * found["across"]) == (halves, tiles)
    assert found["blocks"] == min(tiles, 132)


@needs_bindings
def test_cublas_runs_every_gemm_by_default() -> None:
    """A measured GPU run may change the default; forced kernels run ours."""
    assert matmul_plan()["use_cublas"] and not matmul_plan(ours=True)["use_cublas"]
    assert matmul_plan(rows=16)["use_cublas"] and not matmul_plan(rows=16, ours=True)["use_cublas"]


@needs_bindings
@pytest.mark.parametrize(
    ("rows", "classes", "smooth", "tiles", "partials", "blocks"),
    [
        (4096, 131072, False, 1024, 2 * 1024 * 4096, 128),
        (1, 1, False, 1, 2, 1),
        (33, 129, True, 2, 3 * 2 * 33, 2),
        (2**30, 2**30, False, 2**23, 2**54, 2**25),
    ],
)
def test_cross_entropy_partials_per_tile(
    rows: int, classes: int, smooth: bool, tiles: int, partials: int, blocks: int
) -> None:
    """A row and 128 classes have two or three numbers."""
    from pytransformer import _C

    plan = _C.cuda_cross_entropy_plan(rows, classes, smooth)
    assert (plan["tiles"], plan["partials"], plan["blocks"]) == (tiles, partials, blocks) and plan[
        "smem_bytes"
    ] <= 48 * 1024


# ---- rotary positions


def rotary_plan(rows: int, dim: int, turned: int, **changed: Any) -> dict[str, Any]:
    from pytransformer import _C

    return _C.cuda_rotary_plan(rows, dim, turned, **changed)


@needs_bindings
@pytest.mark.parametrize(
    ("dim", "turned", "changed", "whole", "chunks", "lanes"),
    [
        (64, 64, {}, True, (4, 4), 4),
        (80, 80, {}, True, (5, 5), 8),
        (128, 128, {}, True, (8, 8), 8),
        (128, 32, {}, True, (2, 8), 8),
        (256, 256, {}, True, (16, 16), 16),
        (512, 512, {"interleaved": True}, True, (32, 32), 32),
        (16, 16, {}, True, (1, 1), 4),
        (64, 0, {}, True, (0, 4), 4),
        (96, 24, {"interleaved": True}, True, (2, 7), 8),
        (96, 24, {}, False, (2, 7), 32),  # the second half begins off 16 bytes
        (512, 8, {"interleaved": True}, False, (1, 33), 32),  # one chunk more than a warp has lanes
        (66, 66, {}, False, (5, 5), 32),
        (128, 128, {"aligned": False}, False, (8, 8), 32),
    ],
)
def test_rotary_chunks_per_head(
    dim: int, turned: int, changed: dict[str, Any], whole: bool, chunks: tuple[int, int], lanes: int
) -> None:
    """A lane has 16 columns, with both elements of a pair.

    Rows of other widths are read by element.
    """
    found = rotary_plan(1000, dim, turned, **changed)
    assert (found["whole"], (found["pair_chunks"], found["chunks"]), found["lanes"]) == (
        whole,
        chunks,
        lanes,
    )


@needs_bindings
def test_rotary_blocks_share_heads() -> None:
    assert rotary_plan(33, 128, 128)["blocks"] == 3 and rotary_plan(33, 128, 128)["smem_bytes"] == 0
    assert rotary_plan(2**31 - 2**14, 64, 64)["blocks"] == 2**26 - 2**9
    few, many = (rotary_plan(rows, 128, 128, sums=True) for rows in (33, 10**6))
    assert (few["blocks"], many["blocks"], many["smem_bytes"]) == (3, 132 * 4, 16 * 128 * 4)
    assert rotary_plan(10**6, 66, 66, sums=True, multiprocessors=2) | {
        "smem_bytes": 0,
        "blocks": 8,
    } == rotary_plan(10**6, 66, 66, sums=True, multiprocessors=2)


@needs_bindings
def test_bad_dtype_raises() -> None:
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got float64"):
        plan(1, 8, x="float64")
