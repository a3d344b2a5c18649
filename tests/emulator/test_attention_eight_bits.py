# SPDX-License-Identifier: Apache-2.0
"""8-bit keys and values on the emulated backend "cuda".

Random problems are in test_attention.py; tests/ops/test_eight_bits.py covers every backend.
"""

from __future__ import annotations

from typing import Any

import eight_bit_problems
import pytest
import torch
from page_problems import BF16, F16, F32, Problem, draw

import pytransformer as pt
from pytransformer.ops.attention import attention_op

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


@pytest.mark.parametrize(
    "problem", list(eight_bit_problems.problems()), ids=lambda problem: problem.name
)
def test_each_problem_is_right(problem: Problem) -> None:
    assert eight_bit_problems.wrong(problem) == []


def inputs(
    lq: int, dim: int = 64, dtype: torch.dtype = BF16, keys: int = 600
) -> tuple[Any, dict[str, torch.Tensor]]:
    (k, ks), (v, vs) = (pt.quantize_kv(draw(1, 2, keys, dim, seed=n), torch.int8) for n in (1, 2))
    return (draw(1, 4, lq, dim).to(dtype), k, v), {"key_scale": ks, "value_scale": vs}


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("lq", [1, 20])
def test_portable_kernels_run_on_sm90(lq: int) -> None:
    args, scales = inputs(lq)
    before = torch.ops.pytransformer_C.emulator_products()
    pt.attention(*args, **scales, backend="cuda", strict=True)  # type: ignore[call-overload]
    assert torch.ops.pytransformer_C.emulator_products() == before
    (note,) = (
        n
        for n in pt.explain("attention", *args, **scales, backend="cuda").notes
        if n.startswith("cuda:")
    )
    told = (
        "of so few queries the keys are split over blocks"
        if lq == 1
        else "keys and values in eight bits are widened by"
    )
    assert f"forward by the portable kernels: {told}" in note and "d_" not in note


@pytest.mark.parametrize(("lq", "keys", "dtype"), [(1, 300, F32), (40, 70, BF16)])
def test_broadcast_scales_are_read_in_place(lq: int, keys: int, dtype: torch.dtype) -> None:
    """One scale per head and one in all have strides of 0."""
    args, scales = inputs(lq, dtype=dtype, keys=keys)
    for shape in ((), (2, 1), (1, 1, keys)):
        given = {name: draw(*shape, seed=5).abs() * 0.01 for name in scales}
        whole = {name: t.expand(1, 2, keys).contiguous() for name, t in given.items()}
        both = [pt.attention(*args, **s, backend="cuda", strict=True) for s in (given, whole)]  # type: ignore[call-overload]
        assert torch.equal(*both)


def test_unaligned_rows_are_copied() -> None:
    """Rows of 72 bytes, not a multiple of 16, are copied in every call."""
    args, scales = inputs(1, dim=72)
    found, even = (
        pt.explain("attention", *i[0], **i[1], backend="cuda").extra_bytes["cuda"]
        for i in ((args, scales), inputs(1))
    )
    splits = 4 * 4 * 3 * (72 - 64)
    assert found == even + 2 * 2 * 600 * 72 + 4 * 72 * 2 + splits


def test_backward_is_refused() -> None:
    args, scales = inputs(1, dtype=F16)
    a = attention_op.prepare(*args, **scales)[0]
    out, lse = attention_op(a, "cuda", True)
    with pytest.raises(ValueError, match="keys in eight bits have no gradients"):
        attention_op.bwd(
            out,
            None,
            *a,
            out,
            lse,
            [True] + [False] * (len(attention_op.differentiable) - 1),
            "cuda",
            True,
        )
