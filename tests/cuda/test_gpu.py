# SPDX-License-Identifier: Apache-2.0
"""The norms' problems compiled on a GPU, for bench/gpu.sh; tests/emulator runs them on the CPU."""

from __future__ import annotations

import layer_norm_problems
import pytest
import torch

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import Case, cases, leaves
from support import fuzz_layer_norm
from support.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
RANDOM, SEED = 300, 13


def wrong(problem: fuzz_layer_norm.Problem) -> list[str]:
    """Return the errors of the backend on this problem, whose tensors are on the CPU."""
    results, record = fuzz_layer_norm.run(problem, "cuda", "cuda")
    again, _ = fuzz_layer_norm.run(problem, "cuda", "cuda")
    solution = oracle.Solution(
        fuzz_layer_norm.solve(problem, results.get("residual_out")),
        1,
        torch.empty(0),
        torch.empty(0),
    )
    coarse = problem.coarse_dtype
    checks = bounds.check(
        solution, results, coarse, "zero_mean" if problem.data == "zero_mean" else "any"
    )
    found = [str(c) for c in checks if not c.ok]
    found += [
        f"two runs differ in {n}"
        for n, r in results.items()
        if r is not None and not torch.equal(r, again[n])
    ]
    return found + [f"ran {record}"] * ({b for _, b in record} != {"cuda"})


def test_every_path() -> None:
    for problem in layer_norm_problems.problems():
        assert (found := wrong(problem)) == [], f"{problem}: {found}"


def test_random_problems() -> None:
    failed = [
        f"case {case}: {problem}\n    {found}"
        for case, problem in layer_norm_problems.drawn(SEED, RANDOM)
        if (found := wrong(problem))
    ]
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize(
    "case", [*cases("layer_norm"), *cases("rms_norm"), *cases("add_norm")], ids=lambda c: c.name
)
def test_case(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make("cuda", dtype, seed=0, requires_grad=True)
    inputs = leaves(case.op, args, kwargs)

    def run(backend: str) -> list[torch.Tensor]:
        found = getattr(pt, case.op)(*args, **kwargs, backend=backend, strict=True)
        outputs = [found] if isinstance(found, torch.Tensor) else list(found)
        generator = torch.Generator("cuda").manual_seed(1)
        grads = [
            torch.randn(t.shape, generator=generator, device="cuda").to(t.dtype) for t in outputs
        ]
        return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), grads)]

    for ours, again, want in zip(run("cuda"), run("cuda"), run("reference")):
        assert torch.equal(ours, again)
        assert bounds.relative_error(ours, want) < 4 * torch.finfo(dtype).eps


def test_dropout_mask() -> None:
    x, seed = (
        torch.full((300, 1032), 7.0, device="cuda"),
        torch.tensor(987654321 << 20, device="cuda"),
    )
    for columns in (64, 1031, 1032):
        ours, want = (
            pt.add_norm(x[:, :columns], None, None, dropout_p=0.3, dropout_seed=seed, backend=b)[1]
            for b in ("cuda", "reference")
        )
        assert torch.equal(ours, want)


def test_addresses_beyond_32_bits() -> None:
    """Run more than 2^31 elements forward and backward; the last rows equal a small tensor's."""
    rows, columns = 2**31 // 4096 + 100, 4096
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-50:] = torch.randn(50, columns, device="cuda").bfloat16()
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    y = pt.layer_norm(x, columns, weight, backend="cuda")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    small = x.detach()[-50:].clone().requires_grad_()
    want = pt.layer_norm(small, columns, weight, backend="cuda")
    assert torch.equal(y[-50:], want)
    assert torch.equal(dx[-50:], torch.autograd.grad(want, small, small.detach())[0])


def test_cuda_graph() -> None:
    x, seed = torch.randn(64, 768, device="cuda"), torch.tensor(1, device="cuda")
    check_cuda_graph(
        lambda: pt.add_norm(x, x, None, dropout_p=0.5, dropout_seed=seed, backend="cuda")[1], seed
    )


def test_another_stream_and_the_current_device() -> None:
    x = torch.randn(2000, 1024, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # writes x
    with torch.cuda.stream(stream):
        y = pt.layer_norm(x * 2, 1024, backend="cuda")
    stream.synchronize()
    assert torch.equal(y, pt.layer_norm(x * 2, 1024, backend="cuda"))
