# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the norms.

bench/conftest.py runs the cases, tune.py the tuning problems, overhead.py the tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.kernels.layer_norm import configs
from pytransformer.ops.layer_norm import add_norm_op


def test_speed(timed) -> None:
    timed()


def tune(tools: ModuleType) -> Iterator[Any]:
    """Yield the problem classes for bench/tools/tune.py."""
    for dtype in (torch.bfloat16, torch.float32):
        for kernel in ("forward", "backward"):
            for columns in (*configs.BACKWARD, 2 * max(configs.BACKWARD)):
                yield tools.Task(
                    "layer_norm",
                    configs.key_of(kernel, columns, dtype.itemsize),
                    f"layer_norm_{kernel}",
                    tools.nearest_first(configs.candidates(kernel, columns)),
                    _norm(tools, kernel, columns, dtype),
                )


def _norm(tools: ModuleType, kernel: str, columns: int, dtype: torch.dtype) -> Callable[..., Any]:
    def prepare(device: str, small: bool, backend: str) -> Any:
        make = tools.random_values(device, dtype)
        rows = 300 if small else (1 << 26) // columns
        a, _, _ = add_norm_op.prepare(
            make(rows, columns), make(rows, columns), make(columns), make(columns)
        )
        return tools.direction(
            add_norm_op,
            a,
            () if kernel == "forward" else ("x", "residual", "weight", "bias"),
            backend,
        )

    return prepare


def overhead(made: Callable[..., Any]) -> dict[str, Any]:
    """Return tiny problems beside PyTorch's functions, by name."""
    x, r, w, b = torch.randn(2, 64), torch.randn(2, 64), torch.randn(64), torch.randn(64)
    return {
        "layer_norm": made(
            [x, w, b],
            lambda x, w, b: pt.layer_norm(x, 64, w, b),
            lambda x, w, b: F.layer_norm(x, (64,), w, b),
        ),
        "rms_norm": made(
            [x, w], lambda x, w: pt.rms_norm(x, 64, w), lambda x, w: F.rms_norm(x, (64,), w)
        ),
        "add_norm": made(
            [x, r, w, b],
            lambda x, r, w, b: pt.add_norm(x, r, w, b)[0],
            lambda x, r, w, b: F.layer_norm(x + r, (64,), w, b),
        ),
        "add_norm, dropout": made(
            [x, r, w, b],
            lambda x, r, w, b: pt.add_norm(x, r, w, b, dropout_p=0.1)[0],
            lambda x, r, w, b: F.layer_norm(F.dropout(x, 0.1) + r, (64,), w, b),
        ),
        "add_norm, rms": made(
            [x, r, w],
            lambda x, r, w: pt.add_norm(x, r, w, kind="rms")[0],
            lambda x, r, w: F.rms_norm(x + r, (64,), w),
        ),
    }
