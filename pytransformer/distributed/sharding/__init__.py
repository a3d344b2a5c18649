# SPDX-License-Identifier: Apache-2.0
"""The ops on DTensors: splits of a call over a device mesh. See docs/distributed.md."""

from __future__ import annotations

from typing import Any

import torch

from ...ops._core.op import Op
from . import cross_entropy, rules
from .call import Rule, run_split
from .ways import WHOLE as WHOLE
from .ways import Way as Way

RULES: dict[str, Rule] = {**rules.RULES, **cross_entropy.RULES}
# Ops with custom collectives.
RUNS: dict[str, Any] = {**cross_entropy.RUNS}


def run(op: Op, a: Any, backend: str | None, strict: bool) -> tuple[torch.Tensor, ...]:
    """Run a call of the op with DTensors among its arguments."""
    own = RUNS.get(op.name)
    return (
        run_split(op, a, backend, strict, RULES[op.name](a))
        if own is None
        else own(op, a, backend, strict)
    )
