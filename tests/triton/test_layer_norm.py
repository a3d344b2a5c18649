# SPDX-License-Identifier: Apache-2.0
"""The norms of the interpreted Triton backend on CPU tensors, through the public API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import check_found, every_third
from kernel_mutants import mutated

import pytransformer as pt
from pytransformer.reference.philox import TAG_ADD_NORM, column_keep_mask
from pytransformer.testing.cases import Case, cases
from support import fuzz_layer_norm
from support.dropout_check import check_norm_starts
from support.ops.layer_norm import constant_rows_off_their_bias

CASES = [c for op in fuzz_layer_norm.KINDS for c in cases(op, "small")]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
WIDE = 1300  # columns: more than one program of the interpreter processes at once


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    """Check outputs and all gradients of the shared cases in every dtype."""
    for dtype in DTYPES:
        _, wrong = fuzz_layer_norm.judge(fuzz_layer_norm.of_case(case, dtype), "triton", False)
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("columns", [1, 33, 300, WIDE])
def test_dropout_mask_equals_the_reference(columns: int) -> None:
    """Forward and backward have its bits in every class of tile."""
    x, seed = (
        torch.full((70 if columns < WIDE else 9, columns), 7.0, requires_grad=True),
        torch.tensor(-(2**61) + 12345),
    )
    for p in (0.3, 1.0):
        _, stream = pt.add_norm(x, None, None, dropout_p=p, dropout_seed=seed, backend="triton")
        (dx,) = torch.autograd.grad(stream.sum(), x)
        keep = column_keep_mask(seed, p, *x.shape, TAG_ADD_NORM)
        assert torch.equal(stream != 0, keep) and torch.equal(dx != 0, keep)


def test_slices_of_rows_have_the_dropout_of_the_full_problem() -> None:
    for columns in (33, WIDE):
        check_norm_starts("triton", columns)


def test_ignored_starts_are_detected(tmp_path: Path) -> None:
    with (
        mutated("layer_norm", "rows.py", "from_start(r, p.row_start)", "r", tmp_path),
        pytest.raises(AssertionError, match="row_start=5"),
    ):
        check_norm_starts("triton", 33)


def _error_at_a_large_mean(kind: str, columns: int) -> float:
    x = 100 + 0.1 * torch.randn(9, columns)
    ours = getattr(pt, f"{kind}_norm")(x, columns, eps=1e-5, backend="triton").double()
    exact = getattr(F, f"{kind}_norm")(x.double(), (columns,), eps=1e-5)
    return float((ours - exact).abs().max())


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("columns", [500, WIDE])
def test_large_mean_loses_no_accuracy(kind: str, columns: int) -> None:
    assert _error_at_a_large_mean(kind, columns) < 2e-6


@pytest.mark.parametrize("columns", [500, WIDE])
def test_constant_rows_give_the_bias(columns: int) -> None:
    assert not constant_rows_off_their_bias("triton", columns)


def test_one_pass_mean_is_detected(tmp_path: Path) -> None:
    """A one-pass mean stays within the bound but breaks the kernels' promise."""
    with mutated(
        "layer_norm", "fwd.py", "            b_mean = mean_of(b_h, columns)\n", "", tmp_path
    ):
        assert _error_at_a_large_mean("layer", 500) > 1e-5


def test_nan_does_not_spread() -> None:
    for columns in (70, WIDE):
        x = torch.randn(5, columns)
        x[2, 3], x[4, -1] = float("nan"), float("inf")
        y = pt.layer_norm(x, columns, backend="triton")
        assert y[[2, 4]].isnan().all()
        assert torch.equal(y[[0, 1, 3]], pt.layer_norm(x[[0, 1, 3]], columns, backend="triton"))


def test_dropout_removes_nan() -> None:
    x = torch.full((2, 64), float("nan"))
    normed, stream = pt.add_norm(x, torch.ones(2, 64), None, dropout_p=1.0, backend="triton")
    assert torch.equal(stream, torch.ones(2, 64)) and normed.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4, 8)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = pt.layer_norm(x, shape[-1], w, backend="triton")
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.shape == dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w))


def test_single_gradients_equal_those_of_all() -> None:
    """A kernel compiled for one gradient gives the bits of the kernel for all."""
    for columns in (40, WIDE):
        x, r = torch.randn(2, 3, columns).unbind()
        leaves = [t.requires_grad_() for t in (x, r, torch.randn(columns), torch.randn(columns))]
        outputs = pt.add_norm(*leaves, dropout_p=0.2, dropout_seed=5, backend="triton")
        grads = [torch.randn_like(o) for o in outputs]
        together = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
        for leaf, want in zip(leaves, together):
            fixed = [t if t is leaf else t.detach() for t in leaves]
            alone = pt.add_norm(*fixed, dropout_p=0.2, dropout_seed=5, backend="triton")
            pairs = [(o, g) for o, g in zip(alone, grads) if o.requires_grad]
            assert torch.equal(
                torch.autograd.grad([o for o, _ in pairs], leaf, [g for _, g in pairs])[0], want
            )


def test_memory_order_is_kept() -> None:
    """A (B, L, C) view of (L, B, C) memory is read and written in place."""
    x = torch.randn(7, 5, 33).transpose(0, 1).requires_grad_()
    y = pt.layer_norm(x, 33, backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch.randn(7, 5, 33).transpose(0, 1))
    assert y.stride() == dx.stride() == x.stride()
    assert torch.equal(y, pt.layer_norm(x.contiguous(), 33, backend="triton"))


def test_unsupported_arguments_give_a_reason() -> None:
    x = torch.zeros(2, 8)
    assert pt.explain("layer_norm", x, 8).reasons["triton"] is None
    assert "x in float64" in pt.explain("layer_norm", x.double(), 8).reasons["triton"]
    with pytest.raises(pt.BackendError, match="residual in float64"):
        pt.add_norm(x, x.double(), None, backend="triton")


# Faults of other norms, each in a line of our kernels: (file, line, replacement).
MUTANTS = {
    "eps_ignored": ("fwd.py", "divided(b_m2, columns) + p.eps", "divided(b_m2, columns)"),
    "mean_counts_padding": ("rows.py", "tl.sum(b, 1) / columns", "tl.sum(b, 1) / b.shape[1]"),
    "padding_in_the_variance": (
        "fwd.py",
        "            b_h = tl.where(m, b_h - b_shift[:, None], 0.0)\n            b_mean",
        "            b_h -= b_shift[:, None]\n            b_mean",
    ),
    "blocks_merged_without_distance": (
        "fwd.py",
        "b_m2 + m2 + delta * delta * (b_n * share)",
        "b_m2 + m2",
    ),
    "blocks_merged_by_half": ("fwd.py", "share = tl.div_rn(n, b_n + n)", "share = 0.5"),
    "norm_of_the_unrounded_sum": ("fwd.py", "        b_h = stored.to(tl.float32)\n", ""),
    "weight_after_bias": ("fwd.py", "b_xhat += load_vector(BIAS", "b_xhat *= load_vector(BIAS"),
    "dropout_shifted_by_a_row": ("rows.py", "(r & 0xFFFFFFFF)", "((r + 1) & 0xFFFFFFFF)"),
    "dropout_shifted_by_a_block": ("rows.py", "j0, p.threshold", "j0 + 32, p.threshold"),
    "dropped_only_forward": ("bwd.py", "narrow(dropped(b_dh, r, j0, p, C), DX", "narrow(b_dh, DX"),
    "stream_gradient_ignored": ("bwd.py", "b_dh += tl.load", "b_dh += 0.0 * tl.load"),
    "mean_of_g_ignored": ("bwd.py", "        b_dh -= b_gm[:, None]\n", "        b_dh -= 0.0\n"),
    "weight_missing_in_gx": (
        "bwd.py",
        "b_gx = mean_of(b_g * b_xhat",
        "b_gx = mean_of(b_dy * b_xhat",
    ),
    "wide_rows_lose_a_block": ("bwd.py", "b_gx += mean_of", "b_gx = mean_of"),
    "last_part_left_out": ("bwd.py", "m = (i < parts)", "m = (i < parts - 1)"),
    "parts_of_one_program": (
        "bwd.py",
        "p_part = i_part.to(tl.int64) * columns",
        "p_part = 0 * i_part.to(tl.int64)",
    ),
    "columns_beyond_the_row": (
        "rows.py",
        "(columns_of(j0, C) < columns)",
        "(columns_of(j0, C) <= columns)",
    ),
    "rows_beyond_the_last": ("fwd.py", "m_r = r < p.rows", "m_r = r <= p.rows"),
    "strided_rows_as_flat": (
        "rows.py",
        "r // p.inner * stride.outer",
        "r // p.inner * stride.inner",
    ),
}


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_fuzzer_detects_planted_faults(name: str, tmp_path: Path) -> None:
    check_found("layer_norm", MUTANTS[name], tmp_path)
