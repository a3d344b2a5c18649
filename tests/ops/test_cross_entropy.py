"""linear_cross_entropy against torch.nn.functional.cross_entropy; this version has only the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.ops._registry import OPS


def _inputs(*lead: int, d: int = 6, classes: int = 11, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    x, w, b = torch.randn(*lead, d, dtype=dtype), torch.randn(classes, d, dtype=dtype), torch.randn(classes, dtype=dtype)
    return *(t.requires_grad_() for t in (x, w, b)), torch.randint(0, classes, lead)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_torch(reduction: str, smoothing: float) -> None:
    x, w, b, target = _inputs(4, 5)
    target[1] = -100
    keywords: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    ours = pt.linear_cross_entropy(x, w, target, bias=b, **keywords)
    want = F.cross_entropy(F.linear(x, w, b).flatten(0, 1), target.flatten(), **keywords).reshape(ours.shape)
    torch.testing.assert_close(ours, want)
    grad = torch.randn_like(want)
    for a, e in zip(torch.autograd.grad(ours, (x, w, b), grad), torch.autograd.grad(want, (x, w, b), grad)):
        torch.testing.assert_close(a, e)


def test_mean_over_no_valid_target_is_nan() -> None:
    x, w, _, target = _inputs(3)
    assert pt.linear_cross_entropy(x, w, target.fill_(7), ignore_index=7).isnan()
    assert pt.linear_cross_entropy(x, w, target, ignore_index=7, reduction="sum") == 0


def test_an_ignored_row_may_hold_anything() -> None:
    x, w, b, target = _inputs(4)
    with torch.no_grad():
        x[2] = float("nan")
    target[2] = -100
    dx, dw, db = torch.autograd.grad(pt.linear_cross_entropy(x, w, target, bias=b), (x, w, b))
    assert torch.equal(dx[2], torch.zeros(6, dtype=dx.dtype)) and all(g.isfinite().all() for g in (dx, dw, db))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_float32(dtype: torch.dtype) -> None:
    x, w, b, target = _inputs(40, dtype=dtype)
    loss = pt.linear_cross_entropy(x, w, target, bias=b)
    want = F.cross_entropy(F.linear(x.double(), w.double(), b.double()), target)
    assert loss.dtype == torch.float32 and abs(loss.double() - want) < 1e-5
    assert all(g.dtype == dtype for g in torch.autograd.grad(loss, (x, w, b)))


def test_gradcheck_and_gradgradcheck() -> None:
    x, w, b, target = _inputs(3, 2)
    target[0, 1] = -100
    for reduction in ("mean", "none"):

        def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, how: str = reduction) -> torch.Tensor:
            return pt.linear_cross_entropy(x, w, target, bias=b, label_smoothing=0.2, reduction=how)

        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b))


@pytest.mark.unpoisoned
def test_opcheck_and_compile() -> None:
    op = OPS["linear_cross_entropy"]
    x, w, b, target = _inputs(4, dtype=torch.float32)
    a = (x.detach(), w.detach(), target, b.detach(), -100, 0.1, "mean")
    torch.library.opcheck(op.fwd, (*a, None, True))
    torch.library.opcheck(op.bwd, (torch.ones(()), *a, op.fwd(*a, None, True)[1], [True] * 3, None, True))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target, label_smoothing=0.1)

    ours, want = torch.compile(function, fullgraph=True, backend="aot_eager")(x, w), function(x, w)
    torch.testing.assert_close(ours, want)
    for p, q in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(want, (x, w))):
        torch.testing.assert_close(p, q)


def test_func_transforms() -> None:
    x, w, _, target = (t.detach() for t in _inputs(5))

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target)

    each = torch.func.vmap(torch.func.grad(loss))(x, target)
    want = torch.func.grad(lambda x: F.cross_entropy(x @ w.T, target, reduction="sum"))(x)
    torch.testing.assert_close(each, want)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.zeros(4)}, TypeError, "target must be int64"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError, "target must have x's leading shape"),
        ({"target": torch.tensor([0, 1, 11, 2])}, ValueError, "target must be between 0 and 10 or ignore_index -100, got 11"),
        ({"weight": torch.zeros(11, 5)}, ValueError, "weight must be"),
        ({"weight": torch.zeros(11, 6).bfloat16()}, TypeError, "weight is torch.bfloat16 but x is torch.float32"),
        ({"bias": torch.zeros(3)}, ValueError, "bias must have shape"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be between 0 and 1"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"backend": "cpu"}, ValueError, "unknown backend 'cpu'"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, w, _, target = (t.detach() for t in _inputs(4, dtype=torch.float32))
    with pytest.raises(error, match=message):
        pt.linear_cross_entropy(**({"x": x, "weight": w, "target": target} | change))
