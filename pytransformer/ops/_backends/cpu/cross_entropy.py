# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of linear_cross_entropy.

It allocates tensors and calls csrc/cpu/cross_entropy/cross_entropy.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.registry import WRONG_DEVICE, Backend, Op


def backend(op: Op, check_values: Callable[[Any], None], keeps: Callable[[Any], bool]) -> Backend:
    """Return the backend; ``keeps(a)`` is true if forward saves x weightᵀ for backward."""

    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        return native.why_not("linear_cross_entropy_fwd")

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if a.x.numel() == 0:
            return op.backends["reference"].forward(a)
        check_values(a)
        loss, split_lse, product = op.empty_outputs(a)
        losses = loss if a.reduction == "none" else torch.empty_like(split_lse[0])
        torch.ops.pytransformer_C.linear_cross_entropy_fwd(
            *_operands(a),
            losses.view(-1),
            split_lse.view(-1),
            _kept(product),
            a.ignore_index,
            a.label_smoothing,
        )
        if a.reduction != "none":
            total = losses.double().sum()
            loss.copy_(total / _valid(a) if a.reduction == "mean" else total)
        return loss, split_lse, product

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> Sequence[Any]:
        if a.x.numel() == 0 or grads[0] is None:
            return op.backends["reference"].backward(a, grads, saved, wanted)
        check_values(a)
        split_lse = saved[0].contiguous()
        upstream = grads[0].double() / _valid(a) if a.reduction == "mean" else grads[0]
        upstream = upstream.to(split_lse.dtype).expand(a.target.shape).reshape(-1).contiguous()
        results = dict(zip(op.differentiable, op.empty_gradients(a, wanted)))
        targets: dict[str, torch.Tensor | None] = {}
        for name, t in results.items():
            if t is None:
                targets[name] = None
            elif name == "bias":
                targets[name] = torch.empty(t.shape, dtype=split_lse.dtype)
            else:
                targets[name] = (
                    t if t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype)
                ).view(-1, t.shape[-1])
        torch.ops.pytransformer_C.linear_cross_entropy_bwd(
            upstream,
            *_operands(a),
            split_lse.view(-1),
            _kept(saved[1]),
            *(targets[n] for n in ("x", "weight", "bias")),
            a.ignore_index,
            a.label_smoothing,
        )
        for name, t in results.items():
            target = targets[name]
            if t is not None and target is not None and target.data_ptr() != t.data_ptr():
                t.copy_(target.view(t.shape))
        return [results[n] for n in op.differentiable]

    def extra_bytes(a: Any) -> int:
        """Return the kernels' scratch bytes, plus the losses of all rows."""
        if a.x.numel() == 0:
            return 0
        rows, (classes, depth) = a.target.numel(), a.weight.shape
        held = torch.ops.pytransformer_C.linear_cross_entropy_scratch.default(
            a.x, rows, depth, classes, keeps(a)
        )
        return held + rows * (8 if a.x.dtype == torch.float64 else 4)

    return Backend("cpu", forward, backward, why_not, extra_bytes)


def _kept(product: torch.Tensor) -> torch.Tensor | None:
    return product.contiguous().view(-1) if product.numel() else None


def _operands(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Return x, weight, target and bias as the kernels expect them."""
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    bias = None if a.bias is None else a.bias.to(work).contiguous()
    return (
        a.x.reshape(-1, a.x.shape[-1]).contiguous(),
        a.weight.contiguous(),
        a.target.reshape(-1).contiguous(),
        bias,
    )


def _valid(a: Any) -> torch.Tensor:
    """Return the number of targets that are not ignored, in float64."""
    return (a.target != a.ignore_index).sum(dtype=torch.float64)
