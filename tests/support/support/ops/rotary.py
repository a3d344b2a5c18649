# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv: fuzzer, mutants, calibration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pytransformer.testing import exact_rotary
from pytransformer.testing.case import Problem
from pytransformer.testing.exact_rotary import LIMITS, solve
from pytransformer.testing.oracle import exact

from .. import fuzz_rotary
from ..calibration import plain_calibration
from ..checks import Checks, Fuzzer, Mutants
from ..mutants_rotary import BACKWARD_FAULTS, FAULTS


def _problem(seed: int, case: int) -> Problem | None:
    """Return a problem with float32 tables, because PyTorch rounds narrower ones differently."""
    p = fuzz_rotary.draw(seed, case)
    if p.op == "append_kv" or not p.wanted or not p.tensors["x"].numel():
        return None
    p.tensors = {
        n: t.to(p.dtype) if n in ("x", "weight", "grad_out") else t for n, t in p.tensors.items()
    }
    return p


def _plain(p: Problem, t: Mapping[str, Tensor]) -> Tensor:
    """Compute like transformers' models: norm in float32, products and sum in x's dtype."""
    x = t["x"]
    if "weight" in t:
        wide = x.to(torch.float64 if p.dtype == torch.float64 else torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + p.keywords.get("eps", 1e-6))
        x = (t["weight"] + p.keywords.get("weight_offset", 0.0)) * wide.to(p.dtype)
    angles = exact_rotary._angles(p)
    assert angles is not None
    cos, sin = (a.to(p.dtype)[:, None] for a in angles)
    y = x[..., : cos.shape[-1]]
    other, sign = exact_rotary._partner(p, y)
    return torch.cat((y * cos + sign.to(p.dtype) * other * sin, x[..., cos.shape[-1] :]), -1)


def _ours(p: Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
    return fuzz_rotary.call(
        p, {n: v if n in p.wanted else v.detach() for n, v in t.items()}, backend
    )["out"]


CHECKS = Checks(
    fuzzer=Fuzzer(
        fuzz_rotary.draw,
        fuzz_rotary.examine,
        features=(
            "weight",
            "partial",
            "interleaved",
            "tables",
            "base",
            "grad_out",
            "strided",
            "weight_offset",
            "mixed",
        ),
        rare=(*fuzz_rotary.KINDS, "frequencies", "none", "padding", "pages", "scaling"),
    ),
    mutants=Mutants(fuzz_rotary.KINDS, FAULTS, BACKWARD_FAULTS),
    calibration=plain_calibration(
        _problem,
        lambda p: exact(solve(p)),
        _plain,
        _ours,
        ("out", "x", "weight"),
        LIMITS,
    ),
)
