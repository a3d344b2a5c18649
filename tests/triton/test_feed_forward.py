# SPDX-License-Identifier: Apache-2.0
"""feed_forward of the interpreted Triton backend on CPU tensors, through the public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import check_found, every_third
from kernel_mutants import mutated

import pytransformer as pt
from pytransformer.kernels import _lang
from pytransformer.kernels.feed_forward import bwd, configs, fwd, tiles
from pytransformer.reference.philox import TAG_FEED_FORWARD, column_keep_mask
from pytransformer.testing import bounds, exact_feed_forward, oracle
from pytransformer.testing.cases import Case, cases
from support import fuzz_feed_forward
from support.dropout_check import check_hidden_starts

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # from numpy, which interprets
CASES = [c.resize(rows=70, d=72, hidden=150) for c in cases("feed_forward", "small")]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")


def _inputs(
    rows: int, d: int, hidden: int, out: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    shapes = ((rows, d), (hidden, d), (hidden,), (out, hidden), (out,), (hidden, d), (hidden,))
    return [(torch.randn(s) / s[-1] ** 0.5).to(dtype).requires_grad_() for s in shapes]


def _call(
    t: list[torch.Tensor] | tuple[torch.Tensor, ...], backend: str = "triton", **keywords: Any
) -> torch.Tensor:
    return pt.feed_forward(
        *t[:5], **dict(zip(NAMES[5:], t[5:])), **keywords, backend=backend, strict=True
    )


def _results(t: list[torch.Tensor], **keywords: Any) -> list[torch.Tensor]:
    out = _call(t, **keywords)
    return [
        out,
        *torch.autograd.grad(
            out, t, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        ),
    ]


def _check(t: list[torch.Tensor | None], **keywords: Any) -> torch.Tensor:
    """Check the output and the gradients in t against float64; return the output."""
    named = {n: v for n, v in zip(NAMES, t) if v is not None}
    expected = [n for n, v in named.items() if v.requires_grad]
    out = _call(t, **keywords)
    grad = torch.randn_like(out)
    results = {
        "out": out,
        **dict(zip(expected, torch.autograd.grad(out, [named[n] for n in expected], grad))),
    }
    tensors = {n: v.detach() for n, v in named.items()} | {"grad_out": grad}
    problem = fuzz_feed_forward.Problem(
        "feed_forward",
        out.dtype,
        "zero_mean",
        tensors,
        {},
        {"activation": "relu", **keywords},
        expected,
    )
    solution = oracle.Solution(fuzz_feed_forward.solve(problem), 1, torch.empty(0), torch.empty(0))
    checks = bounds.check(solution, results, out.dtype, "zero_mean")
    assert all(c.ok for c in checks), "\n".join(map(str, checks))
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    """Check the output and all gradients of the shared cases."""
    args, kwargs = case.make("cpu", DTYPES[CASES.index(case) % 3], seed=0, requires_grad=True)
    _check([*args, *(kwargs.pop(n, None) for n in NAMES[5:])], **kwargs)


def test_dropout_mask_equals_the_reference() -> None:
    """Forward and backward have its bits; identity weights expose hidden."""
    x, eye = torch.full((5, 14, 200), 3.0, requires_grad=True), torch.eye(200)
    for p, seed in ((0.3, -(2**62) + 77), (1.0, 5)):
        out = pt.feed_forward(
            x, eye, None, eye, None, dropout_p=p, dropout_seed=seed, backend="triton"
        )
        (grad,) = torch.autograd.grad(out.sum(), x)
        keep = column_keep_mask(torch.tensor(seed), p, 70, 200, TAG_FEED_FORWARD).view(x.shape)
        assert torch.equal(out != 0, keep) and torch.equal(grad != 0, keep)


def test_slices_have_the_dropout_of_the_full_problem() -> None:
    check_hidden_starts("triton", (0, 32, 96))


@pytest.mark.parametrize(
    "line, fault",
    [
        ("from_start(i, dropout.row_start)", "i"),
        ("from_start(tl.min(n, 0), dropout.column_start)", "tl.min(n, 0)"),
    ],
)
def test_ignored_starts_are_detected(line: str, fault: str, tmp_path: Path) -> None:
    with (
        mutated("feed_forward", "tiles.py", line, fault, tmp_path),
        pytest.raises(AssertionError, match="row_start=5, column_start=32"),
    ):
        check_hidden_starts("triton", (32,))


def test_column_start_must_be_a_multiple_of_32() -> None:
    with pytest.raises(pt.BackendError, match="column_start is a multiple of 32, got 5"):
        check_hidden_starts("triton", (5,))


@pytest.mark.parametrize("gated", [False, True])
def test_recompute_changes_no_bit(gated: bool) -> None:
    t = _inputs(40, 16, 70, 20, torch.bfloat16)[: 7 if gated else 5]
    kept, again = (
        _results(t, activation="silu", dropout_p=0.2, dropout_seed=1, recompute=r)
        for r in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, again))


def test_library_gemm_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measured table may select it: the library multiplies, the kernel does the rest.

    Biases of another dtype use the fused kernel.
    """
    launched: list[bool] = []

    def observe(kernel: Any, programs: int, device: Any, *arguments: Any, **options: Any) -> None:
        launched.append(arguments[-1].FUSED)
        _lang.launch(kernel, programs, device, *arguments, **options)

    monkeypatch.setattr(configs, "INTERPRETED", configs.Config(32, 64, 64, 1, 1, library=True))
    for module in (fwd, bwd):
        monkeypatch.setattr(module, "launch", observe)
    for dtype, inputs, recompute in (
        (torch.bfloat16, 7, True),
        (torch.float32, 5, False),
        (torch.float16, 5, True),
    ):
        t = _inputs(40, 33, 70, 20, dtype)[:inputs]
        _check(t, activation="gelu_tanh", dropout_p=0.2, dropout_seed=1, recompute=recompute)
    assert set(launched) == {False}
    launched.clear()
    _call([v.detach().float() if i == 2 else v.detach() for i, v in enumerate(t)])
    assert launched == [True]


def test_strides_and_single_gradients_within_the_bound() -> None:
    """Rows have gaps, weights are transposed, batch dimensions permuted, gradients single."""
    t = [v.detach() for v in _inputs(42, 24, 70, 24)]
    wide = torch.randn(42, 50)
    laid = [
        wide[:, 3:27],
        t[1].t().contiguous().t(),
        t[2].repeat_interleave(2)[::2],
        t[3].t().contiguous().t(),
        *t[4:],
    ]
    for i in range(7):
        _check([v.detach().requires_grad_(j == i) for j, v in enumerate(laid)], activation="gelu")
    turned = laid[0].reshape(6, 7, 24).transpose(0, 1).requires_grad_()
    out = _check([turned, *laid[1:]])
    assert out.stride() == (24, 168, 1)


def test_nan_does_not_spread() -> None:
    t = [v.detach() for v in _inputs(70, 16, 40, 16)]
    t[0][2, 3] = float("nan")
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        y = _call(t[:5], activation=activation)
        assert y[2].isnan().all() and y[[0, 1, *range(3, 70)]].isfinite().all()


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_within_the_bound(activation: str) -> None:
    """Value and slope of a column of numbers, large ones included, are compared with float64."""
    x = torch.cat(
        [torch.linspace(-12, 12, 2001), torch.tensor([0.0, 1e-30, 30.0, -30.0, 1e4, -1e4, 1e30])]
    )
    x, one = x[:, None].requires_grad_(), torch.ones(1, 1)
    y = pt.feed_forward(x, one, None, one, None, activation=activation, backend="triton")
    (dx,) = torch.autograd.grad(y.sum(), x)
    z, dz = exact_feed_forward._activation(activation, x.detach().double())
    eps = torch.finfo(torch.float32).eps
    assert ((y - z).abs() <= 4 * eps * x.abs()).all()
    assert ((dx - dz).abs() <= 8 * eps * (1 + x.abs().clamp(max=12))).all()


def test_every_tile_is_visited_once() -> None:
    """The order of programs is a permutation, also if tiles are no multiple of a group."""
    for rows, columns in ((1, 1), (33, 200), (32 * 19, 64 * 3)):
        x, weight = torch.randn(rows, 4), torch.randn(columns, 4)
        out = pt.feed_forward(x, weight, None, torch.eye(columns), None, backend="triton")
        assert bounds.agree(out, torch.relu(x @ weight.t()))


MUTANTS = {
    "gate_and_up_exchanged": (
        "fwd.py",
        "activate(b_gate, C) * b_pre",
        "activate(b_pre, C) * b_gate",
    ),
    "gate_bias_ignored": (
        "fwd.py",
        "b_gate = plus_bias(b_gate, GATE_BIAS, n, shape.N)",
        "b_gate = b_gate",
    ),
    "value_for_slope": (
        "bwd.py",
        "b_dpre = b_dh * slope(b_pre, C)",
        "b_dpre = b_dh * activate(b_pre, C)",
    ),
    "hidden_not_dropped_in_backward": (
        "bwd.py",
        "narrow(drop(b_hidden, i, n, dropout, C),",
        "narrow(b_hidden,",
    ),
    "sums_over_rows_beyond_the_end": ("bwd.py", "tl.where(m, b_x, 0.0)", "b_x"),
    "dropout_not_scaled": ("tiles.py", "b_x * dropout.keep_scale", "b_x"),
    "dropout_words_exchanged": (
        "tiles.py",
        "row & 0xFFFFFFFF, row >> 32",
        "row >> 32, row & 0xFFFFFFFF",
    ),
    "last_products_left_out": (
        "tiles.py",
        "range(0, shape.K, C.BK)",
        "range(0, shape.K - C.BK + 1, C.BK)",
    ),
    "short_group_taken_for_whole": ("tiles.py", "i_inside % height\n", "i_inside % GROUP\n"),
}


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_fuzzer_detects_planted_faults(name: str, tmp_path: Path) -> None:
    check_found("feed_forward", MUTANTS[name], tmp_path)


def test_autocast_equals_the_reference() -> None:
    t = _inputs(6, 8, 16, 8)
    with torch.autocast("cpu"):
        y = _call(t)
    assert y.dtype == torch.bfloat16 and torch.autograd.grad(y.sum(), t)[1].dtype == torch.float32


def test_unsupported_arguments_give_a_reason() -> None:
    def reason(dtype: torch.dtype) -> str | None:
        return pt.explain("feed_forward", *(v.to(dtype) for v in _inputs(2, 3, 4, 3)[:5])).reasons[
            "triton"
        ]

    assert reason(torch.float16) is None
    assert "float64" in reason(torch.float64)


def test_measured_configurations_replace_the_heuristic() -> None:
    """Entries are per kernel, rows and dtype; candidates start with the measured entry."""
    few, many = (configs.config("hidden", 90, rows, 2) for rows in (16, 17))
    assert few.BM == 16 and many.BM == 64
    measured = {
        "hidden, 16 bit, up to 16 rows": {"BM": 16, "BN": 128, "BK": 64, "warps": 4, "stages": 4}
    }
    assert configs.config("hidden", 90, 3, 2, measured) == configs.Config(16, 128, 64, 4, 4)
    assert configs.config("hidden", 90, 3, 4, measured) == configs.config("hidden", 90, 3, 4)
    for kernel in configs.HEURISTIC:
        for rows in (1, 40, 9000):
            found = list(configs.candidates(kernel, rows, 2))
            assert found[0] == configs.config(kernel, 90, rows, 2) and found[-1].library
            assert len(set(found)) == len(found) and all(c.BN % 32 == 0 for c in found)
    assert tiles.TAG.value == TAG_FEED_FORWARD
