# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv compiled on a GPU, for bench/gpu.sh; test_rotary.py runs interpreted."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.testing import bounds
from support import fuzz_rotary, rotary_eight_bits
from support.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 12, 200
DRAWN = [
    n for n in range(RANDOM) if fuzz_rotary.draw(SEED, n).dtype != torch.float64
]  # the backend does not support float64


@pytest.mark.parametrize("number", DRAWN)
def test_random_rotary(number: int) -> None:
    problem = fuzz_rotary.draw(SEED, number)
    _, wrong = fuzz_rotary.judge(problem, "triton", True, "cuda")
    assert not wrong, "\n".join([str(problem), *wrong])


@pytest.mark.parametrize("dims, page, turned", [((64, 128), 4, 32), ((34, 5), None, 0)])
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_into_eight_bits(
    eight: torch.dtype, dims: tuple[int, int], page: int | None, turned: int
) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert rotary_eight_bits.wrong("triton", eight, dtype, dims, page, turned, "cuda") == []


def test_rotary_addresses_beyond_32_bits() -> None:
    """Rows are far apart, and there are more than 2^31 elements."""
    x = torch.zeros(1, 2, 2**31 // 256 + 40, 128, device="cuda", dtype=torch.bfloat16)
    x[:, 1, -40:] = torch.randn(40, 128, device="cuda")
    positions = torch.arange(x.shape[2], device="cuda") % 4096
    cos, sin = pt.RotaryPositions(128).tables(positions, dtype=torch.bfloat16)
    y = pt.rotary(x, cos=cos, sin=sin, backend="triton", strict=True)[:, 1:, -40:]
    assert bounds.agree(
        y, pt.rotary(x[:, 1:, -40:], cos=cos[-40:], sin=sin[-40:], backend="reference")
    )


def test_rotary_in_a_cuda_graph() -> None:
    x, positions = (
        torch.randn(2, 4, 9, 64, device="cuda", dtype=torch.bfloat16),
        torch.arange(9, device="cuda"),
    )
    weight = torch.ones(64, device="cuda")
    check_cuda_graph(lambda: pt.rotary(x, positions, weight=weight, backend="triton"), x)
