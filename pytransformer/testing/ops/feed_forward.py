# SPDX-License-Identifier: Apache-2.0
"""feed_forward: named cases and exact results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import exact_feed_forward, oracle
from ..case import SEEDED, Builder, Case, Draw, Problem, Work, made
from ..kit import Kit

TENSORS = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")
KEYWORDS = ("activation", "dropout_p", "dropout_seed")


def _feed_forward(activation: str, gated: bool = False, bias: bool = True, **fixed: Any) -> Builder:
    def build(d: Draw) -> dict[str, Any]:
        def weight(*size: int) -> torch.Tensor:
            return d.normal(*size, scale=size[-1] ** -0.5)

        def vector(size: int) -> torch.Tensor | None:
            return d.normal(size, scale=0.1) if bias else None

        values = {
            "x": d.normal(d["rows"], d["d"]),
            "w1": weight(d["hidden"], d["d"]),
            "b1": vector(d["hidden"]),
            "w2": weight(d["d"], d["hidden"]),
            "b2": vector(d["d"]),
            "activation": activation,
        }
        if gated:
            values |= {"gate_weight": weight(d["hidden"], d["d"]), "gate_bias": vector(d["hidden"])}
        return {**values, **fixed}

    return build


CASES: dict[str, tuple[Builder, str]] = {
    "feed_forward_relu": (_feed_forward("relu"), ""),
    "feed_forward_gelu": (_feed_forward("gelu"), "core"),
    "feed_forward_gelu_tanh": (_feed_forward("gelu_tanh"), ""),
    "feed_forward_swiglu": (_feed_forward("silu", gated=True, bias=False), "gated self_check"),
    "feed_forward_dropout": (_feed_forward("relu", **SEEDED), "dropout"),
    "feed_forward_recompute": (_feed_forward("gelu", recompute=True), "recompute"),
}


def _cases(size: Mapping[str, int]) -> Iterator[Case]:
    for name, (build, tags) in CASES.items():
        work = partial(_work, 3 if "gated" in tags else 2)
        yield made(name, "feed_forward", "rows d hidden", size, build, tags, work)


def _work(products: int, s: Mapping[str, int]) -> Work:
    flops, weights = (
        2.0 * s["rows"] * s["d"] * s["hidden"] * products,
        s["d"] * s["hidden"] * products,
    )
    return Work(
        (flops, 2.0 * flops),
        (2 * s["rows"] * s["d"] + weights, 3 * s["rows"] * s["d"] + 2 * weights),
    )


def _solve(op: str, named: Mapping[str, Any], grads: list[Tensor] | None) -> oracle.Solution:
    return oracle.exact(
        exact_feed_forward.solve(Problem.of_call(op, named, grads, TENSORS, KEYWORDS))
    )


KIT = Kit(cases=_cases, solve=_solve, limits=exact_feed_forward.LIMITS)
