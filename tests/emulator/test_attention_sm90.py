"""The attention kernels for sm_90a (TMA and wgmma) by the backend "cuda", run in the emulator through the public API."""

from __future__ import annotations

import importlib.util

import pytest
import sm90_problems
import torch

import pytransformer as pt
from pytransformer.testing.draw_attention import draw
from pytransformer.testing.fuzz import fuzz

FUZZ_SEED, FUZZ_CASES, DRAWN = 31, 20, 250

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")


def test_every_path(schedule: int) -> None:
    """Each problem against float64, by kernels of warpgroups and no others."""
    for problem in sm90_problems.problems():
        assert (found := sm90_problems.wrong(problem)) == [], f"{problem.name}: {found}"


def test_random_problems() -> None:
    """Of the fuzzer's problems those with nothing that hides pairs one by one: packed and padded, strided, poisoned; equal bits twice."""
    hides = {"bool_mask", "float_mask", "segments", "dense"}
    numbers = []
    for n in range(DRAWN):
        problem = draw(FUZZ_SEED, n)
        dense = isinstance(problem.keywords.get("bias"), torch.Tensor) or "attn_mask" in problem.tensors
        if problem.dtype in (torch.bfloat16, torch.float16) and not dense and not hides & problem.features:
            numbers.append(n)
    before = torch.ops.pytransformer_C.emulator_products()
    report = fuzz("attention", ["cuda"], FUZZ_SEED, numbers[:FUZZ_CASES], stop_after=5)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases == FUZZ_CASES and torch.ops.pytransformer_C.emulator_products() > before


def test_schedules_give_equal_bits() -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(2, 2, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (200, 150, 150)]
    runs = []
    for schedule in (1, 2):
        torch.ops.pytransformer_C.emulator_schedule(schedule)
        out = pt.attention(*inputs, causal="top_left", backend="cuda")
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.skipif(
    importlib.util.find_spec("pytransformer._C") is None, reason="_C was not built (_build_info.json says why)"
)
def test_explain_tells_which_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 20, 64, dtype=torch.float16)
    taken = pt.explain("attention", query, query, query, backend="cuda").notes[-1]
    assert taken.count("by the kernels for sm_90a") == 3
    partly = pt.explain("attention", query, query, query, softcap=2.0, backend="cuda").notes[-1]
    assert "forward by the kernels for sm_90a; d_query by the portable kernels: softcap" in partly
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    assert "sm_90a" not in " ".join(pt.explain("attention", query, query, query, backend="cuda").notes)


def test_portable_kernels_take_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask, and PYTRANSFORMER_CUDA_PATH=portable: no product of a warpgroup."""
    query, key = torch.randn(1, 1, 20, 64).half(), torch.randn(1, 1, 30, 64).half()
    products = torch.ops.pytransformer_C.emulator_products
    before = products()
    pt.attention(query, key, key, attn_mask=torch.ones(20, 30, dtype=torch.bool), backend="cuda")
    assert products() == before
    ours = pt.attention(query, key, key, backend="cuda")
    assert products() > before
    before = products()
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    theirs = pt.attention(query, key, key, backend="cuda")
    assert products() == before
    assert (ours.float() - theirs.float()).norm() <= 2e-3 * theirs.float().norm()
