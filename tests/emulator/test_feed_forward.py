# SPDX-License-Identifier: Apache-2.0
"""feed_forward on the emulated sm_90a kernels of "cuda", through the public API."""

from __future__ import annotations

import feed_forward_problems
import pytest
import torch
from feed_forward_problems import PROBLEMS
from run_problems import Share

import pytransformer as pt
from pytransformer.ops._backends.cuda import matmul as cuda_matmul
from pytransformer.reference.philox import TAG_FEED_FORWARD, column_keep_mask
from pytransformer.testing import exact_feed_forward
from support import fuzz_feed_forward
from support.dropout_check import check_hidden_starts
from support.fuzz import fuzz

FUZZ_SEED, FUZZ_CASES, DRAWN = 41, 40, 400

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")


def test_every_path_is_right(share: Share) -> None:
    for named in share(feed_forward_problems.problems()):
        assert (found := feed_forward_problems.wrong(named)) == [], f"{named}: {found}"


def test_random_problems() -> None:
    """Run the fuzzer's 16-bit problems: strided, guarded, poisoned; equal bits twice."""
    half = [
        n for n in range(DRAWN) if fuzz_feed_forward.draw(FUZZ_SEED, n).dtype in cuda_matmul.DTYPES
    ]
    report = fuzz("feed_forward", ["cuda"], FUZZ_SEED, half[:FUZZ_CASES], stop_after=5)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases == FUZZ_CASES


def test_library_gemm_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs without measurements use it: fewer warpgroup products, the same bound."""
    products = torch.ops.pytransformer_C.emulator_products
    counts = []
    for use_cublas in (False, True):
        if use_cublas:
            monkeypatch.setattr(cuda_matmul, "use_cublas", lambda *shape: True)
        before = products()
        for name in ("relu", "gated", "odd sizes"):
            assert (found := feed_forward_problems.differences(PROBLEMS[name])) == [], (
                f"{name}: {found}"
            )
        counts.append(products() - before)
    assert 0 < counts[1] < counts[0]


def test_schedules_give_equal_bits() -> None:
    runs = []
    for schedule in (1, 2):
        torch.ops.pytransformer_C.emulator_schedule(schedule)
        runs.append(fuzz_feed_forward.run(PROBLEMS["gated"], "cuda")[0])
    for name, result in runs[0].items():
        assert torch.equal(result, runs[1][name]), name


def test_dropout_mask_equals_the_reference() -> None:
    """Forward and backward have its bits; identity weights expose hidden."""
    x, eye = (
        torch.full((5, 30, 264), 3.0, dtype=torch.float16, requires_grad=True),
        torch.eye(264, dtype=torch.float16),
    )
    for p, seed in ((0.3, -(2**62) + 77), (1.0, 5)):
        out = pt.feed_forward(
            x, eye, None, eye, None, dropout_p=p, dropout_seed=seed, backend="cuda"
        )
        (grad,) = torch.autograd.grad(out.sum(), x)
        keep = column_keep_mask(torch.tensor(seed), p, 150, 264, TAG_FEED_FORWARD).view(x.shape)
        assert torch.equal(out != 0, keep) and torch.equal(grad != 0, keep)


def test_slices_have_the_dropout_of_the_full_problem() -> None:
    check_hidden_starts("cuda", (0, 32, 96), torch.bfloat16)
    with pytest.raises(pt.BackendError, match="column_start is a multiple of 32, got 5"):
        check_hidden_starts("cuda", (5,), torch.bfloat16)


@pytest.mark.parametrize("gated", [False, True])
def test_recompute_changes_no_bit(gated: bool) -> None:
    problem = PROBLEMS["gated"]
    t = {n: v for n, v in problem.tensors.items() if gated or "gate" not in n}
    found = []
    for recompute in (False, True):
        leaves = {n: v.clone().requires_grad_() for n, v in t.items() if n != "grad_out"}
        out = pt.feed_forward(
            *(leaves[n] for n in ("x", "w1", "b1", "w2", "b2")),
            gate_weight=leaves.get("gate_weight"),
            gate_bias=leaves.get("gate_bias"), activation="gelu", dropout_p=0.2, dropout_seed=3,
            recompute=recompute, backend="cuda",
        )  # fmt: skip
        found.append([out, *torch.autograd.grad(out, list(leaves.values()), t["grad_out"])])
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("activation", fuzz_feed_forward.ACTIVATIONS)
def test_activations_and_slopes_within_the_bound(activation: str) -> None:
    """Numbers of every magnitude pass from x to hidden and back by identities."""
    x = torch.cat(
        [
            torch.linspace(-14, 14, 1000),
            torch.tensor([-6e4, -300.0, 300.0, 6e4, 0.0, 1e-6, -1e-6, 40.0]),
        ]
    ).half()
    x = x[:, None].requires_grad_()
    eye = torch.eye(8, dtype=torch.float16)[:1]
    out = pt.feed_forward(
        x, eye.t().contiguous(), None, eye, None, activation=activation, backend="cuda"
    )
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    value, slope = exact_feed_forward._activation(activation, x.detach().double())
    for ours, exact in ((out, value), (grad, slope)):
        error = (ours.detach().double() - exact).abs()
        assert (error <= torch.finfo(torch.float16).eps * exact.abs() + 2.0**-14).all(), error.max()


def test_non_finite_rows_do_not_spread() -> None:
    t = {n: v.clone() for n, v in PROBLEMS["relu"].tensors.items()}
    t["x"][2, 3], t["x"][100, 0] = torch.nan, torch.inf
    for activation in fuzz_feed_forward.ACTIVATIONS:
        out = pt.feed_forward(
            *(t[n] for n in ("x", "w1", "b1", "w2", "b2")), activation=activation, backend="cuda"
        )
        others = torch.ones(200, dtype=torch.bool)
        others[[2, 100]] = False
        assert not out[~others].isfinite().any() and out[others].isfinite().all()


def test_unsupported_arguments_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(4, 16), torch.zeros(16, 16)
    assert (
        "bfloat16 or float16, got float32"
        in pt.explain("feed_forward", x, w, None, w, None).reasons["cuda"]
    )
    assert (
        pt.explain("feed_forward", x.half(), w.half(), None, w.half(), None).reasons["cuda"] is None
    )
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    with pytest.raises(pt.BackendError, match=r"a GPU of compute capability 9\.0"):
        pt.feed_forward(x.half(), w.half(), None, w.half(), None, backend="cuda")
