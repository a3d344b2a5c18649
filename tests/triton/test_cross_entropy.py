# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy of the interpreted Triton backend, through the public API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import check_found, every_third

import pytransformer as pt
from pytransformer.testing.cases import Case, cases
from support import fuzz_cross_entropy as random_problems
from support.ops.cross_entropy import results_at_offset

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("reduction", random_problems.REDUCTIONS)
@pytest.mark.parametrize("case", cases("linear_cross_entropy"), ids=lambda c: c.name)
def test_case_within_the_bound(case: Case, reduction: str) -> None:
    """Check the loss and all gradients of the shared cases in every dtype."""
    for dtype in DTYPES:
        _, wrong = random_problems.judge(
            random_problems.of_case(case, dtype, reduction=reduction), "triton", False
        )
        assert not wrong, "\n".join(wrong)


def test_logits_never_exceed_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytransformer.kernels.cross_entropy import bwd, chunks, configs, fwd

    shapes = []

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(out.shape))
        return torch.mm(a, b, out=out)

    for module in (chunks, bwd):
        monkeypatch.setattr(module, "float_gemm", product)
    rows, d, classes = 70, 8, 600
    x, w = torch.randn(rows, d, requires_grad=True), torch.randn(classes, d, requires_grad=True)
    pt.linear_cross_entropy(x, w, torch.zeros(rows, dtype=torch.int64), backend="triton").backward()
    most = configs.chunk_rows(classes)
    assert most < rows and fwd.chunk_rows is configs.chunk_rows
    logits = [n for n, width in shapes if width == classes]
    assert max(logits) <= most and sum(logits) == 2 * rows  # forward and backward


def test_rows_of_different_gradients_stay_accurate() -> None:
    """Upstream gradients are 1e-4 to 1 in float16; each row of dx is as accurate as alone."""
    x, w = torch.randn(8, 24).half().requires_grad_(), torch.randn(90, 24).half().requires_grad_()
    target, g = torch.arange(8), 10.0 ** -torch.arange(8).div(2)
    (dx,) = torch.autograd.grad(
        pt.linear_cross_entropy(x, w, target, reduction="none", backend="triton"), x, g
    )
    for i in range(8):
        row = x[i].detach().requires_grad_()
        loss = pt.linear_cross_entropy(row, w, target[i], reduction="none", backend="triton")
        assert torch.equal(torch.autograd.grad(loss, row, g[i])[0], dx[i])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shift_of_all_logits_changes_no_bit(dtype: torch.dtype) -> None:
    at_zero = results_at_offset(0.0, "triton", dtype)
    for offset in (2.0**10, 2.0**20):
        assert all(map(torch.equal, results_at_offset(offset, "triton", dtype), at_zero)), offset


def test_empty_inputs() -> None:
    w = torch.randn(5, 4, requires_grad=True)
    x, target = torch.randn(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    assert pt.linear_cross_entropy(x, w, target, backend="triton").isnan()
    loss = pt.linear_cross_entropy(x, w, target, reduction="sum", backend="triton")
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert loss == 0 and dx.shape == x.shape and not dw.any()


def test_bad_targets_raise() -> None:
    x, w = torch.randn(2, 4), torch.randn(5, 4)
    with pytest.raises(ValueError, match="target must be between 0 and 4"):
        pt.linear_cross_entropy(x, w, torch.tensor([1, 5]), backend="triton")


def test_unsupported_arguments_give_a_reason() -> None:
    x, target = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    assert pt.explain("linear_cross_entropy", x, x, target).reasons["triton"] is None
    assert (
        "float64"
        in pt.explain("linear_cross_entropy", x.double(), x.double(), target).reasons["triton"]
    )


# Faults of other losses, each in a line of our kernels: (file, line, replacement).
MUTANTS = {
    "last_block_alone": ("fwd.py", "b_l = b_l * tl.exp2((b_m - safe) * LOG2E) + ", "b_l = "),
    "sum_not_rescaled": ("fwd.py", "b_l * tl.exp2((b_m - safe) * LOG2E)", "b_l"),
    "base_two": ("fwd.py", "tl.log2(b_l) * LN2", "tl.log2(b_l)"),
    "bias_missing_at_the_target": (
        "fwd.py",
        "b_z += tl.load(BIAS + k, mask",
        "b_z += 0.0 * tl.load(BIAS + k, mask",
    ),
    "smoothing_over_the_padding": (
        "fwd.py",
        "b_sum / classes - b_m",
        "b_sum / (tl.cdiv(classes, C.BN) * C.BN) - b_m",
    ),
    "smoothing_missing_in_backward": ("bwd.py", "b_dz -= p.on_each / classes", "b_dz -= 0.0"),
    "target_keeps_its_share": (
        "bwd.py",
        "== target[:, None], p.on_target, 0.0)",
        "== target[:, None], 1.0, 0.0)",
    ),
    "ignored_rows_count": ("bwd.py", "(target != p.ignore_index) & ", ""),
    "ignored_rows_reach_the_weight": (
        "bwd.py",
        "torch.where(valid[part], x * share[part, None], 0.0)",
        "(x * share[part, None])",
    ),
    "upstream_missing_in_dx": ("bwd.py", "(g[part] / kind.SCALE)", "(g[:1] / kind.SCALE)"),
    "upstream_missing_in_dweight": ("bwd.py", "mul(total, most", "mul(total, 1.0"),
    "upstream_missing_in_dbias": (
        "bwd.py",
        "b_dz * tl.load(G + i, mask=i < p.rows, other=0.0)[:, None]",
        "b_dz",
    ),
    "last_chunk_alone": ("bwd.py", "total[some] += ", "total[some] = "),
    "bias_of_the_last_chunk_alone": (
        "bwd.py",
        "tl.load(DBIAS + j, mask=j < classes, other=0.0) + ",
        "",
    ),
    "softcap_missing_in_backward": ("bwd.py", "b_dz *= (1.0 - b_t) * (1.0 + b_t)", "b_dz *= 1.0"),
    "softcap_missing_at_the_target": (
        "fwd.py",
        "b_z = C.SOFTCAP * tanh(b_z / C.SOFTCAP)",
        "b_z = b_z",
    ),
    "p_factor_missing": ("bwd.py", "b_p *= tl.load(", "b_p *= 1.0 + 0.0 * tl.load("),
    "class_weight_missing_in_backward": (
        "bwd.py",
        "b_q *= tl.load(CLASS_WEIGHT + j",
        "b_q *= 1.0 + 0.0 * tl.load(CLASS_WEIGHT + j",
    ),
    "class_weight_missing_in_the_mean": (
        "fwd.py",
        "b_w *= tl.load(CLASS_WEIGHT + j",
        "b_w *= 1.0 + 0.0 * tl.load(CLASS_WEIGHT + j",
    ),
    "argmax_within_its_block": ("fwd.py", "t * C.BN + tl.argmax(", "tl.argmax("),
    "half_scale_left_in": ("bwd.py", "most / kind.SCALE, out", "most, out"),
}


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_fuzzer_detects_planted_faults(name: str, tmp_path: Path) -> None:
    check_found("cross_entropy", MUTANTS[name], tmp_path)
