# SPDX-License-Identifier: Apache-2.0
"""8-bit keys and values in the interpreted Triton backend: decode, prefill, pages, faults.

tests/ops/test_eight_bits.py covers every backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import every_third
from kernel_mutants import mutated
from torch import Tensor

import pytransformer as pt
from pytransformer.kernels.attention.configs import plan_forward
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds, oracle
from support.pages import in_pages

LENGTHS = torch.tensor([150, 0, 97])
EIGHT = [torch.int8, torch.float8_e4m3fn]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(lq: int, query_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return values whose rows differ by four orders of magnitude."""
    spread = torch.logspace(-3, 1, 150)[
        torch.randperm(150, generator=torch.Generator().manual_seed(9))
    ][:, None]
    return (
        draw(3, 4, lq, 16).to(query_dtype),
        draw(3, 2, 150, 16, seed=1),
        draw(3, 2, 150, 24, seed=2) * spread,
    )


def wrong(
    eight: torch.dtype, query_dtype: torch.dtype, lq: int, page_size: int = 0, **options: Any
) -> list[str]:
    """Return the errors beyond the bound, against float64 on the dequantized values."""
    query, key, value = inputs(lq, query_dtype)
    (k, ks), (v, vs) = pt.quantize_kv(key, eight), pt.quantize_kv(value, eight)
    exact = [pt.dequantize_kv(*t, torch.float64) for t in ((k, ks), (v, vs))]
    options |= {"causal": "bottom_right"}
    more: dict[str, Any] = {}
    if page_size:
        pools = in_pages(key, value, LENGTHS, page_size, seed=4)
        (k, ks), (v, vs) = (pt.quantize_kv(t, eight) for t in pools.tensors)
        more["page_table"] = pools.table
    a = attention_op.prepare(
        query, k, v, key_scale=ks, value_scale=vs, key_lengths=LENGTHS, **options, **more
    )[0]
    assert (plan_forward(a).decode is not None) == (lq == 1)
    out = attention_op(a, "triton", True)[0]
    answer = oracle.solve(
        query,
        *exact,
        torch.zeros_like(out),
        torch.zeros(out.shape[:3]),
        key_lengths=LENGTHS,
        **options,
    )
    return [
        str(c) for c in bounds.check(answer, {"out": out}, query_dtype, "zero_mean") if not c.ok
    ]


@pytest.mark.parametrize("lq", [1, 40])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eight", EIGHT, ids=str)
def test_attention_within_the_bound_of_float64(
    eight: torch.dtype, query_dtype: torch.dtype, lq: int
) -> None:
    assert not wrong(eight, query_dtype, lq)
    assert not wrong(eight, query_dtype, lq, page_size=16, softcap=5.0, sinks=draw(4, seed=3))


FAULTS = {
    "value scale forgotten": ("fwd.py",
        "b_p = b_p * tl.trans(visible_rows(v_scale[:, None], m_s, p, C))", "pass"),
    "scale of the next key": ("tiles.py", "P += j.to(tl.int64) * strides.row",
        "P += tl.maximum(j - 1, 0).to(tl.int64) * strides.row"),
    "key scale of the values": ("tiles.py", "p.scales.value if VALUES else p.scales.key",
        "p.scales.value"),
    "e4m3 subnormals as zero": ("tiles.py", "half.to(tl.float32) * 256.0",
        "tl.where((bits & 0x78) == 0, 0.0, half.to(tl.float32) * 256)"),
    "sign lost": ("tiles.py", "((bits & 0x80) << 8)", "0"),
    "one bfloat16 for weights of float16": ("fwd.py",
        "acc = dot(narrow(b_p - high.to(tl.float32), tl.bfloat16), b_v, acc, C)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", every_third(FAULTS))
def test_faults_are_detected(name: str, tmp_path: Path) -> None:
    eight = torch.float8_e4m3fn
    with mutated("attention", *FAULTS[name], tmp_path):
        if name == "e4m3 subnormals as zero":
            rows = torch.full((1, 1, 32, 16), 3, dtype=torch.uint8).view(eight)
            one = torch.ones(())
            out = pt.attention(
                draw(1, 1, 1, 16), rows, rows, key_scale=one, value_scale=one, backend="triton"
            )
            assert not out.any(), "else 3/512"
        else:
            assert wrong(eight, torch.float16, 1) or wrong(eight, torch.float32, 1)
