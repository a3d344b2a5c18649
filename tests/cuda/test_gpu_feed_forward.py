# SPDX-License-Identifier: Apache-2.0
"""The warpgroup gemm and feed_forward compiled on a GPU, for bench/gpu.sh.

tests/emulator runs the same problems on the CPU.
"""

from __future__ import annotations

import feed_forward_problems
import matmul_problems
import pytest
import torch

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.testing import bounds
from pytransformer.testing.cases import Case, cases, leaves
from support import fuzz_feed_forward
from support.cuda_graph import check_cuda_graph
from support.feed_forward_check import check_addresses, check_dropout_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU with sm_90a",
    ),
]
RANDOM, SEED = 300, 19
DTYPES = (torch.bfloat16, torch.float16)
LARGE = (
    matmul_problems.Problem(
        "large, rows with rows", torch.bfloat16, "nt", 1500, 2000, 1030, bias=torch.float32
    ),
    matmul_problems.Problem("large, two loops", torch.float16, "nn", 1030, 3000, 520, second=770),
    matmul_problems.Problem("large, columns with columns", torch.bfloat16, "tn", 4000, 1000, 5000),
)


def library_product(problem: matmul_problems.Problem) -> bounds.Check:
    """Return the distance of PyTorch's gemm from float64.

    Tensor cores truncate sums, and a long sum may exceed the bound there too.
    """
    a, b = matmul_problems.operands(problem, "cuda")[:2]
    return matmul_problems.compare(a @ b, [a, b])


@pytest.mark.parametrize("problem", [*matmul_problems.PROBLEMS, *LARGE], ids=lambda p: p.name)
def test_products(problem: matmul_problems.Problem) -> None:
    assert cuda_library.why_not(matmul_problems.RAW_OP, torch.device("cuda")) is None
    found = matmul_problems.differences(problem, "cuda")
    # On an H100 an element of 5,000 terms reaches 1.28 of its bound; cuBLAS gives the same bits. No
    # other error is accepted.
    assert found == [] or found == [str(library_product(problem))]


@pytest.mark.parametrize("path", ["", "sm90"])
def test_every_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain gemms run on the library and on the kernels."""
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    for name, problem in feed_forward_problems.PROBLEMS.items():
        assert (found := feed_forward_problems.differences(problem, "cuda")) == [], (
            f"{name}: {found}"
        )


@pytest.mark.parametrize("path", ["", "sm90"])
def test_random_problems(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    failed = []
    for case in range(RANDOM):
        problem = fuzz_feed_forward.draw(SEED, case)
        if (
            problem.dtype in DTYPES
            and problem.data == "zero_mean"
            and (found := feed_forward_problems.differences(problem, "cuda"))
        ):
            failed.append(f"case {case}: {problem}\n    {found}")
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", cases("feed_forward"), ids=lambda c: c.name)
def test_case(case: Case, dtype: torch.dtype) -> None:
    """Results are close to the reference, with equal bits twice."""
    args, kwargs = case.make("cuda", dtype, seed=0, requires_grad=True)
    inputs = leaves(case.op, args, kwargs)

    def run(backend: str) -> list[torch.Tensor]:
        out = pt.feed_forward(*args, **kwargs, backend=backend, strict=True)
        grad = torch.randn(
            out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda"
        ).to(dtype)
        return [out, *torch.autograd.grad(out, list(inputs.values()), grad)]

    for ours, again, want in zip(run("cuda"), run("cuda"), run("reference")):
        assert torch.equal(ours, again)
        assert bounds.agree(ours, want, dtype)


def test_dropout_mask() -> None:
    check_dropout_mask("cuda")


def test_addresses_beyond_32_bits() -> None:
    check_addresses("cuda")


def test_cuda_graph() -> None:
    x, w = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seed = torch.tensor(1, device="cuda")
    check_cuda_graph(
        lambda: pt.feed_forward(
            x, w, None, w, None, dropout_p=0.5, dropout_seed=seed, backend="cuda"
        ),
        seed,
    )
