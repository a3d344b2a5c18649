# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy whose forward computes the gradients, on the emulated kernels of "cuda"."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops import cross_entropy
from pytransformer.ops._backends.cuda import cross_entropy as cuda_cross_entropy
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")
op = OPS["linear_cross_entropy"]
NAMES = ("x", "weight", "bias")
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss_weight": 0.05},
    "class_weight": {"class_weight": torch.linspace(0.1, 2, 200), "z_loss_weight": 0.05},
}


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return [x, weight, bias] of 140 rows and 200 classes, and targets of which some are -100."""
    leaves = [torch.randn(*s).to(dtype).requires_grad_() for s in ((140, 24), (200, 24), (200,))]
    target = torch.randint(0, 200, (140,))
    target[1::4] = -100
    return leaves, target


def call(leaves: list[torch.Tensor], target: torch.Tensor, **keywords: Any) -> torch.Tensor:
    x, weight, *bias = leaves
    keywords = {"backend": "cuda", "bias": bias[0] if bias else None, **keywords}
    loss: torch.Tensor = pt.linear_cross_entropy(x, weight, target, **keywords)
    return loss


def saved(loss: torch.Tensor) -> list[int]:
    """Return the sizes of the gradients that forward saved."""
    return [t.numel() for t in loss.grad_fn.saved_tensors[-3:]]  # type: ignore[union-attr]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the raw ops."""
    ran: list[str] = []
    call = cuda_library.call

    def recorded(name: str, *arguments: Any) -> Any:
        ran.append(name)
        return call(name, *arguments)

    monkeypatch.setattr(cuda_library, "call", recorded)
    return ran


@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_gradients_of_backward(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of 16-bit gradients hold against float64, with the upstream gradient -3.3."""
    leaves, target = inputs()
    with torch.no_grad():
        leaves[0][1::4] = torch.nan
    exact = [t.detach().double().requires_grad_() for t in leaves]
    upstream, found = torch.tensor(-3.3), []
    for early_flops in (0, 1 << 60):
        monkeypatch.setattr(cuda_cross_entropy, "EARLY_FLOPS_EMULATED", early_flops)
        loss = call(leaves, target, **OPTIONS[option])
        assert saved(loss) == ([0, 0, 0] if early_flops else [t.numel() for t in leaves])
        found.append([loss, *torch.autograd.grad(loss, leaves, upstream)])
    expected = call(exact, target, **OPTIONS[option], backend="reference")
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    assert torch.equal(found[0][0], found[1][0])
    for name, early, late, want in zip(NAMES, found[0][1:], found[1][1:], wanted):
        assert bounds.agree(early, want.bfloat16(), torch.bfloat16), name
        errors = [(t.double() - want).norm() / want.norm() for t in (early, late)]
        assert errors[0] <= 2 * errors[1] <= 2 * 0.006, (name, errors)


@pytest.mark.parametrize("needed", [*itertools.product([True, False], repeat=3)][:-1])
def test_only_needed_gradients_are_computed(needed: tuple[bool, ...], calls: list[str]) -> None:
    leaves, target = inputs()
    for t, need in zip(leaves, needed):
        t.requires_grad_(need)
    loss = call(leaves, target)
    assert saved(loss) == [t.numel() if need else 0 for t, need in zip(leaves, needed)]
    chunks = calls.count("cross_entropy_fwd")
    assert calls.count("cross_entropy_d_logits") == chunks and "cross_entropy_bwd" not in calls
    assert sum(name.startswith("matmul") for name in calls) == chunks * sum(needed[:2])


def test_backward_runs_no_product(calls: list[str]) -> None:
    leaves, target = inputs()
    loss = call(leaves, target)
    calls.clear()
    loss.backward()
    assert calls == ["cross_entropy_scale"] * 3


def test_one_chunk_converts_nothing(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one chunk, products write 16-bit results, in forward and in backward."""
    leaves, target = inputs()
    for early_flops in (0, 1 << 60):
        for limit, product in ((1 << 20, "matmul"), (1, "matmul_sums")):
            calls.clear()
            monkeypatch.setattr(cuda_cross_entropy, "EARLY_FLOPS_EMULATED", early_flops)
            monkeypatch.setattr(cuda_cross_entropy, "D_LOGITS_BYTES_EMULATED", limit)
            call(leaves, target).backward()
            kinds = [name for name in calls if name.startswith("matmul")]
            both = ["matmul", product]  # dx, dweight
            assert kinds == both * (1 if product == "matmul" else 2)


def test_last_backward_returns_the_saved_memory(calls: list[str]) -> None:
    """An upstream gradient of 1 then costs nothing; with retain_graph the memory is new."""
    leaves, target = inputs()
    loss = call(leaves, target)
    kept = [t.clone() for t in loss.grad_fn.saved_tensors[-3:]]  # type: ignore[union-attr]
    places = [t.data_ptr() for t in loss.grad_fn.saved_tensors[-3:]]  # type: ignore[union-attr]
    for factor in (2.0, 1.0):
        found = torch.autograd.grad(loss, leaves, torch.tensor(factor), retain_graph=True)
        assert all(torch.equal(t, factor * k) for t, k in zip(found, kept))
        assert all(t.data_ptr() != place for t, place in zip(found, places))
        for t in found:
            t.zero_()
    (3 * loss).backward()
    for t, k, place in zip(leaves, kept, places):
        assert t.grad is not None and t.grad.data_ptr() == place
        assert torch.equal(t.grad, (3 * k.float()).bfloat16())


def test_observed_backward_keeps_the_saved_memory() -> None:
    leaves, target = inputs()
    loss = call(leaves, target)
    places = [t.data_ptr() for t in loss.grad_fn.saved_tensors[-3:]]  # type: ignore[union-attr]
    with torch.profiler.profile():
        loss.backward()
    for t, place in zip(leaves, places):
        assert t.grad is not None and t.grad.data_ptr() != place


@pytest.mark.parametrize("count", [1, 7, 8, 8191, 8193, 20_000])
def test_scale_covers_every_element(count: int) -> None:
    t, g = torch.randn(count).bfloat16(), torch.tensor(0.3)
    want = (t.float() * g).bfloat16()
    assert torch.equal(cuda_cross_entropy.scaled(t, g, False), want)
    assert cuda_cross_entropy.scaled(t, g, True) is t and torch.equal(t, want)


def test_second_derivatives_equal_the_reference() -> None:
    leaves, target = inputs()
    found = []
    for backend in ("cuda", "reference"):
        loss = call(leaves, target, backend=backend)
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        norm = sum((t.float() ** 2).sum() for t in first)
        found.append(torch.autograd.grad(norm, leaves))
    for ours, want in zip(*found):
        error = (ours.double() - want.double()).norm() / want.double().norm()
        assert want.any() and error < 0.02


@pytest.mark.unpoisoned
def test_opcheck_compile_and_transforms() -> None:
    leaves, target = inputs()
    a, _, _ = op.prepare(leaves[0], leaves[1], target, bias=leaves[2], backend="cuda")
    assert a.save == "x weight bias"
    a = a._replace(**{name: t.detach() for name, t in zip(NAMES, leaves)})
    expected = torch.autograd.grad(call(leaves, target), leaves)
    for backend in ("cuda", "cpu", "reference"):
        torch.library.opcheck(op.fwd, (*a, backend, True))
        kept = op.fwd(*a, backend, True)[1:6]
        assert [t.numel() for t in kept[2:]] == [t.numel() for t in leaves]
        torch.library.opcheck(op.bwd, (torch.ones(()), *a, *kept, [True] * 3, backend, True))
        ours = op.bwd(torch.ones(()), *a, *kept, [True] * 3, backend, True)
        for t, want, k in zip(ours, expected, kept[2:]):
            assert bounds.agree(t, want, torch.bfloat16) and t.data_ptr() != k.data_ptr()

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        return call([*leaves], target)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves)
    assert all(map(torch.equal, torch.autograd.grad(compiled, leaves), expected))
    plain = [t.detach() for t in leaves]
    for ours, want in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), expected):
        assert bounds.agree(ours, want, torch.bfloat16)


def test_a_gradient_that_was_not_saved_is_recomputed() -> None:
    leaves, target = inputs()
    plain = [t.detach() for t in leaves]
    a, _, _ = op.prepare(leaves[0], plain[1], target, bias=plain[2], backend="cuda")
    assert a.save == "x"
    grads = op.bwd(torch.ones(()), *a, *op.fwd(*a, "cuda", True)[1:6], [True] * 3, "cuda", True)
    for ours, want in zip(grads, torch.autograd.grad(call(leaves, target), leaves)):
        assert bounds.agree(ours, want, torch.bfloat16)


def test_other_calls_save_no_gradient() -> None:
    leaves, target = inputs()

    def saves(convert: Callable[[torch.Tensor], torch.Tensor] = lambda t: t, **given: Any) -> str:
        x, weight, bias = map(convert, leaves)
        result: str = op.prepare(x, weight, target, **{"bias": bias, "backend": "cuda", **given})[
            0
        ].save
        return result

    assert saves() == saves(reduction="sum") == "x weight bias" and saves(bias=None) == "x weight"
    for given in ({"reduction": "none"}, {"softcap": 2.0}, {"backend": "cpu"}, {"backend": None}):
        assert saves(**given) == "logits"
    assert saves(torch.Tensor.half) == saves(torch.Tensor.float, backend="cpu") == "logits"
    assert saves(torch.Tensor.detach) == ""
    with torch.no_grad():
        assert saves() == ""
    with pt.use_backend(linear_cross_entropy="cuda"):
        assert saves(backend=None) == "x weight bias"
    x, weight, bias = (t[:2] if i == 0 else t[:3] for i, t in enumerate(leaves))
    few = op.prepare(x, weight, target[:2].clamp(0, 2), bias=bias, backend="cuda")[0]
    assert few.save == "logits"  # the fast path saves more than a small product


def test_strided_arguments_keep_their_order() -> None:
    x = torch.randn(7, 20, 24).bfloat16().transpose(0, 1).requires_grad_()
    weight = torch.randn(24, 200).bfloat16().T.requires_grad_()
    target = torch.randint(200, (20, 7))
    loss = call([x, weight], target)
    assert saved(loss) == [x.numel(), weight.numel(), 0]
    grads = torch.autograd.grad(loss, (x, weight))
    assert grads[0].stride() == x.stride()
    plain = [t.detach().contiguous().requires_grad_() for t in (x, weight)]
    assert all(map(torch.equal, grads, torch.autograd.grad(call(plain, target), plain)))


def test_flops_count_the_products() -> None:
    leaves, target = inputs()
    product = 2 * 140 * 24 * 200
    a = op.prepare(*leaves[:2], target, backend="cuda")[0]
    for save, forward, backward in (("x weight", 3, 0), ("weight", 2, 0), ("logits", 1, 3)):
        given = a._replace(save=save)
        assert cross_entropy._forward_flops(given) == forward * product
        assert cross_entropy._backward_flops(given) == backward * product
