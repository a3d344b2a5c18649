# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy on the emulated sm_90a kernels of "cuda", through the public API."""

from __future__ import annotations

import itertools

import cross_entropy_problems
import pytest
import torch
from cross_entropy_problems import PROBLEMS, supported
from run_problems import Share

import pytransformer as pt
from pytransformer.ops._backends.cuda import cross_entropy as cuda_cross_entropy
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._backends.cuda import matmul as cuda_matmul
from pytransformer.testing.cases import Case, cases
from support import fuzz_cross_entropy
from support.fuzz import fuzz
from support.ops.cross_entropy import results_at_offset

FUZZ_SEED, FUZZ_CASES, DRAWN = 23, 40, 400

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")


def test_every_path_is_right(share: Share) -> None:
    for named in share(cross_entropy_problems.problems()):
        assert (found := cross_entropy_problems.wrong(named)) == [], f"{named}: {found}"


def test_random_problems() -> None:
    """Run the fuzzer's supported problems: strided, guarded, poisoned; equal bits twice."""
    drawn = (n for n in range(DRAWN) if supported(fuzz_cross_entropy.draw(FUZZ_SEED, n)))
    chosen = list(itertools.islice(drawn, FUZZ_CASES))
    report = fuzz("cross_entropy", ["cuda"], FUZZ_SEED, chosen, stop_after=5)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases == FUZZ_CASES


@pytest.mark.parametrize("case", cases("linear_cross_entropy", "small"), ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    for dtype in cuda_matmul.DTYPES:
        _, wrong = fuzz_cross_entropy.judge(fuzz_cross_entropy.of_case(case, dtype), "cuda", False)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["several tiles", "chunks"])
def test_schedules_give_equal_bits(name: str) -> None:
    runs = []
    for schedule in (1, 2):
        torch.ops.pytransformer_C.emulator_schedule(schedule)
        runs.append(fuzz_cross_entropy.run(PROBLEMS[name], "cuda")[0])
    for result, found in runs[0].items():
        assert torch.equal(found, runs[1][result]), result


def test_library_gemm_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs without measurements use it: fewer warpgroup products, the same bound."""
    products = torch.ops.pytransformer_C.emulator_products
    counts = []
    for use_cublas in (False, True):
        if use_cublas:
            monkeypatch.setattr(cuda_matmul, "use_cublas", lambda *shape: True)
        before = products()
        for name in ("several tiles", "chunks", "odd sizes"):
            _, wrong = fuzz_cross_entropy.judge(PROBLEMS[name], "cuda", False)
            assert not wrong, "\n".join(wrong)
        counts.append(products() - before)
    assert 0 < counts[1] < counts[0]


def test_logits_need_one_chunk_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for d_logits and forward's partials; both process every row."""
    calls = []

    def call(op: str, device: torch.device, x: torch.Tensor, *given: object) -> None:
        calls.append((op, len(x), given))
        whole(op, device, x, *given)

    whole = cuda_library.call
    monkeypatch.setattr(cuda_library, "call", call)
    x, w = torch.randn(600, 8).half().requires_grad_(), torch.randn(300, 8).half().requires_grad_()
    pt.linear_cross_entropy(x, w, torch.zeros(600, dtype=torch.int64), backend="cuda").backward()
    rows = {
        op: [n for name, n, _ in calls if name == op]
        for op in ("cross_entropy_fwd", "cross_entropy_bwd")
    }
    assert rows["cross_entropy_fwd"] == [128] * 4 + [88] == rows["cross_entropy_bwd"]
    (d_logits, *_) = (given[7] for name, _, given in calls if name == "cross_entropy_bwd")
    assert d_logits.numel() <= 128 * 304
    extra = pt.explain(
        "linear_cross_entropy", x, w, torch.zeros(600, dtype=torch.int64)
    ).extra_bytes["cuda"]
    assert 2 * 128 * 300 < extra < 600 * 300


def test_rows_of_different_gradients_stay_accurate() -> None:
    """Upstream gradients are 1e-12 to 1 in bfloat16.

    Each row of dx has the bits of the row alone.
    """
    x, w = (
        torch.randn(8, 24).bfloat16().requires_grad_(),
        torch.randn(90, 24).bfloat16().requires_grad_(),
    )
    target, g = torch.arange(8), 10.0 ** -torch.arange(8).mul(12 / 7)
    (dx,) = torch.autograd.grad(
        pt.linear_cross_entropy(x, w, target, reduction="none", backend="cuda"), x, g
    )
    for i in range(8):
        row = x[i].detach().requires_grad_()
        loss = pt.linear_cross_entropy(row, w, target[i], reduction="none", backend="cuda")
        assert torch.equal(torch.autograd.grad(loss, row, g[i])[0], dx[i])


@pytest.mark.parametrize("upstream", [2.0**-20, 2.0**16])
def test_float16_gradients_scale_exactly(upstream: float) -> None:
    """A power of two upstream scales the bias's float32 gradient: d_logits loses no digit."""
    x, w, bias = (
        torch.randn(90, 40).half(),
        torch.randn(200, 40).half(),
        torch.zeros(200, requires_grad=True),
    )
    loss = pt.linear_cross_entropy(
        x, w, torch.arange(90), bias=bias, reduction="sum", backend="cuda"
    )
    grads = [
        torch.autograd.grad(loss, bias, torch.tensor(g), retain_graph=True)[0]
        for g in (1.0, upstream)
    ]
    assert torch.equal(grads[0] * upstream, grads[1])


@pytest.mark.parametrize("dtype", cuda_matmul.DTYPES)
def test_a_shift_of_all_logits_changes_no_bit(dtype: torch.dtype) -> None:
    at_zero = results_at_offset(0.0, "cuda", dtype)
    for offset in (2.0**10, 2.0**20):
        assert all(map(torch.equal, results_at_offset(offset, "cuda", dtype), at_zero)), offset


def test_extreme_logits_within_the_bound() -> None:
    """A bias of -inf hides a class; a class far above the others dominates the sum."""
    x, w = torch.randn(20, 16).bfloat16(), torch.randn(300, 16).bfloat16()
    bias = torch.zeros(300)
    bias[::2], bias[7] = -torch.inf, 3e4
    target = torch.full((20,), 7)
    target[3:] = 9
    for reduction in ("sum", "none"):
        ours, want = (
            pt.linear_cross_entropy(x, w, target, bias=bias, reduction=reduction, backend=b)
            for b in ("cuda", "reference")
        )
        torch.testing.assert_close(ours, want)
    hidden = pt.linear_cross_entropy(x, w, target * 0, bias=bias, reduction="none", backend="cuda")
    assert (hidden == torch.inf).all()


def test_non_finite_rows_do_not_spread() -> None:
    x, w = torch.randn(140, 24).half(), torch.randn(300, 24).half()
    x[3, 5], x[77, 0] = torch.nan, torch.inf
    x.requires_grad_()
    losses = pt.linear_cross_entropy(x, w, torch.arange(140), reduction="none", backend="cuda")
    (dx,) = torch.autograd.grad(losses, x, torch.ones(140))
    bad = torch.zeros(140, dtype=torch.bool)
    bad[[3, 77]] = True
    assert torch.equal(~losses.isfinite(), bad) and torch.equal(~dx.isfinite().all(1), bad)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_empty_inputs(shape: tuple[int, int]) -> None:
    x, w = (
        torch.randn(shape).half().requires_grad_(),
        torch.randn(5, shape[1]).half().requires_grad_(),
    )
    loss = pt.linear_cross_entropy(
        x, w, torch.zeros(shape[0], dtype=torch.int64), reduction="sum", backend="cuda"
    )
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dx.shape == x.shape and not dw.any()
    torch.testing.assert_close(loss.detach(), shape[0] * torch.tensor(5.0).log())


def test_bad_targets_raise() -> None:
    x, w = torch.randn(2, 8).half(), torch.randn(5, 8).half()
    with pytest.raises(ValueError, match="target must be between 0 and 4"):
        pt.linear_cross_entropy(x, w, torch.tensor([1, 5]), backend="cuda")


@pytest.mark.parametrize("wrong", [-(2**63), -1, 300, 2**63 - 1])
def test_bad_targets_read_nothing_outside(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does not check values: the kernel clamps the class.

    The emulator stops at an access outside.
    """
    x, w = torch.randn(3, 8).half().requires_grad_(), torch.randn(300, 8).half().requires_grad_()
    a = pt.ops.cross_entropy.linear_cross_entropy_op.Arguments
    found = []
    for target in (wrong, min(max(wrong, 0), 299)):
        given = a(
            x.detach(), w.detach(), torch.full((3,), target), None, None, -100, 0.1, 0.0, 0.0,
            "none", False, "logits",
        )  # fmt: skip
        losses, split_lse, g = torch.empty(3), torch.empty(2, 3), torch.ones(3)
        dx, dw = torch.empty(3, 8, dtype=x.dtype), torch.zeros(300, 8)
        cuda_cross_entropy._forward(given, losses, split_lse)
        cuda_cross_entropy._backward(given, g, None, split_lse, dx, dw, None)
        found.append((losses, split_lse, dx, dw))
    assert all(torch.equal(*pair) for pair in zip(*found)) and found[0][0].isfinite().all()


def test_unsupported_arguments_give_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, target = torch.zeros(4, 16), torch.zeros(8, 16), torch.zeros(4, dtype=torch.int64)
    ask = lambda x: pt.explain("linear_cross_entropy", x, w.to(x.dtype), target).reasons["cuda"]
    assert "bfloat16 or float16, got float32" in ask(x) and ask(x.half()) is None
    options = {"class_weight": torch.ones(8), "label_smoothing": 0.1}
    for more, part in (({"return_accuracy": True}, "argmax"), (options, "class_weight without")):
        explained = pt.explain("linear_cross_entropy", x.half(), w.half(), target, **more)
        assert part in explained.reasons["cuda"]
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    with pytest.raises(pt.BackendError, match=r"a GPU of compute capability 9\.0"):
        pt.linear_cross_entropy(x.half(), w.half(), target, backend="cuda")


def test_binding_checks_shapes() -> None:
    """A caller without the public function gets the kernels' preconditions as errors."""
    x, w, target = (
        torch.zeros(4, 16).half(),
        torch.zeros(8, 16).half(),
        torch.zeros(4, dtype=torch.int64),
    )
    assert cuda_library.why_not("cross_entropy_fwd", x.device) is None
    rest = [torch.empty(8), *(torch.empty(4) for _ in range(4)), None, -100, 0.0, 0.0]
    for arguments, message in (
        ((x, w.t(), None, target[:3], *rest), "target must be 4 contiguous numbers"),
        ((x, w.t(), None, target, rest[0][:7], *rest[1:]), "partials must be 8 contiguous numbers"),
        ((x, w.bfloat16().t(), None, target, *rest), "weight must have the dtype of x"),
        ((x, w.t().contiguous(), None, target, *rest), "the rows of x and the columns of weight"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cuda_library.call("cross_entropy_fwd", x.device, *arguments)
