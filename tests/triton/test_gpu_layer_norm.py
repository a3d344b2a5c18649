# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm compiled on a GPU, for bench/gpu.sh.

The other files of this folder run interpreted.
"""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.reference.philox import TAG_ADD_NORM, column_keep_mask
from pytransformer.testing import bounds
from pytransformer.testing.cases import Case, cases
from support import fuzz_layer_norm
from support.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 11, 200
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (
    32,
    50,
    128,
    200,
    512,
    1000,
    2048,
    4096,
    5120,
    12288,
    16384,
    20000,
)  # each class of tile, full and with a tail
DRAWN = [
    n for n in range(RANDOM) if fuzz_layer_norm.draw(SEED, n).dtype != torch.float64
]  # the backend does not support float64


def _check(problem: fuzz_layer_norm.Problem) -> None:
    _, wrong = fuzz_layer_norm.judge(problem, "triton", True, "cuda")
    assert not wrong, "\n".join([str(problem), *wrong])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    "case", [c for op in fuzz_layer_norm.KINDS for c in cases(op)], ids=lambda c: c.name
)
def test_layer_norm_case(case: Case, dtype: torch.dtype) -> None:
    _check(fuzz_layer_norm.of_case(case, dtype))


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_widths(width: int) -> None:
    for case in cases("add_norm"):
        for dtype in (torch.bfloat16, torch.float32):
            _check(fuzz_layer_norm.of_case(case.resize(rows=300, d=width), dtype))


@pytest.mark.parametrize("number", DRAWN)
def test_random_layer_norm(number: int) -> None:
    _check(fuzz_layer_norm.draw(SEED, number))


def test_layer_norm_dropout_mask() -> None:
    seed = torch.tensor(987654321 << 20, device="cuda")
    for columns in (33, 1000, 20000):
        x = torch.ones(300, columns, device="cuda", dtype=torch.bfloat16)
        _, stream = pt.add_norm(x, None, None, dropout_p=0.3, dropout_seed=seed, backend="triton")
        assert torch.equal(
            (stream != 0).cpu(), column_keep_mask(seed.cpu(), 0.3, *x.shape, TAG_ADD_NORM)
        )


def test_layer_norm_addresses_beyond_32_bits() -> None:
    """Rows are far apart, and there are more than 2^31 elements."""
    x = torch.zeros(2**31 // 1024 + 40, 1024, device="cuda", dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, 1024, device="cuda")
    y = pt.layer_norm(x, 1024, backend="triton", strict=True)
    assert bounds.relative_error(y[-40:], pt.layer_norm(x[-40:], 1024, backend="reference")) < 0.01


def test_layer_norm_in_a_cuda_graph() -> None:
    x, seed = (
        torch.randn(64, 512, device="cuda", dtype=torch.bfloat16),
        torch.tensor(1, device="cuda"),
    )
    check_cuda_graph(
        lambda: pt.add_norm(x, x, None, dropout_p=0.5, dropout_seed=seed, backend="triton")[1], seed
    )
