# SPDX-License-Identifier: Apache-2.0
"""Paged keys and values on the emulated backend "cuda": bits of the contiguous path, reads.

The fuzzer of test_attention.py compares with float64.
"""

from __future__ import annotations

from typing import Any

import page_problems
import pytest
import torch
from page_problems import BF16, F16, F32, attend, draw, inputs, same, same_packed

import pytransformer as pt
from pytransformer.ops.attention import attention_op

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def keywords(lq: int, width: int) -> dict[str, dict[str, Any]]:
    """Return keywords for a call with this many keys."""
    return {
        "gap, sinks": {"causal": "bottom_right", "window": (30, 0), "global_keys": 5,
            "sinks": draw(4, seed=3)},
        "T5, softcap": {"bias": pt.RelativePositionBias(draw(16, 4, seed=4), max_distance=60),
            "softcap": 5.0},
        "ALiBi, padding": {
            "bias": pt.AlibiBias(draw(4, seed=5).abs()),
            "attn_mask": torch.arange(width) >= torch.tensor([40, 0, 3])[:, None, None, None],
        },
        "mask, bias, dropout": {
            "attn_mask": draw(3, 1, lq, width, seed=6) > -0.5,
            "bias": draw(1, 4, lq, width, seed=7), "dropout_p": 0.3, "dropout_seed": 7,
        },
        "segments": {
            "query_segments": torch.arange(lq).remainder(3).expand(3, lq).contiguous(),
            "key_segments": torch.arange(width).remainder(3).expand(3, width).contiguous(),
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("lq", "page_size", "dtype"),
    [(1, 1, F32), (1, 16, BF16), (5, 7, F16), (5, 128, F32), (40, 7, BF16), (40, 32, F16)],
)
def test_pages_equal_the_contiguous_path_bit_for_bit(
    lq: int, page_size: int, dtype: torch.dtype
) -> None:
    """A page spans several tiles, or a tile several pages; one page size is no power of two."""
    problem = inputs(lq, page_size, dtype)
    assert same(*problem)
    assert same(*problem, causal="bottom_right", window=(50, 3))


@pytest.mark.parametrize("name", keywords(1, 1))
@pytest.mark.parametrize(("lq", "dtype"), [(2, BF16), (40, F32)])
def test_pages_with_other_keywords_equal_the_contiguous_path(
    lq: int, dtype: torch.dtype, name: str
) -> None:
    problem = inputs(lq, 16, dtype)
    assert same(*problem, **keywords(lq, problem[1].num_keys)[name])


def test_pages_with_a_block_mask_equal_the_contiguous_path() -> None:
    problem = inputs(40, 16, F32)
    mask = pt.BlockMask.from_function(
        lambda b, h, i, j: j // 32 != 1, None, None, 40, problem[1].num_keys, block_size=32
    )
    assert same(*problem, attn_mask=mask, causal="bottom_right")


@pytest.mark.parametrize(
    ("queries", "page_size", "dtype"),
    [((1, 1, 1), 16, BF16), ((5, 0, 1), 7, F32), ((40, 3, 1), 7, F16), ((70, 0, 40), 128, BF16)],
    ids=str,
)
def test_packed_queries_equal_the_contiguous_path_bit_for_bit(
    queries: tuple[int, ...], page_size: int, dtype: torch.dtype
) -> None:
    for options in ({}, {"causal": "bottom_right", "window": (50, 3), "softcap": 3.0}):
        assert same_packed(queries, page_size, dtype, **options)


@pytest.mark.parametrize("name", ["gap, sinks", "T5, softcap"])
@pytest.mark.parametrize("queries", [(2, 0, 1), (40, 1, 7)], ids=str)
def test_packed_queries_with_other_keywords(queries: tuple[int, ...], name: str) -> None:
    assert same_packed(queries, 16, BF16, **keywords(1, 1)[name])


@pytest.mark.usefixtures("sm90")
def test_portable_kernels_run_on_sm90() -> None:
    query, pools, lengths = inputs(40, 16, BF16)
    before = torch.ops.pytransformer_C.emulator_products()
    attend(query, *pools.tensors, lengths, page_table=pools.table)
    assert torch.ops.pytransformer_C.emulator_products() == before
    options: dict[str, Any] = {"page_table": pools.table, "key_lengths": lengths, "backend": "cuda"}
    (note,) = (
        n
        for n in pt.explain("attention", query, *pools.tensors, **options).notes
        if n.startswith("cuda:")
    )
    assert "forward by the portable kernels: keys in pages" in note and "d_" not in note


def test_table_entries_outside_the_pool_raise_or_are_clamped() -> None:
    """The op raises if it checks values, as with PYTRANSFORMER_CHECK=1 on a GPU; else it clamps."""
    for lq in (1, 40):
        query, pools, lengths = inputs(lq, 16, BF16)
        assert page_problems.clamped(query, pools, lengths)
        table, last = pools.table.clone(), pools.tensors[0].shape[0] - 1
        table[0, 3] = -5
        with pytest.raises(
            ValueError, match=rf"page_table\[0, 3\] must be a page from 0 to {last}, got -5"
        ):
            attend(query, *pools.tensors, lengths, page_table=table)


def test_backward_is_refused() -> None:
    query, pools, lengths = inputs(1, 16, F32)
    a = attention_op.prepare(query, *pools.tensors, page_table=pools.table, key_lengths=lengths)[0]
    out, lse = attention_op(a, "cuda", True)
    expected = [True] + [False] * (len(attention_op.differentiable) - 1)
    with pytest.raises(ValueError, match="page_table has no gradients"):
        attention_op.bwd(out, None, *a, out, lse, expected, "cuda", True)


def test_empty_keys_and_pages() -> None:
    query, nothing = draw(3, 4, 2, 16), torch.zeros(3, dtype=torch.int64)
    for pages, width in ((0, 0), (0, 2), (3, 0), (3, 2)):
        pools = torch.full((pages, 2, 16, 16), torch.nan), torch.full((pages, 2, 16, 24), torch.nan)
        out, lse = attend(query, *pools, nothing, page_table=torch.full((3, width), 99))
        assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.unpoisoned
def test_opcheck() -> None:
    query, pools, lengths = inputs(1, 16, BF16)
    a = attention_op.prepare(query, *pools.tensors, page_table=pools.table, key_lengths=lengths)[0]
    torch.library.opcheck(
        attention_op.fwd, (*a, "cuda", False), test_utils=("test_schema", "test_faketensor")
    )
