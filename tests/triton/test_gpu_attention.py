# SPDX-License-Identifier: Apache-2.0
"""attention compiled on a GPU, for bench/gpu.sh; the other files here run interpreted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops.attention import attention_op
from pytransformer.reference.philox import keep_mask
from pytransformer.testing import bounds
from pytransformer.testing.case import named
from pytransformer.testing.cases import Case, cases, leaves
from pytransformer.testing.kits import kit_of
from support import fuzz_attention
from support.attention_problem import Problem
from support.cuda_graph import check_cuda_graph
from support.draw_attention import draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SEED, RANDOM = 11, 300
HEAD_DIMS = (16, 40, 64, 72, 80, 96, 128, 160, 256)


def _cpu(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu()
    if dataclasses.is_dataclass(x):
        return dataclasses.replace(
            x, **{f.name: _cpu(getattr(x, f.name)) for f in dataclasses.fields(x)}
        )
    return x


def _check(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make("cuda", dtype, seed=0, requires_grad=True)
    inputs = leaves(case.op, args, kwargs)
    op = getattr(pt, case.op)
    runs = []
    for _ in range(2):
        out, lse = op(*args, **kwargs, return_lse=True, backend="triton", strict=True)
        generator = torch.Generator("cuda").manual_seed(1)
        grad_out, grad_lse = (
            torch.randn(t.shape, generator=generator, device="cuda", dtype=t.dtype)
            for t in (out, lse)
        )
        runs.append(
            [
                out,
                lse,
                *torch.autograd.grad([out, lse], list(inputs.values()), [grad_out, grad_lse]),
            ]
        )
    for first, second in zip(*runs):
        assert torch.equal(first, second), "two runs differ"
    results = dict(zip(("out", "lse", *inputs), map(_cpu, runs[0])))
    given = {n: _cpu(x) for n, x in named(case.op, args, kwargs).items()}
    with torch.no_grad():
        exact = kit_of(case.op).solve(case.op, given, [_cpu(grad_out), _cpu(grad_lse)])
    checks = bounds.check(exact, results, dtype, "zero_mean")
    assert all(c.ok for c in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize(
    "case", [*cases("attention"), *cases("attention_varlen")], ids=lambda c: c.name
)
def test_case(case: Case, dtype: torch.dtype) -> None:
    _check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: torch.dtype) -> None:
    for case in cases("attention"):
        if case.name in ("causal", "everything"):
            _check(case.resize(D=head_dim, Lq=300, Lk=333), dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (32, 4)], ids=str)
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_decode(name: str, heads: tuple[int, int], head_dim: int) -> None:
    """Keys are split over programs.

    One test per head dim compiles four problems; bench/gpu.sh allows 80 s.
    """
    for queries in (1, 3):
        shape = {"B": 2, "Hq": heads[0], "Hkv": heads[1], "Lq": queries, "Lk": 5000, "D": head_dim}
        for dtype in (torch.bfloat16, torch.float32):
            _check(next(c for c in cases("attention") if c.name == name).resize(**shape), dtype)


def test_dropout_mask() -> None:
    seed = torch.tensor(987654321 << 20, device="cuda")
    query, key = (
        torch.zeros(2, 3, 200, 16, device="cuda"),
        torch.zeros(2, 3, 256, 16, device="cuda"),
    )
    value = torch.eye(256, device="cuda").expand(2, 3, -1, -1)
    out, _ = attention_op.fwd(
        *attention_op.prepare(query, key, value, dropout_p=0.3, dropout_seed=seed)[0],
        "triton",
        True,
    )
    assert torch.equal((out != 0).cpu(), keep_mask(seed.cpu(), 0.3, 2, 3, 200, 256))


def test_more_programs_than_a_grid_dimension_holds() -> None:
    query = torch.randn(1, 70_000, 3, 16, device="cuda", dtype=torch.bfloat16)
    out = pt.attention(query, query, query, backend="triton", strict=True)
    want = pt.attention(query[:, -9:], query[:, -9:], query[:, -9:], backend="reference")
    assert bounds.relative_error(out[:, -9:], want) < 0.02


def test_addresses_beyond_32_bits() -> None:
    rows = 2**31 // 128 + 1000
    memory = torch.zeros(1, 1, rows, 128, device="cuda", dtype=torch.bfloat16)
    memory[..., -64:, :] = torch.randn(64, 128, device="cuda")
    piece = memory[..., -64:, :]
    mask = (torch.arange(rows, device="cuda") >= rows - 64)[None, None, None]
    out = pt.attention(piece, memory, memory, attn_mask=mask, backend="triton", strict=True)
    assert bounds.relative_error(out, pt.attention(piece, piece, piece, backend="reference")) < 0.02


def test_cuda_graph() -> None:
    query = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    seed = torch.tensor(1, device="cuda")
    check_cuda_graph(
        lambda: pt.attention(
            query, query, query, dropout_p=0.5, dropout_seed=seed, backend="triton"
        ),
        seed,
    )


def _on_gpu(problem: Problem) -> Problem:
    move = lambda x: x.cuda() if isinstance(x, torch.Tensor) else x
    return dataclasses.replace(
        problem,
        tensors={n: move(t) for n, t in problem.tensors.items()},
        keywords={n: move(v) for n, v in problem.keywords.items()},
        grad_out=move(problem.grad_out),
        grad_lse=move(problem.grad_lse),
    )


@pytest.mark.parametrize("number", range(RANDOM))
def test_random_problem(number: int) -> None:
    problem = draw(SEED, number)
    if problem.dtype == torch.float64 or problem.packed:
        pytest.skip("the backend has no float64; packed problems are drawn on the CPU only")
    run = fuzz_attention.run(_on_gpu(problem), "triton")
    run.results = {n: None if t is None else t.detach().cpu() for n, t in run.results.items()}
    _, wrong = fuzz_attention.judge(problem, problem.solve(), run, "triton")
    assert not wrong, "\n".join([str(problem), *wrong])
