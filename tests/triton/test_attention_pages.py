# SPDX-License-Identifier: Apache-2.0
"""Paged keys and values in the interpreted Triton backend: bits, clamped tables, faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import every_third
from kernel_mutants import mutated
from torch import Tensor

import pytransformer as pt
from pytransformer.kernels.attention.configs import plan_forward
from pytransformer.ops._backends.gpu import attention as gpu_attention
from pytransformer.ops.attention import attention_op
from support.pages import Pools, in_pages

LK = 330  # five tiles and a tail; two splits in decode
LENGTHS = torch.tensor([LK, 0, 129])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(lq: int, page_size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Pools]:
    query, key, value = draw(3, 4, lq, 16), draw(3, 2, LK, 16, seed=1), draw(3, 2, LK, 24, seed=2)
    return query.to(dtype), in_pages(
        key.to(dtype), value.to(dtype), LENGTHS, page_size, seed=page_size
    )


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return pt.attention(
        query,
        key,
        value,
        key_lengths=LENGTHS,
        **options,
        return_lse=True,
        backend="triton",
        strict=True,
    )


def same(query: Tensor, pools: Pools, **options: Any) -> bool:
    found = attend(query, *pools.tensors, page_table=pools.table, **options)
    return all(map(torch.equal, found, attend(query, *pools.contiguous, **options)))


def keywords(width: int) -> dict[str, dict[str, Any]]:
    """Return keywords for a call with this many keys."""
    return {
        "nothing": {},
        "causal": {"causal": "bottom_right"},
        "gap": {
            "causal": "bottom_right",
            "window": (60, 0),
            "global_keys": 5,
            "sinks": draw(4, seed=3),
        },
        "biases": {
            "bias": pt.RelativePositionBias(draw(16, 4, seed=4), max_distance=200),
            "softcap": 5.0,
        },
        "padding": {
            "attn_mask": torch.arange(width) >= torch.tensor([70, 0, 3])[:, None, None, None]
        },
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    }


@pytest.mark.parametrize(
    ("lq", "page_size"), [(1, 1), (1, 7), (1, 16), (1, 128), (5, 16), (40, 7), (40, 16), (40, 64)]
)
def test_pages_equal_the_contiguous_path_bit_for_bit(lq: int, page_size: int) -> None:
    """Run decode and prefill; a page spans several tiles, or a tile several pages."""
    for dtype in (torch.float32, torch.bfloat16):
        query, pools = inputs(lq, page_size, dtype)
        assert same(query, pools, causal="bottom_right")
    a = attention_op.prepare(query, *pools.tensors, page_table=pools.table, key_lengths=LENGTHS)[0]
    assert (plan_forward(a).decode is not None) == (lq < 40)


@pytest.mark.parametrize("name", keywords(1))
@pytest.mark.parametrize("lq", [1, 40])
def test_pages_with_other_keywords_equal_the_contiguous_path(lq: int, name: str) -> None:
    query, pools = inputs(lq, 16)
    assert same(query, pools, **keywords(pools.num_keys)[name])


def test_pages_with_a_block_mask_equal_the_contiguous_path() -> None:
    query, pools = inputs(40, 16)
    mask = pt.BlockMask.from_function(
        lambda b, h, i, j: j // 64 != 1, None, None, 40, pools.num_keys, block_size=64
    )
    assert same(query, pools, attn_mask=mask, causal="bottom_right")


def same_packed(
    queries: tuple[int, ...], page_size: int, dtype: torch.dtype, **options: Any
) -> bool:
    """Compare packed queries over pages with packed queries over contiguous keys."""
    _, pools = inputs(1, page_size, dtype)
    offsets = torch.tensor([0, *queries]).cumsum(0)
    query = draw(sum(queries) + 1, 4, 16, seed=5).to(dtype)
    given = {**options, "return_lse": True, "backend": "triton", "strict": True}
    paged = {"page_table": pools.table, "key_lengths": LENGTHS, **given}
    found = pt.attention_varlen(query, *pools.tensors, offsets, None, max(queries), None, **paged)
    key, value = (
        torch.cat([rows[:, :n] for rows, n in zip(t, LENGTHS.tolist())], 1).transpose(0, 1)
        for t in pools.contiguous
    )
    cu_k = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
    longest = max(queries), pools.num_keys
    want = pt.attention_varlen(query, key, value, offsets, cu_k, *longest, **given)
    return all(map(torch.equal, found, want))


@pytest.mark.parametrize(("queries", "page_size"), [((1, 3, 1), 7), ((20, 0, 1), 64)], ids=str)
def test_packed_queries_equal_the_contiguous_path_bit_for_bit(
    queries: tuple[int, ...], page_size: int
) -> None:
    """Run decode, speculative steps beside an idle sequence, and chunked prefill."""
    assert same_packed(queries, page_size, torch.float32, causal="bottom_right")


@pytest.mark.parametrize("name", ["gap", "biases"])
def test_packed_queries_with_other_keywords_equal_the_contiguous_path(name: str) -> None:
    assert same_packed((1, 3, 0), 16, torch.float32, **keywords(1)[name])


@pytest.mark.parametrize("lq", [1, 40])
def test_unchecked_tables_are_clamped(lq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check, as on a GPU, an entry outside the pool selects the nearest page."""
    query, pools = inputs(lq, 16)
    table, clamped = pools.table.to(torch.int64, copy=True), pools.table.to(torch.int64, copy=True)
    table[0, 3], table[0, 4], table[2, 0] = -5, 2**40, pools.tensors[0].shape[0]
    clamped[0, 3], clamped[0, 4], clamped[2, 0] = (
        0,
        -1 + pools.tensors[0].shape[0],
        -1 + pools.tensors[0].shape[0],
    )
    filled = [t.nan_to_num(0.5) for t in pools.tensors]
    want = attend(query, *filled, page_table=clamped)
    with pytest.raises(ValueError, match=r"page_table\[0, 3\] must be a page"):
        attend(query, *filled, page_table=table)
    monkeypatch.setattr(gpu_attention, "looks_at_values", lambda device: False)
    assert all(map(torch.equal, attend(query, *filled, page_table=table), want))


def test_backward_is_refused() -> None:
    query, pools = inputs(1, 16)
    a = attention_op.prepare(query, *pools.tensors, page_table=pools.table, key_lengths=LENGTHS)[0]
    out, lse = attention_op(a, "triton", True)
    expected = [True] + [False] * (len(attention_op.differentiable) - 1)
    with pytest.raises(ValueError, match="page_table has no gradients"):
        attention_op.bwd(out, None, *a, out, lse, expected, "triton", True)


FAULTS = {
    "page of the next key": ("tiles.py", "+ j // C.PAGE_SIZE", "+ (j + 1) // C.PAGE_SIZE"),
    "table of the first sequence": (
        "tiles.py",
        "i_b.to(tl.int64) * p.pages.width",
        "0 * p.pages.width",
    ),
    "row not within its page": (
        "tiles.py",
        "(j % C.PAGE_SIZE).to",
        "(j // C.PAGE_SIZE % C.PAGE_SIZE).to",
    ),
    "last page never": ("tiles.py", "p.pages.count - 1).to", "p.pages.count - 2).to"),
    "values of the batch entry": (
        "fwd.py",
        "V = at_key_head(V, strides.v, i_b, i_hk, C)",
        "V = at_head(V, strides.v, i_b, i_hk)",
    ),
}


PACKED_FAULTS = {
    "lengths of padded queries only": (
        "mask.py",
        "if p.key_lengths is not None:",
        "if p.key_lengths is not None and p.cu_queries is None:",
    ),
    "table of the first sequence": FAULTS["table of the first sequence"],
}


@pytest.mark.parametrize("name", PACKED_FAULTS)
def test_faults_of_packed_queries_are_detected(name: str, tmp_path: Path) -> None:
    assert same_packed((1, 3, 1), 16, torch.float32)
    with mutated("attention", *PACKED_FAULTS[name], tmp_path):
        assert not same_packed((1, 3, 1), 16, torch.float32)


@pytest.mark.parametrize("name", every_third(FAULTS))
def test_faults_are_detected(name: str, tmp_path: Path) -> None:
    checks: list[Callable[[], bool]] = [
        lambda page_size=n: same(*inputs(1, page_size)) for n in (16, 7)
    ]
    assert all(check() for check in checks)
    with mutated("attention", *FAULTS[name], tmp_path):
        assert not all(check() for check in checks)
