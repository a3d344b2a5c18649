# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of linear_cross_entropy.

bench/conftest.py runs the cases, tune.py the tuning problems, overhead.py the tiny calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.kernels.cross_entropy import configs
from pytransformer.ops.cross_entropy import linear_cross_entropy_op


def test_speed(timed) -> None:
    timed()


def tune(tools: ModuleType) -> Iterator[Any]:
    """Yield the problem classes for bench/tools/tune.py."""
    for kernel, table in configs.HEURISTIC.items():
        for classes in table if len(table) > 1 else (32768,):
            yield tools.Task(
                "cross_entropy",
                configs.key_of(kernel, classes),
                "cross_entropy_" + {"bias": "backward_bias"}.get(kernel, kernel),
                tools.nearest_first(configs.candidates(kernel, classes)),
                _cross_entropy(tools, kernel, 32768 if classes == max(table) else classes),
            )


def _cross_entropy(tools: ModuleType, kernel: str, classes: int) -> Callable[..., Any]:
    """Return a call with few features, so that the library's matmuls do not hide the kernel."""

    def prepare(device: str, small: bool, backend: str) -> Any:
        make = tools.random_values(device, torch.bfloat16)
        rows = 40 if small else (1 << 27) // classes
        target = torch.arange(rows, device=device) % classes
        a, _, _ = linear_cross_entropy_op.prepare(
            make(rows, 16), make(classes, 16), target, bias=make(classes)
        )
        return tools.direction(
            linear_cross_entropy_op,
            a,
            {"backward": ("x",), "bias": ("bias",)}.get(kernel, ()),
            backend,
        )

    return prepare


def overhead(made: Callable[..., Any]) -> dict[str, Any]:
    """Return a tiny problem beside PyTorch's functions."""
    target = torch.tensor([3, 7])
    return {
        "linear_cross_entropy": made(
            [torch.randn(2, 16), torch.randn(32, 16), torch.randn(32)],
            lambda x, w, b: pt.linear_cross_entropy(x, w, target, bias=b),
            lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target),
        )
    }
