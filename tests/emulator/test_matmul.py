# SPDX-License-Identifier: Apache-2.0
"""The warpgroup gemm (csrc/cuda/matmul) in the emulator, by its raw op."""

from __future__ import annotations

import matmul_problems
import pytest
import torch
from matmul_problems import BF16, Problem, multiply, operands
from run_problems import Share

from pytransformer.ops._backends.cuda import library as cuda_library

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")


@pytest.fixture(autouse=True)
def loaded(emulated: object) -> None:
    assert cuda_library.why_not(matmul_problems.RAW_OP, torch.device("cpu")) is None


def test_every_path_is_right(share: Share) -> None:
    for problem in share(matmul_problems.problems()):
        assert (found := matmul_problems.wrong(problem)) == [], f"{problem.name}: {found}"


def test_schedules_give_equal_bits() -> None:
    problem = matmul_problems.PROBLEMS[0]
    found = []
    for schedule in (1, 2):
        torch.ops.pytransformer_C.emulator_schedule(schedule)
        found.append(multiply(problem, operands(problem), None)[:, : problem.columns])
    assert torch.equal(*found)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_float32_results_are_unrounded(layout: str) -> None:
    """They replace or add to the output; nothing is written beyond the padded columns.

    The padding rounds the columns up to a multiple of eight.
    """
    a, b = operands(Problem("sums", BF16, layout, 150, 300, 72))
    begun = torch.randn(150, 312)
    for add in (False, True):
        out = begun.clone()
        cuda_library.call("matmul_sums", a.device, a, b, out[:, :304], add)
        check = matmul_problems.compare(out[:, :300], [a, b], begun[:, :300] if add else None)
        assert check.ok, check
        assert torch.equal(out[:, 304:], begun[:, 304:])


def test_non_finite_rows_do_not_spread() -> None:
    """Zeros follow the operands, so memory behind them has no effect."""
    problem = Problem("NaN", BF16, "nt", 140, 40, 24, gap=8)
    a, b = operands(problem)
    a[3, 5], b[7, 11] = torch.nan, torch.inf
    out = multiply(problem, [a, b], None)[:, :40]
    bad = torch.zeros(140, 40, dtype=torch.bool)
    bad[3] = bad[:, 11] = True
    assert torch.equal(~out.isfinite(), bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.float(), b.float()), "float32 has no products by warpgroups"),
        (lambda a, b: (a, b[:-1]), "the operands do not go together"),
        (lambda a, b: (a[:, 1:], b[1:]), "do not begin at multiples of 16 bytes"),
        (lambda a, b: (a, b.half()), "b must have the dtype of a"),
        (lambda a, b: (a.t().contiguous().t(), b.t().contiguous().t()), "both operands"),
    ],
)
def test_unsupported_operands_raise(change: object, message: str) -> None:
    a, b = torch.randn(16, 32).bfloat16(), torch.randn(32, 24).bfloat16()
    with pytest.raises(RuntimeError, match=message):
        a, b = change(a, b)
        cuda_library.call(
            "matmul", a.device, a, b, None, None, None, torch.empty(16, 24, dtype=a.dtype)
        )


def test_gemm_requires_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    a = torch.randn(16, 16).half()
    with pytest.raises(RuntimeError, match="for sm_90a"):
        cuda_library.call("matmul", a.device, a, a, None, None, None, torch.empty_like(a))
