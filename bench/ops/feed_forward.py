# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of feed_forward.

bench/conftest.py runs the cases, tune.py the tuning problems, overhead.py the tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.kernels.feed_forward import configs
from pytransformer.ops.feed_forward import feed_forward_op


def test_speed(timed) -> None:
    timed()


def tune(tools: ModuleType) -> Iterator[Any]:
    """Yield the problem classes for bench/tools/tune.py."""
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in configs.HEURISTIC:
            for rows in (16, 64, 8192):
                yield tools.Task(
                    "feed_forward",
                    configs.key_of(kernel, rows, dtype.itemsize),
                    "feed_forward_" + kernel.removesuffix(" gated"),
                    tools.nearest_first(configs.candidates(kernel, rows, dtype.itemsize)),
                    _feed_forward(tools, kernel, rows, dtype),
                )


def _feed_forward(
    tools: ModuleType, kernel: str, rows: int, dtype: torch.dtype
) -> Callable[..., Any]:
    def prepare(device: str, small: bool, backend: str) -> Any:
        d, hidden = (128, 256) if small else (4096, 14336)
        make = tools.random_values(device, dtype)
        x, w1, w2 = (
            make(min(rows, 100) if small else rows, d),
            make(hidden, d) / d**0.5,
            make(d, hidden) / hidden**0.5,
        )
        gate = {"gate_weight": make(hidden, d) / d**0.5} if "gated" in kernel else {}
        a, _, _ = feed_forward_op.prepare(
            x, w1, make(hidden), w2, None, activation="silu" if gate else "gelu", **gate
        )
        return tools.direction(
            feed_forward_op,
            a._replace(save=kernel == "d_hidden"),
            ("b1",) if kernel == "d_hidden" else (),
            backend,
        )

    return prepare


def overhead(made: Callable[..., Any]) -> dict[str, Any]:
    """Return tiny problems beside PyTorch's functions, by name."""

    def problem(gated: bool = False, **options: float) -> Any:
        leaves = [
            torch.randn(2, 16),
            torch.randn(32, 16),
            torch.randn(32),
            torch.randn(16, 32),
            torch.randn(16),
        ]

        def theirs(
            x: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any, gate: Any = None
        ) -> torch.Tensor:
            hidden = F.linear(x, w1, b1)
            hidden = F.relu(hidden) if gate is None else F.silu(F.linear(x, gate)) * hidden
            return F.linear(F.dropout(hidden, options["dropout_p"]) if options else hidden, w2, b2)

        def ours(
            x: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any, gate: Any = None
        ) -> torch.Tensor:
            activation = "relu" if gate is None else "silu"
            return pt.feed_forward(
                x, w1, b1, w2, b2, activation=activation, gate_weight=gate, **options
            )

        return made([*leaves, *([torch.randn(32, 16)] if gated else [])], ours, theirs)

    return {
        "feed_forward": problem(),
        "feed_forward, gated": problem(gated=True),
        "feed_forward, dropout": problem(dropout_p=0.1),
    }
