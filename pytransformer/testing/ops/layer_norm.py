# SPDX-License-Identifier: Apache-2.0
"""layer_norm, rms_norm and add_norm: named cases and exact results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .. import exact_layer_norm, oracle
from ..case import SEEDED, Builder, Case, Draw, Problem, Work, made
from ..kit import Kit

TENSORS = ("x", "residual", "weight", "bias")
KEYWORDS = ("eps", "kind", "dropout_p", "dropout_seed")


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


def _solve(op: str, named: Mapping[str, Any], grads: list[Tensor] | None) -> oracle.Solution:
    drawn, stored = Problem.of_call(op, named, grads, TENSORS, KEYWORDS), None
    if op == ADD_NORM:
        # The norm's input is the stored sum, rounded once.
        kept = exact_layer_norm.keep_factor(drawn)
        stored = named["x"].double() * kept + named["residual"].double()
        stored = stored.to(named["residual"].dtype)
    return oracle.exact(exact_layer_norm.solve(drawn, stored))


KIT = Kit(cases=_cases, solve=_solve, limits=exact_layer_norm.LIMITS)
