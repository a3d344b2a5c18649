# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm: semantics, gradients, torch's machinery, determinism.

Random problems are in test_fuzz_ops.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.cli.benchmark.limits import native_calls
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds
from support import fuzz_layer_norm
from support.dropout_check import check_norm_starts
from support.ops.layer_norm import constant_rows_off_their_bias

BACKENDS = ("reference", "cpu")
KINDS = ("layer", "rms")


@pytest.fixture(params=BACKENDS)
def op_backend(request: pytest.FixtureRequest) -> str:
    reason = pt.explain("layer_norm", torch.zeros(1, 8), 8).reasons[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def _inputs(*shape: int, dtype: torch.dtype = torch.float64, n: int = 4) -> list[torch.Tensor]:
    """Return x, residual, weight, bias."""
    return [
        torch.randn(s, dtype=dtype, requires_grad=True)
        for s in (shape, shape, shape[-1:], shape[-1:])
    ][:n]


# ---- values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opinfo_samples_equal_pytorch(kind: str, dtype: torch.dtype, op_backend: str) -> None:
    """Outputs equal PyTorch's; outputs and gradients are within the bound."""
    from torch.testing._internal.common_methods_invocations import op_db

    info = next(o for o in op_db if o.name == f"nn.functional.{kind}_norm")
    ours, count = getattr(pt, f"{kind}_norm"), 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        arguments = (sample.input, *sample.args)
        theirs = getattr(F, f"{kind}_norm")(*arguments, **sample.kwargs)
        torch.testing.assert_close(ours(*arguments, **sample.kwargs, backend=op_backend), theirs)
        named = inspect.signature(ours).bind(*arguments, **sample.kwargs).arguments
        tensors = {n: t.detach() for n, t in named.items() if isinstance(t, torch.Tensor)}
        problem = fuzz_layer_norm.Problem(
            f"{kind}_norm", dtype, "any",
            tensors | {"grad_out": torch.randn_like(theirs)},
            dict.fromkeys((*tensors, "grad_out"), "contiguous"),
            {n: v for n, v in named.items() if n == "eps" and v}, list(tensors),
            dims=len(named["normalized_shape"]),
        )  # fmt: skip
        assert fuzz_layer_norm.judge(problem, op_backend, repeat=False)[1] == []
        count += 1
    assert count >= 6


def test_rms_norm_has_the_eps_of_torch(op_backend: str) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 16, dtype=dtype) * 1e-4
        torch.testing.assert_close(pt.rms_norm(x, 16, backend=op_backend), F.rms_norm(x, (16,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits_with_and_without_gradient(
    kind: str, dtype: torch.dtype, op_backend: str
) -> None:
    """Without gradients and conversions (parameters of the work dtype) the launch differs."""
    x, _, weight, bias = (t.detach() for t in _inputs(9, 70, dtype=dtype))
    parameters = [t if dtype == torch.float64 else t.float() for t in (weight, bias)]
    plain = functools.partial(pt.layer_norm, bias=parameters[1]) if kind == "layer" else pt.rms_norm
    for leading in (
        x,
        x.T.contiguous().T,
        x.view(9, 7, 10).transpose(0, 1),
    ):  # plain, and two that need another layout
        size = leading.shape[-1]
        outputs = []
        for grad in (False, True):
            h = leading.clone(memory_format=torch.preserve_format).requires_grad_(grad)
            added = pt.add_norm(
                h,
                h,
                parameters[0][:size],
                kind=kind,
                dropout_p=0.3,
                dropout_seed=5,
                backend=op_backend,
            )
            outputs.append([*added, pt.rms_norm(h, size, backend=op_backend)])
            if size == 70:
                outputs[-1].append(plain(h, 70, weight=parameters[0], backend=op_backend))
        assert all(torch.equal(a, b) for a, b in zip(*outputs)) and outputs[1][0].requires_grad


@pytest.mark.parametrize("op", ["layer_norm", "add_norm"])
def test_reused_memory_gets_the_bits_of_fresh_memory(op: str) -> None:
    """Results of 32 MB use streaming stores unless their pages are fresh, as in a first call."""
    x, r, w = torch.randn(8192, 1024), torch.randn(8192, 1024), torch.randn(1024)
    results: list[torch.Tensor] = []

    def on(backend: str) -> list[torch.Tensor]:
        if op == "add_norm":
            return [*pt.add_norm(x, r, w, backend=backend)]
        return [pt.layer_norm(x, (1024,), w, backend=backend)]

    (again,) = native_calls(op, "cpu", lambda: results.extend(on("cpu")))
    first = [t.clone() for t in results]
    for t in results:
        t.fill_(torch.nan)
    again()
    assert all(map(torch.equal, results, first))
    assert all(map(bounds.agree, results, on("reference")))


@pytest.mark.parametrize("kind", KINDS)
def test_large_mean_loses_no_accuracy(kind: str, op_backend: str) -> None:
    """With mean 100 and deviation 0.1, E[x^2] - E[x]^2 in float32 is wrong in the first digit."""
    x = 100 + 0.1 * torch.randn(64, 1000)
    naive = (x.square().mean(-1) - x.mean(-1).square()).sqrt() - x.double().var(
        -1, correction=0
    ).sqrt()
    assert naive.abs().max() > 1e-3
    function = pt.layer_norm if kind == "layer" else pt.rms_norm
    ours = function(x, 1000, eps=1e-5, backend=op_backend).double()
    exact = (F.layer_norm if kind == "layer" else F.rms_norm)(x.double(), (1000,), eps=1e-5)
    assert (ours - exact).abs().max() < 2e-6


@pytest.mark.parametrize("columns", [70, 768, 1000])
def test_constant_rows_give_the_bias(columns: int, op_backend: str) -> None:
    assert not constant_rows_off_their_bias(op_backend, columns)


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_add_norm_normalizes_the_stored_sum(residual_dtype: torch.dtype, op_backend: str) -> None:
    x, r = torch.randn(6, 100, dtype=torch.bfloat16), torch.randn(6, 100).to(residual_dtype)
    w = torch.randn(100)
    normed, stream = pt.add_norm(x, r, w, backend=op_backend)
    assert (normed.dtype, stream.dtype) == (torch.bfloat16, residual_dtype)
    assert torch.equal(stream, (x.float() + r.float()).to(residual_dtype))
    assert torch.equal(normed, pt.layer_norm(stream.float(), 100, w, backend=op_backend).bfloat16())


def test_add_norm_without_residual(op_backend: str) -> None:
    x = torch.randn(3, 20)
    normed, stream = pt.add_norm(x, None, None, kind="rms", eps=None, backend=op_backend)
    assert torch.equal(stream, x) and stream.data_ptr() != x.data_ptr()
    torch.testing.assert_close(normed, F.rms_norm(x, (20,)))


def test_dropout_is_equal_on_every_backend() -> None:
    """The mask equals the shared stream bit for bit, by an independent Philox too."""
    from pytransformer.testing.exact_layer_norm import TAG, column_keep

    x, seed = torch.full((2, 3, 300), 7.0), -(2**40) + 12345
    for p in (0.0, 0.1, 0.5, 0.999, 1.0):
        streams = [
            pt.add_norm(x, None, None, dropout_p=p, dropout_seed=seed, backend=b)[1]
            for b in BACKENDS
        ]
        assert torch.equal(*streams)
        if 0 < p < 1:
            factor = column_keep(seed, round(65536 * p), 6, 300, TAG).view(x.shape)
            assert torch.equal(streams[0], (7.0 * factor).float())
    share = (pt.add_norm(torch.ones(400, 512), None, None, dropout_p=0.3)[1] == 0).float().mean()
    assert abs(share - 0.3) < 0.01


@pytest.mark.parametrize("columns", [33, 300])
def test_slices_of_rows_have_the_dropout_of_the_full_problem(columns: int, op_backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_norm_starts(op_backend, columns, dtype)


def test_a_seed_drawn_follows_manual_seed(op_backend: str) -> None:
    x = torch.ones(8, 64)

    def drawn() -> torch.Tensor:
        return pt.add_norm(x, None, None, dropout_p=0.5, backend=op_backend)[1]

    torch.manual_seed(7)
    first, second = drawn(), drawn()
    torch.manual_seed(7)
    assert torch.equal(first, drawn()) and not torch.equal(first, second)


def test_nan_stays_in_its_row(op_backend: str) -> None:
    x = torch.randn(5, 70)
    x[2, 3], x[4, 0] = float("nan"), float("inf")
    y = pt.layer_norm(x, 70, backend=op_backend)
    assert y[[2, 4]].isnan().all() and y[[0, 1, 3]].isfinite().all()
    clean = pt.layer_norm(x[[0, 1, 3]], 70, backend=op_backend)
    assert torch.equal(y[[0, 1, 3]], clean)


def test_dropout_removes_nan(op_backend: str) -> None:
    x = torch.full((2, 64), float("nan"))
    normed, stream = pt.add_norm(x, torch.ones(2, 64), None, dropout_p=1.0, backend=op_backend)
    assert torch.equal(stream, torch.ones(2, 64)) and normed.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4, 8)])
def test_empty_inputs(shape: tuple[int, ...], op_backend: str) -> None:
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = pt.layer_norm(x, shape[-1], w, backend=op_backend)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w))


# ---- memory order and strides


def test_memory_order_is_kept(op_backend: str) -> None:
    x = torch.randn(7, 5, 33).transpose(0, 1).requires_grad_()
    y = pt.layer_norm(x, 33, backend=op_backend)
    (dx,) = torch.autograd.grad(y, x, torch.randn(7, 5, 33).transpose(0, 1))
    assert y.stride() == dx.stride() == x.stride()
    assert torch.equal(y, pt.layer_norm(x.contiguous(), 33, backend=op_backend))


def test_strided_inputs_and_gradients_give_contiguous_bits() -> None:
    from support.guarded import LAYOUTS, place

    x, r, w, b = (t.detach() for t in _inputs(3, 4, 50, dtype=torch.float32))
    grads = torch.randn(3, 4, 50), torch.randn(3, 4, 50)

    def results(layout: str) -> list[torch.Tensor]:
        leaves = [place(t, layout).requires_grad_() for t in (x, r, w, b)]
        outputs = pt.add_norm(*leaves, dropout_p=0.2, dropout_seed=5, backend="cpu")
        return [*outputs, *torch.autograd.grad(outputs, leaves, [place(g, layout) for g in grads])]

    want = results("contiguous")
    for layout in LAYOUTS[1:]:
        for name, ours, exact in zip(
            ("normed", "stream", "x", "residual", "weight", "bias"), results(layout), want
        ):
            assert torch.equal(ours, exact), (layout, name)


def test_expanded_gradients_equal_contiguous_ones() -> None:
    x = torch.randn(4, 40, requires_grad=True)
    y = pt.layer_norm(x, 40, backend="cpu")
    (from_sum,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (from_ones,) = torch.autograd.grad(y, x, torch.ones(4, 40))
    assert torch.equal(from_sum, from_ones)


# ---- gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1, 5, 18])
def test_gradcheck_and_gradgradcheck(kind: str, columns: int, op_backend: str) -> None:
    leaves = _inputs(3, columns)

    def function(*t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pt.add_norm(
            *t, eps=1e-3, dropout_p=0.3, dropout_seed=11, kind=kind, backend=op_backend
        )

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_gradcheck_of_layer_norm_and_rms_norm(op_backend: str) -> None:
    x, _, w, b = _inputs(2, 3, 4)
    assert torch.autograd.gradcheck(
        lambda *t: pt.layer_norm(t[0], 4, *t[1:], backend=op_backend), (x, w, b)
    )
    assert torch.autograd.gradgradcheck(
        lambda *t: pt.layer_norm(t[0], 4, *t[1:], backend=op_backend), (x, w, b)
    )
    assert torch.autograd.gradcheck(
        lambda *t: pt.rms_norm(t[0], (4,), t[1], backend=op_backend), (x, w)
    )
    two = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: pt.layer_norm(t[0], (3, 4), t[1], backend=op_backend), (x, two)
    )


def test_gradient_of_the_residual_output_alone(op_backend: str) -> None:
    x, r, w, _ = _inputs(3, 6)
    _, stream = pt.add_norm(x, r, w, backend=op_backend)
    dx, dr, dw = torch.autograd.grad(stream.sum(), (x, r, w), allow_unused=True)
    assert (
        torch.equal(dx, torch.ones_like(x)) and torch.equal(dr, dx) and (dw is None or not dw.any())
    )


# ---- torch's machinery


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_norm"])
def test_opcheck(name: str, op_backend: str) -> None:
    op = OPS[name]
    x, r, w, b = (t.detach() for t in _inputs(2, 3, 8, dtype=torch.float32))
    x = x.transpose(0, 1)
    seed = torch.tensor(3)
    arguments: dict[str, tuple[Any, ...]] = {
        "layer_norm": (x, w, b, 1, 1e-5),
        "rms_norm": (x, w, 1, 1e-5),
        "add_norm": (x, r.transpose(0, 1), w, b, seed, 1, 2, 1e-5, 0.5, False),
    }
    a = arguments[name]
    torch.library.opcheck(op.fwd, (*a, op_backend, True))
    outputs = op.fwd(*a, op_backend, True)
    saved = [o for n, o in zip(op.outputs, outputs) if n in op.saved]
    grads = [torch.randn_like(x) for _ in op.grad_names]
    torch.library.opcheck(
        op.bwd, (*grads, *a, *saved, [True] * len(op.differentiable), op_backend, True)
    )


@pytest.mark.unpoisoned
def test_compiles_to_one_graph(op_backend: str) -> None:
    x, r, w, b = _inputs(4, 32, dtype=torch.float32)

    def function(*t: torch.Tensor) -> torch.Tensor:
        normed, stream = pt.add_norm(*t, dropout_p=0.1, dropout_seed=3, backend=op_backend)
        return (normed * stream).sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, want = compiled(x, r, w, b), function(x, r, w, b)
    torch.testing.assert_close(ours, want)
    for a, e in zip(
        torch.autograd.grad(ours, (x, r, w, b)), torch.autograd.grad(want, (x, r, w, b))
    ):
        torch.testing.assert_close(a, e)


def test_func_transforms_equal_autograd(op_backend: str) -> None:
    x, _, w, _ = (t.detach() for t in _inputs(3, 6))

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pt.layer_norm(x, 6, w, backend=op_backend).sin().sum()

    want = torch.func.grad(lambda x, w: F.layer_norm(x, (6,), w).sin().sum(), (0, 1))(x, w)
    for a, b in zip(torch.func.grad(loss, (0, 1))(x, w), want):
        torch.testing.assert_close(a, b)
    rows = torch.func.vmap(torch.func.grad(loss), (0, None))(x, w)
    torch.testing.assert_close(rows, want[0])
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: loss(x, w), (x,), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_has_the_dtypes_of_torch(dtype: torch.dtype) -> None:
    x, w = torch.randn(3, 16, dtype=dtype), torch.ones(16)
    with torch.autocast("cpu"):
        assert pt.layer_norm(x, 16, w).dtype == F.layer_norm(x, (16,), w).dtype


# ---- determinism


@pytest.mark.parametrize("shape", [(700, 33), (5, 4099)])
def test_equal_bits_over_runs_and_threads(shape: tuple[int, int]) -> None:
    x, r, w, b = _inputs(*shape, dtype=torch.float32)
    grads = torch.randn(shape), torch.randn(shape)

    def results() -> list[torch.Tensor]:
        outputs = pt.add_norm(x, r, w, b, dropout_p=0.1, dropout_seed=9, backend="cpu")
        return [*outputs, *torch.autograd.grad(outputs, (x, r, w, b), grads)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results()
        for n in (2, 3, 1, 2):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(results(), want)), n
    finally:
        torch.set_num_threads(threads)


def test_rows_do_not_depend_on_other_rows() -> None:
    x = torch.randn(300, 200)
    whole = pt.layer_norm(x, 200, backend="cpu")
    assert torch.equal(whole[17:18], pt.layer_norm(x[17:18], 200, backend="cpu"))


# ---- bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: pt.layer_norm(x, 5), ValueError, "normalized_shape must be x's trailing shape"),
        (lambda x: pt.layer_norm(x, ()), ValueError, "at least one dimension"),
        (
            lambda x: pt.layer_norm(x, "8"),
            TypeError,
            "normalized_shape must be an int or a sequence",
        ),
        (lambda x: pt.layer_norm(x.long(), 8), TypeError, "x must be float32"),
        (
            lambda x: pt.layer_norm(x, 8, x[0, :4]),
            ValueError,
            "weight must have the normalized shape",
        ),
        (lambda x: pt.layer_norm(x, 8, None, 3.0), TypeError, "bias must be a Tensor"),
        (lambda x: pt.layer_norm(x, 8, eps="no"), TypeError, "eps must be a number"),
        (lambda x: pt.layer_norm(x, 8, backend="fast"), ValueError, "unknown backend 'fast'"),
        (lambda x: pt.rms_norm([1.0], 8), TypeError, "x must be a Tensor"),
        (lambda x: pt.add_norm(x, x[:1], None), ValueError, "residual must have x's shape"),
        (lambda x: pt.add_norm(x, x, None, kind="batch"), ValueError, "kind must be one of"),
        (
            lambda x: pt.add_norm(x, x, None, dropout_p=1.5),
            ValueError,
            "dropout_p must be between 0 and 1",
        ),
        (
            lambda x: pt.add_norm(x, x, None, dropout_p=0.5, dropout_seed=1.5),
            TypeError,
            "dropout_seed must be an int",
        ),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(2, 8))


def test_forced_backend_gives_its_reason() -> None:
    x, r = torch.randn(2, 8), torch.randn(2, 8, dtype=torch.float64)
    with pytest.raises(pt.BackendError, match="both float64 or neither"):
        pt.add_norm(x, r, None, backend="cpu")
    assert pt.add_norm(x, r, None, backend="reference")[1].dtype == torch.float64
