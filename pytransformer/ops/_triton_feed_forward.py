"""The backend ``triton`` of feed_forward: kernels/feed_forward called with tensors allocated here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _triton
from ._gpu_feed_forward import deliver, empty, hidden_bytes, target
from ._registry import Backend, Op
from ._tensors import as_written, matrix

LARGEST_SIDE = 1 << 30  # of a matrix other than its rows: columns are counted in 32 bits


def backend(op: Op) -> Backend:
    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.feed_forward.fwd import forward as run

        if empty(a):
            return op.backends["reference"].forward(a)
        out, pre, gate = op.empty_outputs(a)
        with as_written(a.x.device):
            to = target(out)
            run(_matrices(a), to, *_saved(a, pre, gate))
            deliver(to, out)
        return out, pre, gate

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        from pytransformer.kernels.feed_forward.bwd import backward as run

        if empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        results = op.empty_gradients(a, wanted)
        by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
        with as_written(a.x.device):
            targets = dict(by_name)
            if "x" in by_name:
                targets["x"] = target(by_name["x"])
            run(_matrices(a), matrix(grads[0].to(a.x.dtype)), *_saved(a, *saved), targets)
            if "x" in by_name:
                deliver(targets["x"], by_name["x"])
        return results

    return Backend("triton", forward, backward, why_not, hidden_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := _triton.why_not(x=a.x)) is not None:
        return reason
    widest = max(*a.w1.shape, *a.w2.shape)
    if widest >= LARGEST_SIDE:
        return f"sides of a weight below {LARGEST_SIDE:,}, got {widest:,}"
    return None


def _matrices(a: Any) -> Any:
    """The arguments with x as a matrix and biases contiguous."""
    biases = {name: None if (b := getattr(a, name)) is None else b.contiguous() for name in ("b1", "b2", "gate_bias")}
    return a._replace(x=matrix(a.x), **biases)


def _saved(a: Any, pre: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """pre and gate as matrices, None where they are not kept or there is no gate."""
    if not a.save:
        return None, None
    return pre.view(-1, pre.shape[-1]), None if a.gate_weight is None else gate.view(-1, gate.shape[-1])
