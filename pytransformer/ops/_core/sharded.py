# SPDX-License-Identifier: Apache-2.0
"""Calls with DTensors among their arguments: ``pytransformer.distributed``, a layer above, computes them.

It is loaded at the first such call: torch.distributed.tensor takes longer to import than all of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .registry import Op

Run = Callable[["Op", Any, str | None, bool], tuple[torch.Tensor, ...]]
loaders: list[Callable[[], Run]] = []  # one, once the package is imported


def is_sharded(inputs: Sequence[Any]) -> bool:
    """Whether one of them is a DTensor. Without the module that defines it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in inputs)


def run(op: Op, a: Any, backend: str | None, strict: bool) -> tuple[torch.Tensor, ...]:
    """The op's differentiable outputs: DTensors, or plain tensors if its first argument is one."""
    return loaders[0]()(op, a, backend, strict)


def whole(t: torch.Tensor) -> torch.Tensor:
    """A DTensor as the plain tensor that it stands for."""
    full: torch.Tensor = t.full_tensor() if is_sharded((t,)) else t  # type: ignore[attr-defined]
    return full
