# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of feed_forward.

It allocates tensors and calls csrc/cpu/feed_forward/feed_forward.cpp.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend

# backward reuses scratch up to this size in the next call: fresh pages took 6 to 20 % of the time
HELD_BYTES = 64 << 20

_held = threading.local()


def backend(op: Op) -> Backend:
    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        return native.why_not("feed_forward_fwd")

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if _empty(a):
            return op.backends["reference"].forward(a)
        out, pre, gate = op.empty_outputs(a)
        rows = math.prod(a.x.shape[:-1])
        result = _as_matrix(out)
        kept: tuple[torch.Tensor | None, torch.Tensor | None] = (
            _matrices(a, pre, gate) if a.save else (None, None)
        )
        _run_forward(a, *kept, result.view(rows, -1))
        return (out if result.data_ptr() == out.data_ptr() else out.copy_(result)), pre, gate

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> Sequence[Any]:
        if _empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        (grad,) = grads
        assert grad is not None  # the gradient of the only output, always present
        rows, hidden = math.prod(a.x.shape[:-1]), a.w1.shape[0]
        results = dict(zip(op.differentiable, op.empty_gradients(a, wanted)))
        h, d_pre, *more = _scratch(2 if a.gate_weight is None else 3, rows, hidden, a.x.dtype)
        d_gate = more[0] if more else None
        if a.save:
            pre, gate = _matrices(a, *saved)
        else:
            pre, gate = d_pre, d_gate
            _run_forward(a, pre, gate, None)
        work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
        targets: dict[str, torch.Tensor | None] = {}
        for name, t in results.items():
            if t is None:
                targets[name] = None
            elif name in ("b1", "b2", "gate_bias"):
                targets[name] = torch.empty(t.shape, dtype=work)
            else:
                targets[name] = _as_matrix(t).view(-1, t.shape[-1])
        torch.ops.pytransformer_C.feed_forward_bwd(
            matrix(grad.to(a.x.dtype)), matrix(a.x), a.w1.contiguous(),
            _contiguous(a.gate_weight), a.w2.contiguous(), pre, gate,
            a.dropout_seed, h, d_pre, d_gate,
            *(targets[n] for n in ("x", "w1", "b1", "gate_weight", "gate_bias", "w2", "b2")),
            _activation(a.activation),
            a.row_start, a.column_start, a.dropout_p,
        )  # fmt: skip
        for name, t in results.items():
            target = targets[name]
            if t is not None and target is not None and target.data_ptr() != t.data_ptr():
                t.copy_(target.view(t.shape))
        return [results[n] for n in op.differentiable]

    return Backend("cpu", forward, backward, why_not, _extra_bytes)


@functools.cache
def _activation(name: str) -> int:
    """Return the activation's index in the library."""
    return torch.ops.pytransformer_C.feed_forward_activations().index(name)


def _run_forward(a: Any, pre: Any, gate: Any, out: Any) -> None:
    torch.ops.pytransformer_C.feed_forward_fwd(
        matrix(a.x), a.w1.contiguous(), vector(a.b1, a.x), _contiguous(a.gate_weight),
        vector(a.gate_bias, a.x), a.w2.contiguous(),
        vector(a.b2, a.x), a.dropout_seed, pre, gate, out, _activation(a.activation), a.row_start,
        a.column_start, a.dropout_p,
    )  # fmt: skip


def _scratch(count: int, rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return uninitialized matrices that live until the thread's next call."""
    size = -(-rows * columns * dtype.itemsize // 64) * 64  # full cache lines
    if count * size > HELD_BYTES:
        return [torch.empty(rows, columns, dtype=dtype) for _ in range(count)]
    held = getattr(_held, "bytes", None)
    if held is None or held.numel() < count * size:
        held = _held.bytes = torch.empty(count * size, dtype=torch.uint8)
    return [
        held[i * size :][: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
        for i in range(count)
    ]


def _empty(a: Any) -> bool:
    """Return true if a product has no elements; plain PyTorch computes such a call."""
    return a.x.numel() == 0 or a.w1.numel() == 0 or a.w2.numel() == 0


def _matrices(
    a: Any, pre: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    pre = pre.view(-1, pre.shape[-1])
    return pre, None if a.gate_weight is None else gate.view(pre.shape)


def _as_matrix(t: torch.Tensor) -> torch.Tensor:
    """Return t if it is contiguous, else a contiguous tensor of its shape that is copied back."""
    return t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype)


def matrix(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1, t.shape[-1]).contiguous()


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def vector(t: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return (
        None
        if t is None
        else t.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()
    )


def _extra_bytes(a: Any) -> int:
    """Return the kernels' scratch bytes, plus backward's hidden, d_pre and d_gate."""
    if _empty(a):
        return 0
    rows, columns = math.prod(a.x.shape[:-1]), a.x.shape[-1]
    hidden, out, gated = a.w1.shape[0], a.w2.shape[0], a.gate_weight is not None
    held = torch.ops.pytransformer_C.feed_forward_scratch.default(
        a.x, rows, columns, hidden, out, gated
    )
    return held + (3 if gated else 2) * rows * hidden * a.x.element_size()
