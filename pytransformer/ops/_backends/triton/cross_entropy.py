# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of linear_cross_entropy, on kernels/cross_entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..gpu import cross_entropy as gpu
from . import availability


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """Return the backend of linear_cross_entropy."""
    return gpu.backend(
        "triton", op, _load, check_values, why_not, _extra_bytes, availability.recorded
    )


def _load() -> gpu.Kernels:
    from pytransformer.kernels.cross_entropy import bwd, fwd

    return gpu.Kernels(fwd.forward, bwd.backward)


def why_not(a: Any) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    return availability.why_not(x=a.x)


def _extra_bytes(a: Any) -> int:
    """Return the bytes of a chunk of float32 logits and of backward's buffers.

    Backward needs the chunk's gradient in x's dtype, the weight's gradient in float32, and a part
    of it if there are several chunks.
    """
    from pytransformer.kernels.cross_entropy.configs import chunk_rows, part_rows

    classes, d = a.weight.shape
    rows, step = a.target.numel(), chunk_rows(classes)
    part = min(classes, part_rows(d)) if rows > step else 0
    chunk = min(rows, step) * classes
    return (
        chunk * (4 if a.x.dtype == torch.float32 else 4 + a.x.element_size())
        + 4 * (classes + part) * d
    )
