# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm: named cases, exact solutions, fuzzer, calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...ops.layer_norm import add_norm, layer_norm
from .. import fuzz_layer_norm, oracle
from ..calibration import plain_calibration, usual
from ..case import SEEDED, Builder, Case, Draw, Work, made
from ..faults import BACKWARD_FAULTS
from ..judge import exact
from ..kit import Fuzzer, Kit, Mutants
from ..mutants_layer_norm import FAULTS


def _norm(weight: bool = True, bias: bool = True, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        values = {"x": d.normal(d["rows"], d["d"]), "normalized_shape": (d["d"],)}
        if weight:
            values["weight"] = 1 + d.normal(d["d"], scale=0.1)
        if bias:
            values["bias"] = d.normal(d["d"], scale=0.1)
        return {**values, **fixed}

    return build


def _add_norm(kind: str, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        values = {
            "x": d.normal(d["rows"], d["d"]),
            "residual": d.normal(d["rows"], d["d"]),
            "weight": 1 + d.normal(d["d"], scale=0.1),
        }
        if kind == "layer":
            values["bias"] = d.normal(d["d"], scale=0.1)
        return {**values, "kind": kind, **fixed}

    return build


ADD_NORM = "add_norm"
CASES: dict[str, tuple[str, Builder, str]] = {
    "layer_norm": ("layer_norm", _norm(), "core self_check"),
    "layer_norm_plain": ("layer_norm", _norm(weight=False, bias=False), ""),
    "rms_norm": ("rms_norm", _norm(bias=False, eps=1e-6), "core self_check"),
    "add_norm": (ADD_NORM, _add_norm("layer"), "core"),
    "add_norm_dropout": (ADD_NORM, _add_norm("layer", **SEEDED), "core dropout self_check"),
    "add_rms_norm": (ADD_NORM, _add_norm("rms", eps=1e-6), ""),
}


def _cases(size: Mapping[str, int]) -> Iterator[Case]:
    for name, (op, build, tags) in CASES.items():
        yield made(name, op, "rows d", size, build, tags, _added if op == ADD_NORM else _normed)


def _normed(s: Mapping[str, int], operands: int = 2) -> Work:
    """Return 5 operations per element forward and 10 backward, without a matrix product."""
    elements = s["rows"] * s["d"]
    return Work((5.0 * elements, 10.0 * elements), (operands * elements, (operands + 1) * elements))


def _added(s: Mapping[str, int]) -> Work:
    return _normed(s, operands=4)  # x, residual -> normed, residual_out


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


def _solve(op: str, named: Mapping[str, Any], grads: list[Tensor] | None) -> oracle.Solution:
    tensors = {
        name: named[name]
        for name in ("x", "residual", "weight", "bias")
        if named.get(name) is not None
    }
    tensors |= dict(zip(("grad_out", "grad_residual_out"), grads or []))
    keywords: dict[str, Any] = {
        name: named[name] for name in ("eps", "kind", "dropout_p", "dropout_seed") if name in named
    }
    drawn = fuzz_layer_norm.Problem(op, named["x"].dtype, 1, "zero_mean", tensors, {}, keywords, [])
    stored = None
    if op == ADD_NORM:
        # The norm's input is the stored sum, rounded once.
        kept = fuzz_layer_norm.keep_factor(drawn)
        stored = (named["x"].double() * kept + named["residual"].double()).to(
            named["residual"].dtype
        )
    return exact(fuzz_layer_norm.solve(drawn, stored))


def _plain(p: fuzz_layer_norm.Problem, t: Mapping[str, Tensor]) -> Tensor:
    shape = t["x"].shape[t["x"].dim() - p.dims :]
    if p.op == "rms_norm":
        return F.rms_norm(t["x"], shape, t.get("weight"), **p.keywords)
    return F.layer_norm(t["x"], shape, t.get("weight"), t.get("bias"), **p.keywords)


def _ours(p: fuzz_layer_norm.Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
    return fuzz_layer_norm.call(p, dict(t), backend)["out"]


def _problem(seed: int, case: int) -> fuzz_layer_norm.Problem | None:
    p = usual(fuzz_layer_norm.draw(seed, case))
    return None if p is None or p.op == ADD_NORM else p  # the norm of a stored sum adds nothing


KIT = Kit(
    cases=_cases,
    solve=_solve,
    limits=fuzz_layer_norm.LIMITS,
    fuzzer=Fuzzer(
        fuzz_layer_norm.draw,
        fuzz_layer_norm.examine,
        features=("residual", "dropout_p", "bias", "offset", "mixed", "grad_residual_out"),
        rare=(*fuzz_layer_norm.KINDS, "weight", "3d"),
    ),
    mutants=Mutants(fuzz_layer_norm.KINDS, FAULTS, BACKWARD_FAULTS),
    calibration=plain_calibration(
        _problem,
        lambda p: exact(fuzz_layer_norm.solve(p, None)),
        _plain,
        _ours,
        ("out", "x", "weight", "bias"),
        fuzz_layer_norm.LIMITS,
    ),
)
