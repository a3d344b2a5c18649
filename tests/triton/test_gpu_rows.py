"""The ops on rows on a GPU, compiled: what bench/gpu.sh runs beside test_gpu. (The other files here run interpreted.)"""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer.reference.philox import TAG_ADD_NORM, column_keep_mask
from pytransformer.testing import bounds, fuzz_cross_entropy, fuzz_norm
from pytransformer.testing.cases import Case, cases
from pytransformer.testing.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 11, 200
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (32, 50, 128, 200, 512, 1000, 2048, 4096, 5120, 12288, 16384, 20000)  # each kind of tile, whole and with a tail
DRAWN = [n for n in range(RANDOM) if fuzz_norm.draw(SEED, n).dtype != torch.float64]  # the tier has no float64

LOSSES = [n for n in range(RANDOM) if fuzz_cross_entropy.draw(SEED, n).dtype != torch.float64]


def _norm(problem: fuzz_norm.Problem) -> None:
    _, wrong = fuzz_norm.judge(problem, "triton", True, "cuda")
    assert not wrong, "\n".join([str(problem), *wrong])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [c for op in fuzz_norm.KINDS for c in cases(op)], ids=lambda c: c.name)
def test_norm_case(case: Case, dtype: torch.dtype) -> None:
    _norm(fuzz_norm.of_case(case, dtype))


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_widths(width: int) -> None:
    for case in cases("add_norm"):
        for dtype in (torch.bfloat16, torch.float32):
            _norm(fuzz_norm.of_case(case.resize(rows=300, d=width), dtype))


@pytest.mark.parametrize("number", DRAWN)
def test_random_norm(number: int) -> None:
    _norm(fuzz_norm.draw(SEED, number))


def test_norm_dropout_mask() -> None:
    seed = torch.tensor(987654321 << 20, device="cuda")
    for columns in (33, 1000, 20000):
        x = torch.ones(300, columns, device="cuda", dtype=torch.bfloat16)
        _, stream = pt.add_norm(x, None, None, dropout_p=0.3, dropout_seed=seed, backend="triton")
        assert torch.equal((stream != 0).cpu(), column_keep_mask(seed.cpu(), 0.3, *x.shape, TAG_ADD_NORM))


def test_norm_addresses_beyond_32_bits() -> None:
    """Rows far apart, and more than 2^31 numbers in all."""
    x = torch.zeros(2**31 // 1024 + 40, 1024, device="cuda", dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, 1024, device="cuda")
    y = pt.layer_norm(x, 1024, backend="triton", strict=True)
    assert bounds.relative_error(y[-40:], pt.layer_norm(x[-40:], 1024, backend="reference")) < 0.01


def test_norm_in_a_cuda_graph() -> None:
    x, seed = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16), torch.tensor(1, device="cuda")
    check_cuda_graph(lambda: pt.add_norm(x, x, None, dropout_p=0.5, dropout_seed=seed, backend="triton")[1], seed)


def _loss(problem: fuzz_cross_entropy.Problem) -> None:
    _, wrong = fuzz_cross_entropy.judge(problem, "triton", True, "cuda")
    assert not wrong, "\n".join([str(problem), *wrong])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("classes", [131, 1000, 32000])
def test_cross_entropy_case(classes: int, dtype: torch.dtype) -> None:
    for case in cases("linear_cross_entropy"):
        for reduction in fuzz_cross_entropy.REDUCTIONS:
            _loss(fuzz_cross_entropy.of_case(case.resize(classes=classes), dtype, reduction=reduction))


@pytest.mark.parametrize("number", LOSSES)
def test_random_cross_entropy(number: int) -> None:
    _loss(fuzz_cross_entropy.draw(SEED, number))


def test_cross_entropy_never_holds_all_logits() -> None:
    """16,384 rows of 128k classes: 8 GiB of float32 logits, of which a gibibyte exists at a time; addresses beyond 32 bits."""
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
