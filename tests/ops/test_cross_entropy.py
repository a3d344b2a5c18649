# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: semantics, gradients, torch's machinery, determinism and memory.

Random problems are in test_fuzz_ops.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from support.ops.cross_entropy import results_at_offset

BACKENDS = ("reference", "cpu")
# class_weight, ignore_index, label_smoothing, softcap, z_loss_weight, reduction, accuracy
PLAIN = (None, -100, 0.1, 0.0, 0.0, "mean", False)


@pytest.fixture(params=BACKENDS)
def op_backend(request: pytest.FixtureRequest) -> str:
    x, w, _, target = (t.detach() for t in _inputs(2))
    reason = pt.explain("linear_cross_entropy", x, w, target).reasons[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def _inputs(
    *lead: int, d: int = 6, classes: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    x, w, b = (
        torch.randn(*lead, d, dtype=dtype),
        torch.randn(classes, d, dtype=dtype),
        torch.randn(classes, dtype=dtype),
    )
    return *(t.requires_grad_() for t in (x, w, b)), torch.randint(0, classes, lead)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_equals_torch(reduction: str, smoothing: float, op_backend: str) -> None:
    x, w, b, target = _inputs(4, 5)
    target[1] = -100
    keywords: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    ours = pt.linear_cross_entropy(x, w, target, bias=b, **keywords, backend=op_backend)
    want = F.cross_entropy(F.linear(x, w, b).flatten(0, 1), target.flatten(), **keywords).reshape(
        ours.shape
    )
    torch.testing.assert_close(ours, want)
    grad = torch.randn_like(want)
    for a, e in zip(
        torch.autograd.grad(ours, (x, w, b), grad), torch.autograd.grad(want, (x, w, b), grad)
    ):
        torch.testing.assert_close(a, e)


def test_mean_over_no_valid_target_is_nan(op_backend: str) -> None:
    x, w, _, target = _inputs(3)
    assert pt.linear_cross_entropy(
        x, w, target.fill_(7), ignore_index=7, backend=op_backend
    ).isnan()
    assert (
        pt.linear_cross_entropy(x, w, target, ignore_index=7, reduction="sum", backend=op_backend)
        == 0
    )


def test_ignored_rows_do_not_affect_the_loss(op_backend: str) -> None:
    x, w, b, target = _inputs(4)
    with torch.no_grad():
        x[2] = float("nan")
    target[2] = -100
    dx, dw, db = torch.autograd.grad(
        pt.linear_cross_entropy(x, w, target, bias=b, backend=op_backend), (x, w, b)
    )
    assert torch.equal(dx[2], torch.zeros(6, dtype=dx.dtype)) and all(
        g.isfinite().all() for g in (dx, dw, db)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shift_of_all_logits_changes_no_bit(dtype: torch.dtype, op_backend: str) -> None:
    at_zero = results_at_offset(0.0, op_backend, dtype)
    for offset in (2.0**10, 2.0**20):
        assert all(map(torch.equal, results_at_offset(offset, op_backend, dtype), at_zero)), offset


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_float32(dtype: torch.dtype, op_backend: str) -> None:
    x, w, b, target = _inputs(40, dtype=dtype)
    loss = pt.linear_cross_entropy(x, w, target, bias=b, backend=op_backend)
    want = F.cross_entropy(F.linear(x.double(), w.double(), b.double()), target)
    assert loss.dtype == torch.float32 and abs(loss.double() - want) < 1e-5
    assert all(g.dtype == dtype for g in torch.autograd.grad(loss, (x, w, b)))


def test_gradcheck_and_gradgradcheck(op_backend: str) -> None:
    x, w, b, target = _inputs(3, 2)
    target[0, 1] = -100
    for reduction in ("mean", "none"):

        def function(
            x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, how: str = reduction
        ) -> torch.Tensor:
            return pt.linear_cross_entropy(
                x, w, target, bias=b, label_smoothing=0.2, reduction=how, backend=op_backend
            )

        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b), fast_mode=True)


@pytest.mark.unpoisoned
def test_opcheck_and_compile(op_backend: str) -> None:
    op = OPS["linear_cross_entropy"]
    x, w, b, target = _inputs(4, d=130, dtype=torch.float32)  # deep enough that logits are stored
    for save in ("logits", ""):
        a = (x.detach(), w.detach(), target, b.detach(), *PLAIN, save)
        torch.library.opcheck(op.fwd, (*a, op_backend, True))
        saved = op.fwd(*a, op_backend, True)[1:6]
        assert bool(saved[1].numel()) == bool(save)
        torch.library.opcheck(op.bwd, (torch.ones(()), *a, *saved, [True] * 3, op_backend, True))

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target, label_smoothing=0.1, backend=op_backend)

    ours, want = torch.compile(function, fullgraph=True, backend="aot_eager")(x, w), function(x, w)
    torch.testing.assert_close(ours, want)
    for p, q in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(want, (x, w))):
        torch.testing.assert_close(p, q)


def test_func_transforms_equal_autograd(op_backend: str) -> None:
    x, w, _, target = (t.detach() for t in _inputs(5))

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return pt.linear_cross_entropy(x, w, target, backend=op_backend)

    each = torch.func.vmap(torch.func.grad(loss))(x, target)
    want = torch.func.grad(lambda x: F.cross_entropy(x @ w.T, target, reduction="sum"))(x)
    torch.testing.assert_close(each, want)


# ---- the native kernel's blocks, chunks and memory


def _large(rows: int, d: int, classes: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x, w, b, target = _inputs(rows, d=d, classes=classes, dtype=torch.float64)
    target[::5] = -100
    return [(t.detach() * d**-0.25).to(dtype).requires_grad_() for t in (x, w, b)] + [target]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(20, 96, 2100), (1300, 40, 600), (1500, 2100, 70)],
    ids=["transposed", "chunks", "sums in parts"],
)
def test_many_rows_and_classes_are_processed_in_blocks(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Rows and classes exceed a block, and dx (1500 x 2100) needs more than 8 MB of float sums."""
    x, w, b, target = _large(*shape, dtype)
    loss = pt.linear_cross_entropy(x, w, target, bias=b, reduction="sum", backend="cpu")
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    want = F.cross_entropy(F.linear(*exact), target, reduction="sum")
    assert abs(loss.double() - want) <= 4e-7 * want
    for name, a, e in zip(
        "xwb", torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(want, exact)
    ):
        assert (a.double() - e).norm() <= 6 * torch.finfo(dtype).eps * e.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_bits_over_runs_and_threads(dtype: torch.dtype) -> None:
    x, w, b, target = _large(1100, 72, 1300, dtype)

    def results() -> list[torch.Tensor]:
        loss = pt.linear_cross_entropy(x, w, target, bias=b, label_smoothing=0.1, backend="cpu")
        return [loss, *torch.autograd.grad(loss, (x, w, b))]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results()
        for n in (2, 3, 1):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(results(), want)), n
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("forward", ["cpu", "reference"])
@pytest.mark.parametrize(
    "shape",
    [(20, 272, 2100), (200, 264, 600), (1100, 257, 650), (520, 264, 2064)],
    ids=["transposed", "one chunk", "chunks", "past the caches"],
)
def test_stored_logits_change_no_bit(
    shape: tuple[int, int, int], forward: str, dtype: torch.dtype
) -> None:
    """Backward from logits that the backend's forward stored equals backward that recomputes them.

    Backward from the reference's forward is equal within rounding.
    """
    op = OPS["linear_cross_entropy"]
    x, w, b, target = (t.detach() for t in _large(*shape, dtype))
    gradients = []
    for save in ("logits", ""):
        a = (x, w, target, b, *PLAIN, save)
        saved = op.fwd(*a, forward, True)[1:6]
        assert tuple(saved[1].shape) == ((shape[0], shape[2]) if save else (0,))
        gradients.append(op.bwd(torch.ones(()), *a, *saved, [True] * 3, "cpu", True))
    for kept, again in zip(*gradients):
        torch.testing.assert_close(
            kept, again, **({"rtol": 0, "atol": 0} if forward == "cpu" else {})
        )


def test_logits_are_stored_if_small_and_gradients_are_needed() -> None:
    op = OPS["linear_cross_entropy"]

    def kept(
        classes: int, depth: int, dtype: torch.dtype = torch.float32, grad: bool = True
    ) -> int:
        x, w = (torch.empty(n, depth, dtype=dtype, requires_grad=True) for n in (64, classes))
        with torch.set_grad_enabled(grad):
            a, _, _ = op.prepare(x, w, torch.zeros(64, dtype=torch.int64))
        return op.empty_outputs(a)[2].numel()

    assert kept(1 << 18, 129) == kept(1 << 18, 257, torch.bfloat16) == 64 << 18  # 64 MB
    assert kept((1 << 18) + 1, 129) == kept(1 << 18, 129, grad=False) == 0
    assert kept(11, 128) == kept(11, 256, torch.bfloat16) == 0  # shallow: recomputing is faster


PEAK = """
import resource, torch
import pytransformer as pt

def step(x, w, target):
    return torch.autograd.grad(pt.linear_cross_entropy(x, w, target, backend="cpu"), (x, w))

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

torch.set_num_threads(2)
x, w = (torch.randn(n, 64, dtype=torch.{dtype}).requires_grad_() for n in (2048, 20000))
target = torch.randint(0, 20000, (2048,))
step(x[:8], w[:80], target[:8] % 80)
before = peak()
grads = step(x, w, target)
print(peak() - before - sum(g.nbytes for g in grads))
"""


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_logits_are_not_stored(dtype: str) -> None:
    """Logits of 2048 rows and 20,000 classes need 164 or 82 MB.

    Forward and backward use less than 12 MB beyond inputs and gradients: scratch of both threads,
    in pages of 2 MB.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK.format(dtype=dtype)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 12 << 20, f"{int(done.stdout) / 2**20:.1f} MB"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target": torch.zeros(4)}, TypeError, "target must be int64"),
        (
            {"target": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            "target must have x's leading shape",
        ),
        (
            {"target": torch.tensor([0, 1, 11, 2])},
            ValueError,
            "target must be between 0 and 10 or ignore_index -100, got 11",
        ),
        ({"weight": torch.zeros(11, 5)}, ValueError, "weight must be"),
        (
            {"weight": torch.zeros(11, 6).bfloat16()},
            TypeError,
            "weight is torch.bfloat16 but x is torch.float32",
        ),
        ({"bias": torch.zeros(3)}, ValueError, "bias must have shape"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing must be between 0 and 1"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        (
            {"target": torch.tensor([0, -1, 2, 2])},
            ValueError,
            "target must be between 0 and 10 or ignore_index -100, got -1",
        ),
        ({"backend": "gpu"}, ValueError, "unknown backend 'gpu'"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    x, w, _, target = (t.detach() for t in _inputs(4, dtype=torch.float32))
    with pytest.raises(error, match=message):
        pt.linear_cross_entropy(**({"x": x, "weight": w, "target": target} | change))
