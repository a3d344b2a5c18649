"""The backend ``triton`` of feed_forward: kernels/feed_forward called with tensors allocated here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import _triton
from ._registry import Backend, Op
from ._tensors import last_contiguous

LARGEST_SIDE = 1 << 30  # of a matrix other than its rows: columns are counted in 32 bits


def backend(op: Op) -> Backend:
    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.feed_forward.fwd import forward as run

        if _empty(a):
            return op.backends["reference"].forward(a)
        out, pre, gate = op.empty_outputs(a)
        with _as_written(a.x.device):
            matrix = _target(out)
            run(_matrices(a), matrix, *_saved(a, pre, gate))
            _deliver(matrix, out)
        return out, pre, gate

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        from pytransformer.kernels.feed_forward.bwd import backward as run

        if _empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        results = op.empty_gradients(a, wanted)
        by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
        with _as_written(a.x.device):
            targets = dict(by_name)
            if "x" in by_name:
                targets["x"] = _target(by_name["x"])
            run(_matrices(a), _matrix(grads[0].to(a.x.dtype)), *_saved(a, *saved), targets)
            if "x" in by_name:
                _deliver(targets["x"], by_name["x"])
        return results

    return Backend("triton", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := _triton.why_not(x=a.x)) is not None:
        return reason
    widest = max(*a.w1.shape, *a.w2.shape)
    if widest >= LARGEST_SIDE:
        return f"sides of a weight below {LARGEST_SIDE:,}, got {widest:,}"
    return None


@contextlib.contextmanager
def _as_written(device: torch.device) -> Iterator[None]:
    """Library products below take the dtypes they are given, and no graph of their own."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _empty(a: Any) -> bool:
    """A product over nothing: left to plain PyTorch, which does nothing either."""
    return a.x.numel() == 0 or a.w1.numel() == 0 or a.w2.numel() == 0


def _matrix(t: torch.Tensor) -> torch.Tensor:
    """(rows, columns), a view where strides allow one, the last dimension contiguous."""
    return last_contiguous(t).reshape(-1, t.shape[-1])


def _matrices(a: Any) -> Any:
    """The arguments with x as a matrix and biases contiguous."""
    biases = {name: None if (b := getattr(a, name)) is None else b.contiguous() for name in ("b1", "b2", "gate_bias")}
    return a._replace(x=_matrix(a.x), **biases)


def _saved(a: Any, pre: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """pre and gate as matrices, None where they are not kept or there is no gate."""
    if not a.save:
        return None, None
    return pre.view(-1, pre.shape[-1]), None if a.gate_weight is None else gate.view(-1, gate.shape[-1])


def _target(t: torch.Tensor) -> torch.Tensor:
    """t as a matrix if it is contiguous, else one of its own for _deliver to copy."""
    rows = math.prod(t.shape[:-1])
    return t.view(rows, -1) if t.is_contiguous() else t.new_empty(rows, t.shape[-1])


def _deliver(matrix: torch.Tensor, t: torch.Tensor) -> None:
    if matrix.data_ptr() != t.data_ptr():
        t.copy_(matrix.view(t.shape))


def _extra_bytes(a: Any) -> int:
    """Forward: hidden. (Backward: hidden, d_pre, d_gate, and with recompute pre and gate.)"""
    return math.prod(a.x.shape[:-1]) * a.w1.shape[0] * a.x.element_size()
