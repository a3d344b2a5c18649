# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels round to bfloat16 and widen it like PyTorch, bit for bit, NaN included.

Subnormals may become zero: the rounding instruction (VCVTNEPS2BF16) neither reads nor writes them.
"""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt

TINY = torch.finfo(torch.bfloat16).tiny


def every_bfloat16() -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def stored_sum(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Return x + residual as stored in residual_out: added in float32, rounded to bfloat16."""
    weight = torch.ones(x.shape[-1])
    return pt.add_norm(x, residual, weight, backend="cpu", strict=True)[1]


@pytest.mark.parametrize("columns", [256, 250])  # full vectors, and a tail
def test_sums_are_rounded_to_nearest_even(columns: int) -> None:
    x = every_bfloat16()
    generator = torch.Generator().manual_seed(0)
    for shift in (
        0,
        7,
        8,
        9,
        15,
        16,
        17,
        30,
    ):  # exponents: 8 is halfway; 9 and more break the tie
        step = torch.where(torch.rand(x.shape, generator=generator) < 0.5, -1.0, 1.0) * 2.0**-shift
        odd = 1 + torch.randint(0, 128, x.shape, generator=generator) / 128
        for factor in (step, step * odd):
            residual = (x.float() * factor).bfloat16()
            n = x.numel() // columns * columns
            a, b = x[:n].view(-1, columns), residual[:n].view(-1, columns)
            got, want = stored_sum(a, b), (a.float() + b.float()).bfloat16()
            assert torch.equal(got.isnan(), want.isnan())
            normal = ~want.isnan()
            for t in (a, b, want):
                normal &= (t == 0) | (t.abs() >= TINY)
            assert normal.sum() > 0.9 * n
            assert torch.equal(got.view(torch.int16)[normal], want.view(torch.int16)[normal]), (
                shift,
                columns,
            )
            rest = ~normal & ~want.isnan()
            assert ((got - want)[rest].abs() <= 2 * TINY + want[rest].abs() / 256).all()


def test_every_nan_payload_remains_nan() -> None:
    x = every_bfloat16()
    x = x[x.isnan()]
    x = x[: x.numel() // 2 * 2].view(2, -1)
    assert stored_sum(x, torch.zeros_like(x)).isnan().all()
    # rounding alone would give zero or infinity
    payloads = torch.tensor(
        [0x7FFFFFFF, -1, 0x7FFF8000, 0x7FC00001, 0x7F800001, -0x7FFFFF], dtype=torch.int32
    ).repeat(4, 4)
    assert stored_sum(payloads.view(torch.float32), torch.zeros(4, 24).bfloat16()).isnan().all()
