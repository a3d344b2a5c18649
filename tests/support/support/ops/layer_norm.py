# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm: fuzzer, mutants, calibration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from pytransformer.ops.layer_norm import add_norm, layer_norm
from pytransformer.testing.case import Problem
from pytransformer.testing.exact_layer_norm import LIMITS, solve
from pytransformer.testing.oracle import exact

from .. import fuzz_layer_norm
from ..calibration import plain_calibration, usual
from ..checks import Checks, Fuzzer, Mutants
from ..faults import BACKWARD_FAULTS
from ..mutants_layer_norm import FAULTS


def constant_rows_off_their_bias(backend: str, columns: int) -> list[str]:
    """Return the constant rows whose layer norm differs from the bias; they have no deviation."""
    wrong = []
    bias = torch.linspace(-2, 2, columns)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (0.25, 100.0, -1000.0, 30000.0):
            x = torch.full((3, columns), value, dtype=dtype)
            expected = bias.to(dtype).expand_as(x)
            plain = layer_norm(x, columns, torch.ones(columns), bias, backend=backend, strict=True)
            added, _ = add_norm(
                x, torch.zeros_like(x), torch.ones(columns), bias, backend=backend, strict=True
            )
            wrong += [
                f"{dtype}, {value}, {op}"
                for op, y in (("plain", plain), ("added", added))
                if not torch.equal(y, expected)
            ]
    return wrong


def _plain(p: Problem, t: Mapping[str, Tensor]) -> Tensor:
    shape = t["x"].shape[t["x"].dim() - p.dims :]
    if p.op == "rms_norm":
        return F.rms_norm(t["x"], shape, t.get("weight"), **p.keywords)
    return F.layer_norm(t["x"], shape, t.get("weight"), t.get("bias"), **p.keywords)


def _ours(p: Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
    return fuzz_layer_norm.call(p, dict(t), backend)["out"]


def _problem(seed: int, case: int) -> Problem | None:
    p = usual(fuzz_layer_norm.draw(seed, case))
    return None if p is None or p.op == "add_norm" else p  # the norm of a stored sum adds nothing


CHECKS = Checks(
    fuzzer=Fuzzer(
        fuzz_layer_norm.draw,
        fuzz_layer_norm.examine,
        features=("residual", "dropout_p", "bias", "offset", "mixed", "grad_residual_out"),
        rare=(*fuzz_layer_norm.KINDS, "weight", "3d"),
    ),
    mutants=Mutants(fuzz_layer_norm.KINDS, FAULTS, BACKWARD_FAULTS),
    calibration=plain_calibration(
        _problem,
        lambda p: exact(solve(p, None)),
        _plain,
        _ours,
        ("out", "x", "weight", "bias"),
        LIMITS,
    ),
)
