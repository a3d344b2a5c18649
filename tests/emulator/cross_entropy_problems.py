# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the cross-entropy kernels for sm_90a."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from named import Named

import pytransformer as pt
from pytransformer.testing.case import Problem
from support import fuzz_cross_entropy

RAW_OP = "cross_entropy_fwd"
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def problem(
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    bias: torch.dtype | None = None,
    ignored: bool = False,
    wanted: Sequence[str] | None = None,
    layout: str = "contiguous",
    **keywords: Any,
) -> Problem:
    """Return a problem of rows, d and classes, with the gradients in `wanted`.

    Every third row is ignored and contains NaN.
    """
    rows, d, classes = sizes
    torch.manual_seed(rows + classes)
    x, weight = (torch.randn(n, d, dtype=F64) for n in (rows, classes))
    target = torch.randint(0, classes, (rows,))
    target[0], target[-1] = classes - 1, 0
    if ignored:
        target[1::3] = keywords.get("ignore_index", -100)
        x[1::3] = torch.nan
    tensors = {"x": x.to(dtype), "weight": (weight / d**0.5).to(dtype), "target": target}
    if keywords.pop("class_weight", False):
        tensors["class_weight"] = torch.rand(classes) * 4 + 0.1
    if bias is not None:
        tensors["bias"] = torch.randn(classes, dtype=F64).to(bias)
    if wanted is None:
        wanted = [n for n in tensors if n not in fuzz_cross_entropy.NO_GRADIENT]
    tensors["grad_out"] = torch.randn((rows,) if keywords.get("reduction") == "none" else ())
    layouts = dict.fromkeys(tensors, layout)
    op = "linear_cross_entropy"
    return Problem(op, dtype, "zero_mean", tensors, layouts, keywords, list(wanted))


# Tiles of 128 rows and 256 classes, or 128 if these are few, steps of 64. Emulated, forward
# processes 128 or 256 rows at a time and backward 128 or more of few classes, on two
# multiprocessors. In bfloat16 without a softcap, forward computes the gradients of reduced losses.
PROBLEMS = {
    "several tiles": problem(BF16, (150, 72, 600), F32, ignored=True, label_smoothing=0.1),
    "chunks": problem(F16, (300, 24, 264), F16, reduction="sum"),
    "weighted rows": problem(BF16, (70, 136, 520), reduction="none", label_smoothing=0.3,
        ignored=True),
    "led": problem(BF16, (140, 264, 520), BF16, label_smoothing=0.1),  # more steps than stages
    "half": problem(F16, (40, 40, 300), F32, ignored=True, reduction="none", ignore_index=7),
    "odd sizes": problem(BF16, (37, 33, 77), BF16, reduction="sum", label_smoothing=1.0),
    "strides": problem(F16, (50, 24, 130), F64, layout="step", ignored=True),
    "only the bias": problem(BF16, (200, 16, 264), BF16, wanted=["bias"]),
    "only the weight": problem(BF16, (140, 20, 40), wanted=["weight"], ignored=True),
    "softcap": problem(BF16, (150, 72, 600), F32, ignored=True, softcap=2.0, label_smoothing=0.1),
    "softcap and z-loss": problem(F16, (300, 24, 264), F16, softcap=3.0, z_loss_weight=0.02),
    "z-loss of rows": problem(BF16, (70, 136, 520), reduction="none", z_loss_weight=0.1,
        return_z_loss=True, ignored=True),
    "class weights": problem(F16, (140, 40, 300), F32, class_weight=True, z_loss_weight=0.05,
        ignored=True),
    "gradients in forward": problem(BF16, (70, 136, 520), F32, class_weight=True,
        z_loss_weight=0.05, ignored=True),
    "two blocks of classes": problem(BF16, (66, 16, 2100), BF16, reduction="sum"),
    "one class": problem(F16, (3, 8, 1), F32),
    "one of each": problem(BF16, (1, 1, 2), BF16, label_smoothing=0.5),
}  # fmt: skip


def supported(problem: Problem, device: str = "cpu") -> bool:
    """Return true if the backend "cuda" supports the problem's dtype and options."""
    t = {name: tensor.to(device) for name, tensor in problem.tensors.items()}
    explained = pt.explain(
        "linear_cross_entropy", t["x"], t["weight"], t["target"],
        class_weight=t.get("class_weight"), **problem.keywords,
    )  # fmt: skip
    return explained.reasons["cuda"] is None


def problems() -> Iterator[Named]:
    yield from (Named(name, found) for name, found in PROBLEMS.items())


def wrong(named: Named) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    before = torch.ops.pytransformer_C.emulator_products()
    _, found = fuzz_cross_entropy.judge(named.problem, "cuda", False)
    if not found and torch.ops.pytransformer_C.emulator_products() == before:
        found.append("no product of a warpgroup")
    return found
