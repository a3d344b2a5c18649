# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy on the warpgroup gemm on a GPU, for bench/gpu.sh.

tests/emulator runs the same problems on the CPU.
"""

from __future__ import annotations

import itertools

import cross_entropy_problems
import pytest
import torch

import pytransformer as pt
from pytransformer.ops._backends.cuda import cross_entropy as cuda_cross_entropy
from pytransformer.ops._backends.cuda import matmul as cuda_matmul
from pytransformer.testing import bounds
from pytransformer.testing.cases import Case, cases
from support import fuzz_cross_entropy
from support.cuda_graph import check_cuda_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU with sm_90a",
    ),
]
RANDOM, SEED = 300, 29
EARLY_FLOPS = cuda_cross_entropy.EARLY_FLOPS_EMULATED  # small problems have gradients in forward


def wrong(problem: fuzz_cross_entropy.Problem) -> list[str]:
    """Return errors beyond the bound of float64, and differences of two runs."""
    return fuzz_cross_entropy.judge(problem, "cuda", True, "cuda")[1]


@pytest.mark.parametrize("path", ["", "sm90"])
def test_every_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain gemms run on the library and on the kernels.

    Rows run in the emulator's chunks and all at once, with gradients in backward and in forward.
    """
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    for small, early_flops in itertools.product((False, True), (1 << 62, EARLY_FLOPS)):
        monkeypatch.setattr(cuda_cross_entropy, "EARLY_FLOPS", early_flops)
        if small:
            monkeypatch.setattr(
                cuda_cross_entropy, "PARTIALS_BYTES", cuda_cross_entropy.PARTIALS_BYTES_EMULATED
            )
            monkeypatch.setattr(
                cuda_cross_entropy, "D_LOGITS_BYTES", cuda_cross_entropy.D_LOGITS_BYTES_EMULATED
            )
        for name, problem in cross_entropy_problems.PROBLEMS.items():
            assert (found := wrong(problem)) == [], f"{name}: {found}"


@pytest.mark.parametrize("path", ["", "sm90"])
def test_random_problems(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    monkeypatch.setattr(cuda_cross_entropy, "EARLY_FLOPS", EARLY_FLOPS)
    failed = []
    for case in range(RANDOM):
        problem = fuzz_cross_entropy.draw(SEED, case)
        if cross_entropy_problems.supported(problem, "cuda") and (found := wrong(problem)):
            failed.append(f"case {case}: {problem}\n    {found}")
    assert not failed, "\n".join(failed[:5])


@pytest.mark.parametrize("dtype", cuda_matmul.DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", cases("linear_cross_entropy"), ids=lambda c: c.name)
def test_case(case: Case, dtype: torch.dtype) -> None:
    assert wrong(fuzz_cross_entropy.of_case(case, dtype)) == []


def test_many_classes() -> None:
    """Run a language model's number of classes with ignored rows, against the reference."""
    x, w = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (1500, 50257))
    target = torch.randint(0, 50257, (1500,), device="cuda")
    target[::7] = -100
    x, w, bias = (
        x.requires_grad_(),
        (w / 16).requires_grad_(),
        torch.randn(50257, device="cuda").requires_grad_(),
    )
    runs = []
    for backend in ("cuda", "cuda", "reference"):  # cuda: with gradients in forward
        loss = pt.linear_cross_entropy(
            x, w, target, bias=bias, label_smoothing=0.1, backend=backend, strict=True
        )
        runs.append([loss, *torch.autograd.grad(loss, (x, w, bias))])
    for ours, again, want in zip(*runs):
        assert torch.equal(ours, again)
        assert bounds.agree(ours, want, torch.bfloat16)


@pytest.mark.parametrize("wrong_class", [-(2**63), -1, 300, 2**63 - 1])
def test_bad_targets_read_nothing_outside(wrong_class: int) -> None:
    x, w = (
        torch.randn(n, 64, device="cuda", dtype=torch.float16).requires_grad_() for n in (200, 300)
    )
    found = []
    for number in (wrong_class, min(max(wrong_class, 0), 299)):
        target = torch.full((200,), number, device="cuda")
        loss = pt.linear_cross_entropy(x, w, target, backend="cuda", strict=True)
        found.append([loss, *torch.autograd.grad(loss, (x, w))])
    assert all(torch.equal(*pair) for pair in zip(*found))


@pytest.mark.parametrize("early_flops", [EARLY_FLOPS, 1 << 62])
def test_cuda_graph(early_flops: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cross_entropy, "EARLY_FLOPS", early_flops)
    x, w = (
        torch.randn(n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (130, 300)
    )
    target = torch.arange(130, device="cuda")

    def step() -> torch.Tensor:
        loss = pt.linear_cross_entropy(x, w, target, backend="cuda")
        return torch.cat([t.float().flatten() for t in (loss, *torch.autograd.grad(loss, (x, w)))])

    check_cuda_graph(step, target)
