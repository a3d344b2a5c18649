# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: named cases and exact results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from .. import exact_cross_entropy, oracle
from ..case import Builder, Case, Draw, Problem, Work, made
from ..kit import Kit

TENSORS = ("x", "weight", "target", "bias", "class_weight")
KEYWORDS = ("ignore_index", "label_smoothing", "reduction", "softcap", "z_loss_weight")


def _cross_entropy(**fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        target = d.integers(0, d["classes"] - 1, d["rows"])
        target[::7] = -100
        weight = d.normal(d["classes"], d["d"], scale=d["d"] ** -0.5)
        return {"x": d.normal(d["rows"], d["d"]), "weight": weight, "target": target, **fixed}

    return build


CASES: dict[str, tuple[Builder, str]] = {
    "linear_cross_entropy": (_cross_entropy(), "core self_check"),
    "linear_cross_entropy_smooth": (_cross_entropy(label_smoothing=0.1), ""),
    "linear_cross_entropy_softcap": (_cross_entropy(softcap=30.0, z_loss_weight=1e-4), ""),
}


def _cases(size: Mapping[str, int]) -> Iterator[Case]:
    for name, (build, tags) in CASES.items():
        yield made(name, "linear_cross_entropy", "rows d classes", size, build, tags, _work)


def _work(s: Mapping[str, int]) -> Work:
    flops, inputs = (
        2.0 * s["rows"] * s["d"] * s["classes"],
        s["rows"] * s["d"] + s["classes"] * s["d"],
    )
    return Work((flops, 2.0 * flops), (inputs, 2 * inputs))


def _solve(op: str, named: Mapping[str, Any], grads: list[Tensor] | None) -> oracle.Solution:
    return oracle.exact(
        exact_cross_entropy.solve(Problem.of_call(op, named, grads, TENSORS, KEYWORDS))
    )


KIT = Kit(cases=_cases, solve=_solve, limits=exact_cross_entropy.LIMITS)
