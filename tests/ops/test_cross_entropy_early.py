# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy whose forward computes the gradients of a reduced loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops import cross_entropy
from pytransformer.ops._backends.cpu import cross_entropy as cpu
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.registry import OPS
from support.fuzz import fuzz
from support.ops.cross_entropy import explicit, inputs

op = OPS["linear_cross_entropy"]
NAMES = ("x", "weight", "bias")
KEYWORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss_weight": 0.05},
    "all": {"softcap": 3.0, "z_loss_weight": 0.05, "label_smoothing": 0.2},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small problems take this path, in chunks of seven rows."""
    for module, name, value in (
        (cross_entropy, "KEPT_BYTES", 0),
        (cross_entropy, "KEPT_DEPTH", 0),
        (cpu, "MIN_CHUNK", 7),
        (cpu, "MAX_CHUNK", 7),
    ):
        monkeypatch.setattr(module, name, value)


def call(*tensors: Any, backend: str, **keywords: Any) -> torch.Tensor:
    """Return the loss on the Python path: the fast path knows the original limits."""
    a, _, _ = op.prepare(*tensors, **keywords)
    assert cross_entropy.saves(a) == "gradients"
    loss: torch.Tensor = op(a, backend, True)[0]
    return loss


def saved_gradients(a: Any, backend: str) -> Iterator[torch.Tensor]:
    outputs = dict(zip(op.outputs, op.fwd(*a, backend, True)))
    return (outputs[f"early_{name}"] for name in NAMES)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class_weight"])
@pytest.mark.parametrize("option", KEYWORDS)
def test_equal_the_gradients_of_all_logits(
    option: str, weighted: bool, dtype: torch.dtype, backend: str, small: None
) -> None:
    for reduction in ("mean", "sum"):
        leaves, target, weights = inputs(4, 5, d=24, classes=70)
        keywords = {**KEYWORDS[option], "reduction": reduction}
        if weighted:
            keywords["class_weight"] = weights
        leaves = [(t.detach() * 0.5).to(dtype).requires_grad_() for t in leaves]
        x, weight, bias = leaves
        loss = call(x, weight, target, bias=bias, **keywords, backend=backend)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        expected = explicit(exact, target, **keywords)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        for upstream in (torch.ones_like(loss), torch.full_like(loss, -3.3)):
            ours = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
            wanted = torch.autograd.grad(expected, exact, upstream.double(), retain_graph=True)
            for name, found, want in zip(NAMES, ours, wanted):
                assert found.dtype == dtype
                bound = 6 * max(torch.finfo(dtype).eps, 1e-15)
                assert (found.double() - want).norm() <= bound * want.norm(), name


@pytest.mark.parametrize("needed", [*itertools.product([True, False], repeat=3)][:-1])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_only_needed_gradients_are_saved(
    backend: str, needed: tuple[bool, ...], small: None
) -> None:
    (x, weight, bias), target, _ = inputs(20, d=24, classes=70, dtype=torch.float32)
    for t, need in zip((x, weight, bias), needed):
        t.requires_grad_(need)
    a, _, _ = op.prepare(x, weight, target, bias=bias)
    for t, found, need in zip((x, weight, bias), saved_gradients(a, backend), needed):
        assert found.shape == (t.shape if need else (0,))


def test_a_gradient_that_was_not_saved_is_computed(small: None) -> None:
    (x, weight, bias), target, _ = inputs(20, d=24, classes=70, dtype=torch.float32)
    a, _, _ = op.prepare(x, weight.detach(), target, bias=bias.detach())
    outputs = op.fwd(*a, "cpu", True)
    grads = op.bwd(torch.ones(()), *a, *outputs[1:6], [True] * 3, "cpu", True)
    expected = torch.autograd.grad(explicit([x, weight, bias], target), (x, weight, bias))
    torch.testing.assert_close(tuple(grads), expected)


def test_each_backward_returns_new_memory(small: None) -> None:
    (x, weight, _), target, _ = inputs(20, d=24, classes=70, dtype=torch.float32)
    loss = call(x, weight, target, backend="cpu")
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    kept = [t.clone() for t in first]
    for t in first:
        t.zero_()
    second = torch.autograd.grad(loss, (x, weight))
    assert all(map(torch.equal, second, kept)) and all(t.any() for t in kept)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_derivatives(backend: str, small: None) -> None:
    leaves, target, weights = inputs(3, 3, d=5, classes=9)

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return call(
            x, weight, target, bias=bias, class_weight=weights, **KEYWORDS["all"], backend=backend
        )

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_opcheck_compile_and_transforms(backend: str, small: None) -> None:
    (x, weight, bias), target, _ = inputs(9, d=24, classes=30, dtype=torch.float32)
    a, _, _ = op.prepare(x, weight, target, bias=bias, return_accuracy=True)
    a = a._replace(**{name: t.detach() for name, t in zip(NAMES, (x, weight, bias))})
    torch.library.opcheck(op.fwd, (*a, backend, True))
    saved = op.fwd(*a, backend, True)[1:6]
    torch.library.opcheck(op.bwd, (torch.ones(()), *a, *saved, [True] * 3, backend, True))

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, weight, target, backend=backend)

    expected = torch.autograd.grad(explicit([x, weight, bias * 0], target), (x, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x, weight), (x, weight)), expected)
    plain = x.detach(), weight.detach()
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(*plain), expected)


def test_ignored_rows_may_hold_nan(small: None) -> None:
    (x, weight, bias), target, _ = inputs(20, d=24, classes=70, dtype=torch.float32)
    with torch.no_grad():
        x[target == -100] = torch.nan
    loss = call(x, weight, target, bias=bias, backend="cpu")
    grads = torch.autograd.grad(loss, (x, weight, bias))
    assert all(t.isfinite().all() for t in grads) and not grads[0][target == -100].any()


def test_strided_arguments_keep_their_order(small: None) -> None:
    x = torch.randn(5, 4, 24).transpose(0, 1).requires_grad_()
    weight = torch.randn(24, 70).T.requires_grad_()
    target = torch.randint(70, (4, 5))
    grads = torch.autograd.grad(call(x, weight, target, backend="cpu"), (x, weight))
    assert grads[0].stride() == x.stride()
    plain = [t.detach().contiguous().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(call(*plain, target, backend="cpu"), plain)
    assert all(map(torch.equal, grads, expected))


# rows, depth and classes whose logits take more than 64 MB
LARGE = {torch.float32: (1100, 136, 16000), torch.bfloat16: (1100, 264, 16000)}


@pytest.mark.parametrize("dtype", LARGE)
def test_large_problems_take_this_path_by_default(dtype: torch.dtype) -> None:
    """The public function, with its fast path, equals PyTorch's formula, for any threads."""
    rows, d, classes = LARGE[dtype]
    leaves, target, _ = inputs(rows, d=d, classes=classes)
    leaves = [(t.detach() * d**-0.25).to(dtype).requires_grad_() for t in leaves]
    x, weight, bias = leaves
    a, _, _ = op.prepare(x, weight, target, bias=bias)
    assert cross_entropy.saves(a) == "gradients"
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            loss = pt.linear_cross_entropy(x, weight, target, bias=bias, backend="cpu")
            assert sum(t.numel() > 0 for t in _saved(loss)) == 3
            results.append([loss, *torch.autograd.grad(loss, leaves)])
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = explicit(exact, target)
    assert abs(results[0][0].double() - expected) <= 4e-7 * expected
    for name, found, want in zip(NAMES, results[0][1:], torch.autograd.grad(expected, exact)):
        assert (found.double() - want).norm() <= 6 * torch.finfo(dtype).eps * want.norm(), name


def _saved(loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    saved: tuple[torch.Tensor, ...] = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
    return saved[-3:]


def test_other_calls_save_no_gradient(small: None) -> None:
    """float16, whose loss scale must apply before rounding, no reduction, and no gradient."""
    (x, weight, _), target, _ = inputs(20, d=24, classes=70, dtype=torch.float32)

    def saves(*tensors: torch.Tensor, **keywords: Any) -> str:
        return cross_entropy.saves(op.prepare(*tensors, target, **keywords)[0])

    assert saves(x, weight) == saves(x, weight, reduction="sum") == "gradients"
    assert saves(x, weight, reduction="none") == saves(x.half(), weight.half()) == "nothing"
    assert saves(x.detach(), weight.detach()) == "nothing"
    with torch.no_grad():
        assert saves(x, weight) == "nothing"


def test_random_problems(
    small: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The fuzzer's problems are within the bounds, with their gradients from forward."""
    found = []
    monkeypatch.setattr(
        cpu, "_row_gradients", lambda a, f=cpu._row_gradients: found.append(a) or f(a)
    )
    monkeypatch.setattr(fast_path.entries, "linear_cross_entropy", lambda *a: NotImplemented)
    cases = range(request.config.getoption("--fuzz-cases") // 8)
    report = fuzz(
        "cross_entropy", ["cpu"], request.config.getoption("--fuzz-seed"), cases, stop_after=10
    )
    assert not report.failures, "\n".join(report.failures)
    assert len(found) > len(cases) / 4
