# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of feed_forward, on kernels/feed_forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import matrix
from ..gpu import feed_forward as gpu
from . import availability

LARGEST_SIDE = 1 << 30  # maximum side of a weight: column indices are 32-bit


def backend(op: Op) -> Backend:
    """Return the backend of feed_forward."""
    return gpu.backend("triton", op, _forward, _backward, why_not, availability.recorded)


def _forward(a: Any, out: torch.Tensor, pre: torch.Tensor, gate: torch.Tensor) -> None:
    from pytransformer.kernels.feed_forward.fwd import forward

    forward(_matrices(a), out, *_saved(a, pre, gate))


def _backward(
    a: Any, d_out: torch.Tensor, saved: Sequence[torch.Tensor], wanted: dict[str, torch.Tensor]
) -> None:
    from pytransformer.kernels.feed_forward.bwd import backward

    backward(_matrices(a), d_out, *_saved(a, *saved), wanted)


def why_not(a: Any) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    if (reason := availability.why_not(x=a.x)) is not None:
        return reason
    widest = max(*a.w1.shape, *a.w2.shape)
    if widest >= LARGEST_SIDE:
        return f"sides of a weight below {LARGEST_SIDE:,}, got {widest:,}"
    return gpu.why_not_columns(a)


def _matrices(a: Any) -> Any:
    """Return the arguments with x as a matrix and contiguous biases."""
    biases = {
        name: None if (b := getattr(a, name)) is None else b.contiguous()
        for name in ("b1", "b2", "gate_bias")
    }
    return a._replace(x=matrix(a.x), **biases)


def _saved(
    a: Any, pre: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return pre and gate as matrices, or None if not saved or without a gate."""
    if not a.save:
        return None, None
    return pre.view(-1, pre.shape[-1]), None if a.gate_weight is None else gate.view(
        -1, gate.shape[-1]
    )
