# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy with softcap, z-loss, class weights and accuracy, against formulas over
explicit logits. Random problems: test_fuzz_ops."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.ops._core.registry import OPS

OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss_weight": 0.05},
    "class_weight": {"class_weight": True},
    "all": {"softcap": 3.0, "z_loss_weight": 0.05, "class_weight": True, "label_smoothing": 0.2},
}


@pytest.fixture(params=["reference", "cpu"])
def op_backend(request: pytest.FixtureRequest) -> str:
    x = torch.ones(2, 3)
    reasons = pt.explain("linear_cross_entropy", x, x, torch.zeros(2, dtype=torch.int64)).reasons
    if (reason := reasons[request.param]) is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def inputs(
    *lead: int, d: int = 6, classes: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return [x, weight, bias] that need gradients, targets of which some are -100, and weights."""
    leaves = [
        torch.randn(*shape, dtype=dtype).requires_grad_()
        for shape in ((*lead, d), (classes, d), (classes,))
    ]
    target = torch.randint(0, classes, lead)
    target.view(-1)[1::4] = -100
    return leaves, target, torch.rand(classes, dtype=dtype) + 0.2


def explicit(
    leaves: list[torch.Tensor],
    target: torch.Tensor,
    class_weight: torch.Tensor | None = None,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    **keywords: Any,
) -> torch.Tensor:
    """Return the loss by PyTorch's cross entropy over all logits, plus the z-loss."""
    x, weight, bias = leaves
    logits, target = F.linear(x, weight, bias).reshape(-1, len(weight)), target.reshape(-1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, class_weight, **keywords)
    valid = target != keywords.get("ignore_index", -100)
    z_loss = torch.where(valid, z_loss_weight * logits.logsumexp(1) ** 2, 0.0)
    reduction = keywords.get("reduction", "mean")
    if reduction == "none":
        return (loss + z_loss).view(x.shape[:-1])
    return loss + z_loss.sum() / (valid.sum() if reduction == "mean" else 1)


def with_weights(option: str, weights: torch.Tensor) -> dict[str, Any]:
    given = dict(OPTIONS[option])
    return given | ({"class_weight": weights} if "class_weight" in given else {})


def same_gradients(
    ours: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor], **tolerance: float
) -> None:
    torch.testing.assert_close(ours, expected, **tolerance)
    grad = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(expected, leaves, grad)
    ):
        torch.testing.assert_close(a, e, **tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_class_weights_equal_torch(
    reduction: str, smoothing: float, ignore_index: int, op_backend: str
) -> None:
    leaves, target, weights = inputs(4, 5)
    target = torch.where(target == -100, ignore_index, target)
    keywords: dict[str, Any] = {
        "class_weight": weights,
        "label_smoothing": smoothing,
        "ignore_index": ignore_index,
        "reduction": reduction,
    }
    x, w, b = leaves
    ours = pt.linear_cross_entropy(x, w, target, bias=b, **keywords, backend=op_backend)
    same_gradients(ours, explicit(leaves, target, **keywords), leaves)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_equal_the_formula(option: str, reduction: str, op_backend: str) -> None:
    leaves, target, weights = inputs(4, 5)
    keywords = {**with_weights(option, weights), "reduction": reduction}
    x, w, b = leaves
    ours = pt.linear_cross_entropy(x, w, target, bias=b, **keywords, backend=op_backend)
    same_gradients(ours, explicit(leaves, target, **keywords), leaves)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_pass_gradcheck_and_gradgradcheck(option: str, op_backend: str) -> None:
    leaves, target, weights = inputs(3, 2)
    keywords = with_weights(option, weights)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target, bias=b, **keywords, backend=op_backend)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 264, 2100), (1300, 40, 600)], ids=["kept", "chunks"])
def test_options_in_blocks_and_chunks(
    shape: tuple[int, int, int], dtype: torch.dtype, op_backend: str
) -> None:
    rows, d, classes = shape
    leaves, target, weights = inputs(rows, d=d, classes=classes)
    leaves = [(t.detach() * d**-0.25).to(dtype).requires_grad_() for t in leaves]
    keywords = {**with_weights("all", weights), "reduction": "sum"}
    x, w, b = leaves
    loss, accuracy = pt.linear_cross_entropy(
        x, w, target, bias=b, **keywords, return_accuracy=True, backend=op_backend
    )
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = explicit(exact, target, **keywords)
    assert abs(loss.double() - expected) <= 4e-7 * expected
    for name, a, e in zip(
        "xwb", torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, exact)
    ):
        assert (a.double() - e).norm() <= 6 * torch.finfo(dtype).eps * e.norm(), name
    hits = (F.linear(*exact).argmax(1) == target).sum() / (target != -100).sum()
    torch.testing.assert_close(accuracy.double(), hits.double())


def test_saved_logits_change_no_gradient() -> None:
    op = OPS["linear_cross_entropy"]
    (x, w, b), target, weights = inputs(200, d=264, classes=600, dtype=torch.float32)
    gradients = []
    for save in ("logits", ""):
        a = (x.detach(), w.detach(), target, b.detach(), weights, -100, 0.1, 3.0, 0.05, "mean")
        saved = op.fwd(*a, False, save, "cpu", True)[1:6]
        assert bool(saved[1].numel()) == bool(save)
        gradients.append(op.bwd(torch.ones(()), *a, False, save, *saved, [True] * 3, "cpu", True))
    assert all(map(torch.equal, *gradients))


def test_options_give_equal_bits_for_any_threads() -> None:
    (x, w, b), target, weights = inputs(700, d=40, classes=1300, dtype=torch.float32)

    def results() -> list[torch.Tensor]:
        loss, *more = pt.linear_cross_entropy(
            x, w, target, bias=b, **with_weights("all", weights), return_z_loss=True,
            return_accuracy=True, backend="cpu",
        )  # fmt: skip
        return [loss, *more, *torch.autograd.grad(loss, (x, w, b))]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = results()
        torch.set_num_threads(3)
        assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_returned_parts_follow_the_reduction(reduction: str, op_backend: str) -> None:
    leaves, target, _ = inputs(4, 5)
    x, w, b = leaves
    call = lambda **more: pt.linear_cross_entropy(
        x, w, target, bias=b, reduction=reduction, backend=op_backend, **more
    )
    plain = call()
    loss, z_loss, accuracy = call(z_loss_weight=0.1, return_z_loss=True, return_accuracy=True)
    torch.testing.assert_close(loss - z_loss, plain)
    valid = target != -100
    hits = (valid & (F.linear(x, w, b).argmax(-1) == target)).double()
    torch.testing.assert_close(accuracy, hits if reduction == "none" else hits.sum() / valid.sum())
    assert loss.requires_grad and not z_loss.requires_grad and not accuracy.requires_grad
    assert torch.equal(call(return_z_loss=True)[1], torch.zeros_like(plain))


def test_the_first_of_equal_logits_is_the_prediction(op_backend: str) -> None:
    """Constant logits predict class 0, so a head of zeros has no perfect accuracy."""
    for classes in (2, 97, 1700):
        x, w = torch.zeros(3, 4), torch.randn(classes, 4)
        target = torch.tensor([0, 1, classes - 1])
        _, accuracy = pt.linear_cross_entropy(
            x, w, target, reduction="none", return_accuracy=True, backend=op_backend
        )
        assert accuracy.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("option", OPTIONS)
def test_ignored_rows_may_hold_nan(option: str, op_backend: str) -> None:
    (x, w, b), target, weights = inputs(4)
    with torch.no_grad():
        x[1] = torch.nan
    loss, accuracy = pt.linear_cross_entropy(
        x, w, target, bias=b, **with_weights(option, weights), return_accuracy=True,
        backend=op_backend,
    )  # fmt: skip
    grads = torch.autograd.grad(loss, (x, w, b))
    assert accuracy.isfinite() and all(g.isfinite().all() for g in grads) and not grads[0][1].any()


@pytest.mark.unpoisoned
@pytest.mark.parametrize("option", ["all"])
def test_opcheck_and_compile_with_options(option: str, op_backend: str) -> None:
    op = OPS["linear_cross_entropy"]
    (x, w, b), target, weights = inputs(4, d=130, dtype=torch.float32)
    a, _, _ = op.prepare(
        x.detach(), w.detach(), target, bias=b.detach(), return_accuracy=True,
        **with_weights(option, weights),
    )  # fmt: skip
    torch.library.opcheck(op.fwd, (*a, op_backend, True))
    saved = op.fwd(*a, op_backend, True)[1:6]
    torch.library.opcheck(op.bwd, (torch.ones(()), *a, *saved, [True] * 3, op_backend, True))

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pt.linear_cross_entropy(
            x, w, target, **with_weights(option, weights), return_z_loss=True,
            return_accuracy=True, backend=op_backend,
        )  # fmt: skip

    ours = torch.compile(function, fullgraph=True, backend="aot_eager")(x, w)
    expected = function(x, w)
    for p, q in zip(ours, expected):
        torch.testing.assert_close(p, q)
    for p, q in zip(torch.autograd.grad(ours[0], (x, w)), torch.autograd.grad(expected[0], (x, w))):
        torch.testing.assert_close(p, q)


def test_func_transforms_with_options(op_backend: str) -> None:
    (x, w, _), target, weights = inputs(5)
    x, w = x.detach(), w.detach()
    keywords = {**with_weights("all", weights), "reduction": "sum"}

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target, **keywords, backend=op_backend)

    each = torch.func.vmap(torch.func.grad(loss))(x, target)
    bias = torch.zeros(len(w), dtype=x.dtype)
    expected = torch.func.grad(lambda x: explicit([x, w, bias], target, **keywords))(x)
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, "softcap must be greater than 0, got 0.0"),
        ({"softcap": "a"}, TypeError, "softcap must be a number"),
        ({"z_loss_weight": -1.0}, ValueError, "z_loss_weight must be at least 0, got -1.0"),
        ({"z_loss_weight": float("nan")}, ValueError, "z_loss_weight must be finite"),
        ({"class_weight": torch.ones(3)}, ValueError, r"class_weight must have shape \(11,\)"),
        ({"class_weight": torch.ones(11).long()}, TypeError, "class_weight must be"),
        (
            {"class_weight": torch.ones(11, requires_grad=True)},
            ValueError,
            "class_weight must not require a gradient",
        ),
    ],
)
def test_wrong_options_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    (x, w, _), target, _ = inputs(4, dtype=torch.float32)
    with pytest.raises(error, match=message):
        pt.linear_cross_entropy(x, w, target, **change)


def test_every_pair_of_options_has_a_backend_on_the_cpu() -> None:
    (x, w, b), target, weights = inputs(4, dtype=torch.float32)
    values = {"class_weight": weights, "softcap": 2.0, "z_loss_weight": 0.1, "label_smoothing": 0.1}
    for names in itertools.combinations(values, 2):
        keywords = {n: values[n] for n in names}
        pt.linear_cross_entropy(x, w, target, bias=b, **keywords, strict=True).backward()
