# SPDX-License-Identifier: Apache-2.0
"""Global keys on the emulated backend "cuda": cost, selected kernels, indices.

Values and gradients are in attention_problems.py and the fuzzer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_problems import Share
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import fast_path
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds
from support.attention_check import check_packed
from support.draw_attention import draw
from support.fuzz import fuzz
from support.raw_calls import arguments

FUZZ_CASES, FUZZ_SEED = 24, 37
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def results(inputs: list[Tensor], **keywords: Any) -> tuple[list[Tensor], int]:
    """Return out, the gradients of all inputs, and the number of matrix products."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    count = lambda: sum(
        torch.ops.pytransformer_C.emulator_products(warps) for warps in (False, True)
    )
    before = count()
    with fast_path.off():  # the second call of a key computes twice, to record it
        bias = inputs[3] if inputs[3:] else None
        out = pt.attention(*inputs[:3], bias=bias, **keywords, backend="cuda", strict=True)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    return [out, *gradients], count() - before


@pytest.mark.parametrize("dtype, dim", [(BF16, 64), (BF16, 128), (torch.float16, 192)])
def test_gap_costs_no_products(dtype: torch.dtype, dim: int) -> None:
    """512 keys lie between the global keys and the first window.

    Bits and products are those of a call without them.
    """
    torch.manual_seed(0)
    query, key, value = (normal(1, 1, n, dim, dtype=dtype) for n in (130, 384, 384))
    keywords = {"window": (60, 0), "global_keys": 70, "causal": "bottom_right"}
    bias = normal(130, 1, dtype=dtype)  # its gradient is a sum over all KV tiles
    want, fewest = results([query, key, value, bias], **keywords)
    between = torch.full((1, 1, 512, dim), torch.nan, dtype=dtype)
    far = [torch.cat([t[:, :, :128], between, t[:, :, 128:]], 2) for t in (key, value)]
    found, made = results([query, *far, bias], **keywords)
    assert made == fewest > 0
    for n in (0, 1, 4):
        assert torch.equal(found[n], want[n])
    for ours, theirs in zip(found[2:4], want[2:4]):
        assert torch.equal(torch.cat([ours[:, :, :128], ours[:, :, 640:]], 2), theirs)
        assert not ours[:, :, 128:640].count_nonzero()


def test_only_tiles_of_the_window_and_global_keys_run() -> None:
    """128 queries at the end of 4,096 keys see one tile of global keys and their window.

    That is 8 tiles of 128.
    """
    torch.manual_seed(1)
    inputs = [normal(1, 1, n, 64) for n in (128, 4096, 4096)]
    products = {}
    for name, keywords in {
        "all": {},
        "window": {"window": (95, 0)},
        "both": {"window": (95, 0), "global_keys": 32},
    }.items():
        with torch.no_grad(), fast_path.off():
            before = torch.ops.pytransformer_C.emulator_products(True)
            pt.attention(
                *inputs,
                causal="bottom_right",
                bias=pt.AlibiBias(torch.zeros(1)),
                **keywords,
                backend="cuda",
                strict=True,
            )
            products[name] = torch.ops.pytransformer_C.emulator_products(True) - before
    of_a_tile = products["all"] / 128
    assert products["window"] == 7 * of_a_tile and products["both"] == 8 * of_a_tile


@pytest.mark.usefixtures("sm90")
def test_portable_kernels_run_on_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [normal(1, 2, 140, 64) for _ in range(3)]
    keywords: dict[str, Any] = {"window": (20, 3), "global_keys": 4}
    before = torch.ops.pytransformer_C.emulator_products()
    found = results(inputs, **keywords)[0]
    unordered = results(inputs, **keywords, deterministic=False)[0]
    assert torch.ops.pytransformer_C.emulator_products() == before
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    want = results(inputs, **keywords)[0]
    assert all(torch.equal(*both) for both in zip([*found, *unordered], [*want, *want]))


def test_explain_reports_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    query = normal(1, 1, 140, 64)
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "sm90")
    output = lambda **keywords: pt.explain(
        "attention", query, query, query, **keywords, backend="cuda"
    )
    (note,) = (n for n in output(window=(20, 3), global_keys=4).notes if n.startswith("cuda:"))
    assert note.count("portable kernels: with global_keys there are two runs of tiles of keys") == 3
    (note,) = (n for n in output(window=(20, 3)).notes if n.startswith("cuda:"))
    assert "portable" not in note


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("first", [10, 46, 60, 115, 1000])
def test_chunks_use_absolute_indices(dtype: torch.dtype, first: int) -> None:
    """Keys are 45 to 115, queries 90 to 135, the window 20.

    Dropout's groups begin before the first key.
    """
    torch.manual_seed(0)
    tensors = [normal(2, 2, n, 24, dtype=dtype).requires_grad_() for n in (45, 70, 70)]
    found = {}
    for name in ("reference", "cuda"):
        a = attention_op.prepare(
            *tensors,
            window=(20, 5),
            global_keys=first,
            causal="top_left",
            dropout_p=0.2,
            dropout_seed=7,
        )[0]
        a = a._replace(query_start=90, key_start=45)
        out, lse = attention_op(a, name, True)
        found[name] = [
            out,
            lse,
            *torch.autograd.grad([out.float().square().sum(), lse.sum()], tensors),
        ]
    for ours, want in zip(found["cuda"], found["reference"]):
        assert bounds.relative_error(ours, want) < 25 * torch.finfo(dtype).eps


def test_packed_equals_padded() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(n, 2, 64, generator=generator).bfloat16() for n in (230, 300, 300)
    )
    offsets = (torch.tensor([0, 150, 150, 230]), torch.tensor([0, 37, 140, 300]))
    check_packed(
        (query, key, value, *offsets, 150, 160),
        {"window": (9, 0), "global_keys": 4, "causal": "bottom_right"},
        "cuda",
    )


def test_programs_differ_by_number_of_global_keys() -> None:
    inputs = [normal(1, 1, 90, 64) for _ in range(3)]
    call = lambda first: pt.attention(
        *inputs, window=(9, 0), global_keys=first, backend="cuda", strict=True
    )
    with torch.no_grad():
        with fast_path.off():
            want = {first: call(first) for first in (0, 3, 40)}
        for _ in range(4):
            for first in want:
                assert torch.equal(call(first), want[first]), first
    assert not torch.equal(want[3], want[40])


def test_binding_checks_global_keys() -> None:
    query, out, lse = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5)

    raw = cuda_library.raw("attention_fwd")

    def call(left: int, global_keys: int) -> None:
        raw(*arguments(
            raw, query=query, key=query, value=query, out=out, lse=lse, left=left, right=-1,
            global_keys=global_keys, num_queries=5, num_keys=5, scale=1.0,
        ))  # fmt: skip

    call(2, 10**12)
    for wrong in ((2, -1), (-1, 3)):
        with pytest.raises(RuntimeError, match="expected 0 or more, and 0 without a window"):
            call(*wrong)


def test_random_problems_with_global_keys(schedule: int, share: Share) -> None:
    """The backend declines none of the fuzzer's problems with global keys."""
    drawn = ((n, draw(FUZZ_SEED, n)) for n in range(schedule * 1000, schedule * 1000 + 1000))
    fits = lambda problem: "global_keys" in problem.features and problem.dtype != torch.float64
    found = share([n for n, problem in drawn if fits(problem)][:FUZZ_CASES])
    report = fuzz("attention", ["cuda"], FUZZ_SEED, found, stop_after=3)
    print(report.table())
    assert not report.failures, "\n".join(report.failures)
    assert (
        report.cases - report.declined["cuda"]
        == len(found)
        == report.features["global_keys"]
        >= FUZZ_CASES // 3
    )
