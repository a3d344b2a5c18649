# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen of the CUDA backend on a GPU, for bench/gpu.sh.

tests/emulator runs the same problems on the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attention_problems
import pytest
import sm90_problems
import torch
from attention_problems import BF16, F16, Problem, alibi, padding

import pytransformer as pt
from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import Case, cases, leaves
from support.attention_check import check_no_sequences, check_packed
from support.cuda_graph import check_cuda_graph
from support.draw_attention import draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
RANDOM, SEED = 200, 17
HEAD_DIMS = (16, 40, 64, 72, 80, 96, 128, 160, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SEGMENTS = ("query_segments", "key_segments")
LARGE = (  # more tiles than a GPU has multiprocessors
    Problem("full", BF16, (3, 12, 12, 400, 400, 128, 128), lambda n: {}),
    Problem("causal, grouped", F16, (3, 12, 6, 400, 400, 64, 64),
        lambda n: {"causal": "bottom_right"}),
    Problem("wide", BF16, (3, 12, 12, 400, 400, 256, 256), lambda n: {"causal": "top_left"}),
    Problem("padding", BF16, (3, 12, 12, 400, 400, 64, 64),
            lambda n: {"attn_mask": padding(400, (0, 400), (5, 133), (200, 390), holes=n(400))}),
    Problem("mask", F16, (3, 12, 12, 400, 400, 64, 64),
        lambda n: {"attn_mask": n(3, 1, 400, 400) > -0.5}),
    Problem("segments", BF16, (3, 12, 12, 400, 400, 128, 128),
        lambda n: dict.fromkeys(SEGMENTS, torch.arange(400).expand(3, -1) // 150)),
    Problem("bias", BF16, (3, 12, 12, 400, 400, 64, 64), lambda n: {"bias": n(1, 12, 400, 400)}),
    Problem("terms", F16, (3, 12, 12, 400, 400, 128, 128),
        lambda n: {"bias": alibi(n, 12), "dropout_p": 0.1, "dropout_seed": 5}),
    Problem("unordered", BF16, (3, 12, 12, 400, 400, 128, 128), lambda n: {"deterministic": False}),
)  # fmt: skip


def _to(x: Any, device: str) -> Any:
    """Move tensors, also inside a bias, to a device as new leaves."""
    if isinstance(x, torch.Tensor):
        moved = x.detach().to(device)
        return moved.requires_grad_() if moved.dtype.is_floating_point else moved
    if isinstance(x, pt.AlibiBias):
        return pt.AlibiBias(_to(x.slopes, device))
    if isinstance(x, pt.RelativePositionBias):
        return pt.RelativePositionBias(_to(x.table, device), x.bidirectional, x.max_distance)
    return x.to(device) if isinstance(x, pt.BlockMask) else x


def check(args: Any, keywords: dict[str, Any], data: str = "zero_mean") -> None:
    """Run twice on the GPU and compare bits, unless nondeterministic, and float64's bounds."""
    on_gpu = tuple(_to(t, "cuda") for t in args), {k: _to(v, "cuda") for k, v in keywords.items()}
    inputs = leaves("attention", *on_gpu)
    runs = []
    for _ in range(2):
        out, lse = pt.attention(
            *on_gpu[0], **on_gpu[1], return_lse=True, backend="cuda", strict=True
        )
        generator = torch.Generator("cuda").manual_seed(1)
        grads = [
            torch.randn(t.shape, generator=generator, device="cuda", dtype=t.dtype)
            for t in (out, lse)
        ]
        runs.append([out, lse, *torch.autograd.grad([out, lse], list(inputs.values()), grads)])
    for first, second in zip(*runs):
        assert torch.equal(first, second) or not keywords.get("deterministic", True), (
            "two runs differ"
        )
    results = dict(zip(("out", "lse", *inputs), (t.detach().cpu() for t in runs[0])))
    on_cpu = tuple(_to(t, "cpu") for t in args), {k: _to(v, "cpu") for k, v in keywords.items()}
    with torch.no_grad():
        exact = oracle.solve(*on_cpu[0], *(g.cpu() for g in grads), **on_cpu[1])
    wrong = [str(c) for c in bounds.check(exact, results, args[0].dtype, data) if not c.ok]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "problem", [*attention_problems.problems(), *sm90_problems.problems()], ids=lambda p: p.name
)
def test_every_path(problem: Problem) -> None:
    check(*attention_problems.arguments(problem))


@pytest.mark.parametrize("problem", LARGE, ids=lambda p: p.name)
def test_many_tiles(problem: Problem) -> None:
    check(*attention_problems.arguments(problem))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", cases("attention"), ids=lambda c: c.name)
def test_case(case: Case, dtype: torch.dtype) -> None:
    check(*case.make("cpu", dtype, seed=0))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", cases("attention_varlen"), ids=lambda c: c.name)
def test_packed_case(case: Case, dtype: torch.dtype) -> None:
    check_packed(*case.make("cuda", dtype, seed=0), "cuda")


def test_no_packed_sequences() -> None:
    check_no_sequences("cuda", "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    for case in cases("attention"):
        if case.name in ("causal", "everything"):
            check(*case.resize(D=head_dim, Lq=300, Lk=333).make("cpu", dtype, seed=0))


def test_random_problems() -> None:
    numbers = [
        n for n in range(RANDOM) if not (p := draw(SEED, n)).packed and p.dtype != torch.float64
    ]
    failed = []
    for number in numbers:
        problem = draw(SEED, number)
        arguments = problem.public_keywords(problem.tensors)
        keywords = {n: v for n, v in arguments.items() if n != "return_lse"}
        try:
            check([problem.tensors[n] for n in ("query", "key", "value")], keywords, problem.limits)
        except AssertionError as error:
            failed.append(f"case {number}: {problem}\n    {error}")
    assert not failed, "\n".join(failed[:5])


def test_addresses_beyond_32_bits() -> None:
    """Run more than 2^31 elements forward and backward; the last sequence equals a call alone."""
    batch, heads, length, head_dim = 2**31 // (64 * 4096 * 64) + 4, 64, 4096, 64
    query = torch.zeros(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
    query[-1].normal_()
    query.requires_grad_()
    out = pt.attention(query, query, query, window=(32, 0), backend="cuda")
    (grad,) = torch.autograd.grad(out, query, out.detach())
    alone = query.detach()[-1:].clone().requires_grad_()
    want = pt.attention(alone, alone, alone, window=(32, 0), backend="cuda")
    assert torch.equal(out[-1:], want)
    assert torch.equal(grad[-1:], torch.autograd.grad(want, alone, want.detach())[0])


def test_more_heads_than_a_grid_has_rows() -> None:
    query = torch.randn(300, 256, 16, 32, device="cuda", dtype=torch.bfloat16)
    out = pt.attention(query, query, query, backend="cuda")
    assert torch.equal(out[-1:], pt.attention(query[-1:], query[-1:], query[-1:], backend="cuda"))


def test_cuda_graph() -> None:
    query, seed = (
        torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16),
        torch.tensor(1, device="cuda"),
    )
    check_cuda_graph(
        lambda: pt.attention(query, query, query, dropout_p=0.5, dropout_seed=seed, backend="cuda"),
        seed,
    )


@pytest.mark.parametrize("backend", ["cuda", "triton", "reference"])
def test_values_are_checked_on_request(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths and offsets beyond the tensors are clamped; PYTRANSFORMER_CHECK=1 raises."""
    x = torch.randn(2, 2, 40, 64, device="cuda", dtype=torch.bfloat16)
    long, last = torch.tensor([40, 41], device="cuda"), torch.tensor([0, 41], device="cuda")
    packed = (x[0].transpose(0, 1), x[0].transpose(0, 1), x[0].transpose(0, 1), last, last, 41, 41)
    monkeypatch.setenv("PYTRANSFORMER_CHECK", "0")
    if backend != "reference":
        out = pt.attention(x, x, x, key_lengths=long, backend=backend)
        assert torch.equal(out, pt.attention(x, x, x, backend=backend))
    monkeypatch.setenv("PYTRANSFORMER_CHECK", "1")
    with pytest.raises(ValueError, match="key_lengths must be between 0 and 40, got 41"):
        pt.attention(x, x, x, key_lengths=long, backend=backend)
    with pytest.raises(
        ValueError, match="cu_seqlens_q must start at 0, never decrease and end at most at 40"
    ):
        pt.attention_varlen(*packed, backend=backend)


@pytest.mark.unpoisoned
def test_new_threads_create_a_context() -> None:
    """The first CUDA call of a new thread is ours and encodes tensor maps.

    Its memory comes from the allocator's cache.
    """
    query = torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        return pt.attention(query, query, query, backend="cuda", strict=True)

    call()
    want = call()
    with ThreadPoolExecutor(1) as thread:
        assert torch.equal(thread.submit(call).result(), want)
