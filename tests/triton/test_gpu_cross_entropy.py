# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy compiled on a GPU, for bench/gpu.sh; other files here run interpreted."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.testing import bounds
from pytransformer.testing.cases import cases
from support import fuzz_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 11, 200
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRAWN = [
    n for n in range(RANDOM) if fuzz_cross_entropy.draw(SEED, n).dtype != torch.float64
]  # the backend does not support float64


def _check(problem: fuzz_cross_entropy.Problem) -> None:
    _, wrong = fuzz_cross_entropy.judge(problem, "triton", True, "cuda")
    assert not wrong, "\n".join([str(problem), *wrong])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("classes", [131, 1000, 32000])
def test_cross_entropy_case(classes: int, dtype: torch.dtype) -> None:
    for case in cases("linear_cross_entropy"):
        for reduction in fuzz_cross_entropy.REDUCTIONS:
            _check(
                fuzz_cross_entropy.of_case(case.resize(classes=classes), dtype, reduction=reduction)
            )


@pytest.mark.parametrize("number", DRAWN)
def test_random_cross_entropy(number: int) -> None:
    _check(fuzz_cross_entropy.draw(SEED, number))


# guards keep all memory until the test ends: 3.05 GiB of logits and their gradients
@pytest.mark.unpoisoned
def test_cross_entropy_never_holds_all_logits() -> None:
    """16,384 rows of 128k classes need 8 GiB of float32 logits; one GiB exists at a time.

    Addresses exceed 32 bits.
    """
    x = torch.randn(16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(131072, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 131072, (16384,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = pt.linear_cross_entropy(x, w, target, backend="triton", strict=True)
    loss.backward()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
    with torch.no_grad():
        z = x[:64].float() @ w.float().t()
        want = torch.logsumexp(z, 1) - z.gather(1, target[:64, None])[:, 0]
        ours = pt.linear_cross_entropy(x[:64], w, target[:64], reduction="none", backend="triton")
    assert bounds.relative_error(ours, want) < 1e-5
