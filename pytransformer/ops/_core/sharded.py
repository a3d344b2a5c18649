# SPDX-License-Identifier: Apache-2.0
"""Calls with DTensor arguments, which ``pytransformer.distributed``, a higher layer, computes.

The first such call imports it, because torch.distributed.tensor takes longer to import than this
package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .registry import Op

Run = Callable[["Op", Any, str | None, bool], tuple[torch.Tensor, ...]]
loaders: list[Callable[[], Run]] = []  # has one entry once the package is imported


def is_sharded(inputs: Sequence[Any]) -> bool:
    """Return true if an input is a DTensor; none exists before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in inputs)


def run(op: Op, a: Any, backend: str | None, strict: bool) -> tuple[torch.Tensor, ...]:
    """Return the op's differentiable outputs.

    They are DTensors, or plain tensors if the op's first argument is plain.
    """
    return loaders[0]()(op, a, backend, strict)


def whole(t: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a plain tensor with all its shards."""
    full: torch.Tensor = t.full_tensor() if is_sharded((t,)) else t  # type: ignore[attr-defined]
    return full
