# SPDX-License-Identifier: Apache-2.0
"""feed_forward: semantics, gradients, torch's machinery and determinism.

Random problems are in test_fuzz_ops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds, oracle
from support import fuzz_feed_forward
from support.dropout_check import check_hidden_starts

BACKENDS = ("reference", "cpu")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
NAMES = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")


@pytest.fixture(params=BACKENDS)
def op_backend(request: pytest.FixtureRequest) -> str:
    reason = pt.explain("feed_forward", *_inputs(2, 3, 4, 3)[:5]).reasons[request.param]
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    return request.param


def _inputs(
    rows: int, d: int, hidden: int, out: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return x, w1, b1, w2, b2, gate_weight, gate_bias."""
    shapes = ((rows, d), (hidden, d), (hidden,), (out, hidden), (out,), (hidden, d), (hidden,))
    return [
        (torch.randn(s, dtype=torch.float64) / s[-1] ** 0.5).to(dtype).requires_grad_()
        for s in shapes
    ]


def _call(t: list[torch.Tensor] | tuple[torch.Tensor, ...], **keywords: Any) -> torch.Tensor:
    gate = dict(zip(("gate_weight", "gate_bias"), t[5:]))
    return pt.feed_forward(*t[:5], **gate, **keywords)


# ---- values


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_equals_linear_activation_linear(activation: str, gated: bool, op_backend: str) -> None:
    t = _inputs(9, 20, 70, 33)
    act = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "silu": F.silu,
    }[activation]
    hidden = F.linear(t[0], t[1], t[2])
    hidden = act(F.linear(t[0], t[5], t[6])) * hidden if gated else act(hidden)
    want = F.linear(hidden, t[3], t[4])
    leaves = t if gated else t[:5]
    ours = _call(leaves, activation=activation, backend=op_backend)
    torch.testing.assert_close(ours, want)
    grad = torch.randn_like(want)
    for name, a, b in zip(
        NAMES, torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(want, leaves, grad)
    ):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_accurate(activation: str) -> None:
    """Identity weights isolate the activation and its slope.

    The limit is 4 eps of x, and of |act| in gelu's left tail.
    """
    x = torch.cat(
        [torch.linspace(-12, 12, 6001), torch.tensor([0.0, 1e-30, -1e-30, 30.0, -30.0, 1e4])]
    )[:, None].requires_grad_()
    one = torch.ones(1, 1)
    y = pt.feed_forward(x, one, None, one, None, activation=activation, backend="cpu")
    (dx,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double().requires_grad_()
    act = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
        "silu": F.silu,
    }[activation]
    z = act(exact)
    (dz,) = torch.autograd.grad(z.sum(), exact)
    eps = torch.finfo(torch.float32).eps
    assert ((y - z).abs() <= 4 * eps * exact.abs()).all()
    assert ((dx - dz).abs() <= 8 * eps * (1 + exact.abs())).all()
    if activation == "gelu":
        tail = (exact > -12).squeeze() & (exact < 0).squeeze()
        right = exact * 0.5 * torch.special.erfc(-exact / 2**0.5)
        assert ((y - right).abs() <= 4 * eps * right.abs())[tail].all()


def test_slices_have_the_dropout_of_the_full_problem(op_backend: str) -> None:
    """Columns start anywhere on the CPU; GPU threads draw for 32 columns."""
    for dtype in (torch.float32, torch.bfloat16):
        check_hidden_starts(op_backend, (0, 5, 96, 2**31 + 7), dtype)


def test_dropout_is_equal_on_every_backend() -> None:
    """Identity weights expose hidden, which is zero where the shared random stream drops."""
    from pytransformer.testing.exact_feed_forward import TAG
    from pytransformer.testing.exact_layer_norm import column_keep

    x, eye = torch.full((2, 3, 200), 3.0), torch.eye(200)
    for p in (0.1, 0.5, 0.999, 1.0):
        outs = [
            pt.feed_forward(x, eye, None, eye, None, dropout_p=p, dropout_seed=-77, backend=b)
            for b in BACKENDS
        ]
        assert torch.equal(*outs)
        if p < 1:
            assert torch.equal(
                outs[1],
                (3.0 * column_keep(-77, round(65536 * p), 6, 200, TAG)).float().view(x.shape),
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recompute_changes_no_bit_and_saves_less(dtype: torch.dtype) -> None:
    t = _inputs(40, 16, 64, 16, dtype)
    grad = torch.randn(40, 16, dtype=dtype)
    results, kept = [], []
    for recompute in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda v, s=sizes: (s.append(v.numel()), v)[1], lambda v: v
        ):
            y = _call(
                t,
                activation="silu",
                dropout_p=0.2,
                dropout_seed=1,
                recompute=recompute,
                backend="cpu",
            )
        kept.append(sum(sizes))
        results.append([y, *torch.autograd.grad(y, t, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert kept[0] - kept[1] == 2 * 40 * 64


def test_many_rows_are_processed_in_parts() -> None:
    """Rows exceed the stored part of hidden and a slice of the products over rows.

    The bits are those of one row at a time.
    """
    t = _inputs(4500, 8, 24, 8, torch.float32)
    y = _call(t, backend="cpu")
    assert torch.equal(y[4300:], _call([t[0][4300:], *t[1:]], backend="cpu"))
    tensors = dict(zip(NAMES, (v.detach() for v in t))) | {"grad_out": torch.ones_like(y)}
    problem = fuzz_feed_forward.Problem(
        "feed_forward", torch.float32, "any", tensors, {}, {"activation": "relu"}, list(NAMES)
    )
    exact = oracle.Solution(fuzz_feed_forward.solve(problem), 1, torch.empty(0), torch.empty(0))
    found = dict(zip(NAMES, torch.autograd.grad(y, t, tensors["grad_out"])))
    assert not [
        str(c)
        for c in bounds.check(
            exact, {"out": y} | found, torch.float32, "any", fuzz_feed_forward.LIMITS
        )
        if not c.ok
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "d", "hidden"),
    [
        (32, 96, 320),
        (128, 384, 1280),
        (200, 1200, 96),
        (128, 2200, 128),
        (1100, 64, 1024),
        (4200, 16, 512),
        (2100, 1200, 2048),
    ],
    ids=[
        "few",
        "transposed",
        "groups",
        "sliced",
        "streamed gradient",
        "streamed",
        "sums of some columns",
    ],
)
def test_every_gemm_variant(rows: int, d: int, hidden: int, dtype: torch.dtype) -> None:
    """Few rows (in lanes, or transposed), long sums and results larger than the caches.

    Errors are within rounding of float64, and two halves of the rows give the same bits.
    """
    t = _inputs(rows, d, hidden, d if rows < 4000 else 512, dtype)
    y = _call(t, activation="silu", backend="cpu")
    halves = [_call([x, *t[1:]], activation="silu", backend="cpu") for x in t[0].split(rows // 2)]
    assert torch.equal(y, torch.cat(halves))
    exact = [v.detach().double().requires_grad_() for v in t]
    want = _call(exact, activation="silu", backend="reference")
    grad = torch.randn_like(y)
    eps = torch.finfo(dtype).eps
    for name, a, b in zip(
        ("out", *NAMES),
        (y, *torch.autograd.grad(y, t, grad)),
        (want, *torch.autograd.grad(want, exact, grad.double())),
    ):
        assert (a.double() - b).norm() <= 4 * eps * b.norm(), name


@pytest.mark.parametrize("rows", [3, 300])
def test_untracked_writes_take_effect(rows: int) -> None:
    """Writes through .data and NumPy do not change a tensor's version.

    Contents must not be cached between calls.
    """
    t = [v.detach() for v in _inputs(rows, 64, 128, 64, torch.float32)[:5]]
    for write in (
        lambda w: w.data.mul_(2.0),
        lambda w: w.numpy().__imul__(0.5),
        lambda w: w.detach().numpy().fill(0.25),
    ):
        _call(t, backend="cpu")
        version = t[1]._version
        write(t[1])
        assert t[1]._version == version
        assert torch.equal(_call(t, backend="cpu"), _call([v.clone() for v in t], backend="cpu"))


def test_nan_stays_in_its_row(op_backend: str) -> None:
    t = [v.detach() for v in _inputs(5, 16, 40, 16, torch.float32)]
    t[0][2, 3] = float("nan")
    y = _call(t, activation="gelu", backend=op_backend)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 5, 6), (3, 0, 5, 6), (3, 4, 0, 6)])
def test_empty_inputs(shape: tuple[int, int, int, int], op_backend: str) -> None:
    t = _inputs(*(max(n, 1) for n in shape), torch.float32)
    rows, d, hidden, out = shape
    t = [
        v.detach()[tuple(slice(n) for n in s)].requires_grad_()
        for v, s in zip(t, ((rows, d), (hidden, d), (hidden,), (out, hidden), (out,)))
    ]
    y = _call(t, backend=op_backend)
    assert y.shape == (rows, out)
    torch.testing.assert_close(y, F.linear(F.relu(F.linear(t[0], t[1], t[2])), t[3], t[4]))
    assert all(g.shape == v.shape for g, v in zip(torch.autograd.grad(y.sum(), t), t))


# ---- gradients and torch's machinery


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_gradcheck_and_gradgradcheck(activation: str, gated: bool, op_backend: str) -> None:
    t = _inputs(3, 4, 5, 3)[: 7 if gated else 5]

    def function(*v: torch.Tensor) -> torch.Tensor:
        return _call(
            v,
            activation=activation,
            dropout_p=0.3,
            dropout_seed=11,
            recompute=gated,
            backend=op_backend,
        )

    assert torch.autograd.gradcheck(function, t)
    assert torch.autograd.gradgradcheck(function, t, fast_mode=True)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("save", [False, True])
def test_opcheck(save: bool, op_backend: str) -> None:
    op = OPS["feed_forward"]
    x, w1, b1, w2, b2, wg, bg = (t.detach() for t in _inputs(6, 4, 8, 4, torch.float32))
    a = (
        x.view(2, 3, 4).transpose(0, 1),
        w1,
        b1,
        w2,
        b2,
        wg,
        bg,
        torch.tensor(3),
        "gelu",
        2,
        3,
        0.5,
        save,
    )
    torch.library.opcheck(op.fwd, (*a, op_backend, True))
    out, *saved = op.fwd(*a, op_backend, True)
    torch.library.opcheck(op.bwd, (torch.randn_like(out), *a, *saved, [True] * 7, op_backend, True))


@pytest.mark.unpoisoned
def test_compiles_to_one_graph(op_backend: str) -> None:
    t = _inputs(6, 8, 16, 8, torch.float32)

    def function(*v: torch.Tensor) -> torch.Tensor:
        return (
            _call(v, activation="silu", dropout_p=0.1, dropout_seed=3, backend=op_backend)
            .sin()
            .sum()
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, want = compiled(*t), function(*t)
    torch.testing.assert_close(ours, want)
    for a, b in zip(torch.autograd.grad(ours, t), torch.autograd.grad(want, t)):
        torch.testing.assert_close(a, b)


def test_func_transforms_equal_autograd(op_backend: str) -> None:
    t = [v.detach() for v in _inputs(3, 4, 6, 4)[:5]]

    def loss(x: torch.Tensor, w1: torch.Tensor) -> torch.Tensor:
        return pt.feed_forward(x, w1, *t[2:], activation="gelu", backend=op_backend).sin().sum()

    want = torch.func.grad(
        lambda x, w1: F.linear(F.gelu(F.linear(x, w1, t[2])), t[3], t[4]).sin().sum(), (0, 1)
    )(*t[:2])
    for a, b in zip(torch.func.grad(loss, (0, 1))(*t[:2]), want):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss), (0, None))(*t[:2]), want[0])
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: loss(x, t[1]), (t[0],), (t[0],))


def test_autocast_casts_x_and_weights() -> None:
    t = _inputs(4, 8, 16, 8, torch.float32)
    with torch.autocast("cpu"):
        y = _call(t)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.sum(), t)
    assert all(g.dtype == torch.float32 for g in grads)


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    t = _inputs(4, 8, 16, 8, torch.float32)
    for recompute, products in ((False, 9), (True, 11)):
        with FlopCounterMode(display=False) as counter:
            _call(t, recompute=recompute).sum().backward()
        assert counter.get_total_flops() == products * 2 * 4 * 8 * 16, recompute


# ---- determinism


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_bits_over_runs_and_threads(dtype: torch.dtype) -> None:
    t = _inputs(450, 65, 200, 70, dtype)
    grad = torch.randn(450, 70, dtype=dtype)

    def results() -> list[torch.Tensor]:
        y = _call(t, activation="gelu", dropout_p=0.1, dropout_seed=9, backend="cpu")
        return [y, *torch.autograd.grad(y, t, grad)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results()
        for n in (2, 3, 1):
            torch.set_num_threads(n)
            assert all(torch.equal(a, b) for a, b in zip(results(), want)), n
    finally:
        torch.set_num_threads(threads)


# ---- bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": 3.0}, TypeError, "x must be a Tensor"),
        ({"x": torch.zeros(2, 9)}, ValueError, "w1 must be"),
        ({"w1": torch.zeros(8)}, ValueError, "w1 must have 2 dimensions"),
        (
            {"w1": torch.zeros(8, 4).double()},
            TypeError,
            "w1 is torch.float64 but x is torch.float32",
        ),
        ({"w2": torch.zeros(4, 9)}, ValueError, "w2 must be"),
        ({"b1": torch.zeros(4)}, ValueError, "b1 must have shape"),
        ({"gate_bias": torch.zeros(8)}, ValueError, "gate_bias needs gate_weight"),
        ({"gate_weight": torch.zeros(7, 4)}, ValueError, "gate_weight must have the shape of w1"),
        ({"activation": "tanh"}, ValueError, "activation must be one of"),
        ({"dropout_p": -0.5}, ValueError, "dropout_p must be between 0 and 1"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = (
        dict(zip(NAMES[:5], (t.detach() for t in _inputs(2, 4, 8, 4, torch.float32)))) | change
    )
    with pytest.raises(error, match=message):
        pt.feed_forward(**arguments)


def test_activation_returns_no_subnormals(backend: str) -> None:
    """gelu's left tail is full of subnormals, and each costs the next gemm a 100-cycle assist.

    The gemm took 16 times as long.
    """
    if backend != "cpu":
        pytest.skip("only the CPU's kernels flush them; GPUs compute with them at full speed")
    x = torch.linspace(-14, -12, 64)[:, None].repeat(1, 64)
    one = torch.eye(64)
    exact = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    tiny = torch.finfo(torch.float32).tiny
    assert ((exact != 0) & (exact.abs() < tiny)).any(), "the test must reach the tail"
    out = pt.feed_forward(x, one, None, one, None, activation="gelu", backend=backend, strict=True)
    assert not ((out != 0) & (out.abs() < tiny)).any()
    assert (out.double() - exact).abs().max() <= 14 * tiny, "x times a probability that was flushed"
