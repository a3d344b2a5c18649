# SPDX-License-Identifier: Apache-2.0
"""feed_forward: fuzzer, mutants, calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pytransformer.testing.case import Problem
from pytransformer.testing.exact_feed_forward import LIMITS, solve
from pytransformer.testing.oracle import exact

from .. import fuzz_feed_forward
from ..calibration import plain_calibration, usual
from ..checks import Checks, Fuzzer, Mutants
from ..faults import BACKWARD_FAULTS
from ..mutants_feed_forward import FAULTS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _plain(p: Problem, t: Mapping[str, Tensor]) -> Tensor:
    act = ACTIVATIONS[p.keywords["activation"]]
    hidden = F.linear(t["x"], t["w1"], t.get("b1"))
    hidden = (
        act(F.linear(t["x"], t["gate_weight"], t.get("gate_bias"))) * hidden
        if "gate_weight" in t
        else act(hidden)
    )
    return F.linear(hidden, t["w2"], t.get("b2"))


def _ours(p: Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
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


CHECKS = Checks(
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
        lambda p: exact(solve(p)),
        _plain,
        _ours,
        ("out", "x", "w1", "w2", "b1", "b2", "gate_weight", "gate_bias"),
        LIMITS,
    ),
)
