# SPDX-License-Identifier: Apache-2.0
"""feed_forward: named cases, exact solutions, fuzzer features, calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import fuzz_feed_forward, oracle
from ..calibration import plain_calibration, usual
from ..case import SEEDED, Builder, Case, Draw, Work, made
from ..faults import BACKWARD_FAULTS
from ..judge import exact
from ..kit import Fuzzer, Kit, Mutants
from ..mutants_feed_forward import FAULTS

TENSORS = ("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


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
    tensors = {name: named[name] for name in TENSORS if named.get(name) is not None}
    tensors |= dict(zip(("grad_out",), grads or []))
    keywords = {
        name: named[name] for name in ("activation", "dropout_p", "dropout_seed") if name in named
    }
    drawn = fuzz_feed_forward.Problem(named["x"].dtype, "zero_mean", tensors, {}, keywords, [])
    return exact(fuzz_feed_forward.solve(drawn))


def _plain(p: fuzz_feed_forward.Problem, t: Mapping[str, Tensor]) -> Tensor:
    act = ACTIVATIONS[p.keywords["activation"]]
    hidden = F.linear(t["x"], t["w1"], t.get("b1"))
    hidden = (
        act(F.linear(t["x"], t["gate_weight"], t.get("gate_bias"))) * hidden
        if "gate_weight" in t
        else act(hidden)
    )
    return F.linear(hidden, t["w2"], t.get("b2"))


def _ours(p: fuzz_feed_forward.Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
    import pytransformer as pt

    gate: dict[str, Any] = {name: t.get(name) for name in ("gate_weight", "gate_bias")}
    return pt.feed_forward(
        t["x"],
        t["w1"],
        t.get("b1"),
        t["w2"],
        t.get("b2"),
        **gate,
        **p.keywords,
        backend=backend,
        strict=True,
    )


KIT = Kit(
    cases=_cases,
    solve=_solve,
    limits=fuzz_feed_forward.LIMITS,
    fuzzer=Fuzzer(
        fuzz_feed_forward.draw,
        fuzz_feed_forward.examine,
        features=(
            *fuzz_feed_forward.ACTIVATIONS,
            *(
                "b1",
                "b2",
                "gate_weight",
                "gate_bias",
                "dropout_p",
                "recompute",
                "strided",
                "positive",
                "large",
            ),
        ),
    ),
    mutants=Mutants(("feed_forward",), FAULTS, BACKWARD_FAULTS),
    calibration=plain_calibration(
        lambda seed, case: usual(fuzz_feed_forward.draw(seed, case)),
        lambda p: exact(fuzz_feed_forward.solve(p)),
        _plain,
        _ours,
        ("out", "x", "w1", "w2", "b1", "b2", "gate_weight", "gate_bias"),
        fuzz_feed_forward.LIMITS,
    ),
)
