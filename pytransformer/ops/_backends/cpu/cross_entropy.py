# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of linear_cross_entropy.

It allocates tensors and calls csrc/cpu/cross_entropy/cross_entropy.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend
from ..._problem.cross_entropy import reduced_z_loss, row_factors, upstream, weight_of_targets


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
        loss, split_lse, product, *gradients, correct = op.empty_outputs(a)
        losses = loss if a.reduction == "none" else torch.empty_like(split_lse[0])
        torch.ops.pytransformer_C.linear_cross_entropy_fwd(
            *_operands(a), losses.view(-1), split_lse.view(-1), _or_none(product),
            _or_none(correct), a.ignore_index, a.label_smoothing, a.softcap,
        )  # fmt: skip
        if a.reduction != "none":
            total = losses.double().sum()
            loss.copy_(total / weight_of_targets(a) if a.reduction == "mean" else total)
        if a.z_loss_weight:
            loss += reduced_z_loss(a, split_lse)
        return loss, split_lse, product, *gradients, correct

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
        factors = row_factors(a, *upstream(a, grads[0], torch.float64), split_lse)
        g, p_factor = (None if f is None else f.to(split_lse.dtype) for f in factors)
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
            g,
            p_factor,
            *_operands(a),
            split_lse.view(-1),
            _or_none(saved[1]),
            *(targets[n] for n in ("x", "weight", "bias")),
            a.ignore_index,
            a.label_smoothing,
            a.softcap,
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
            a.x, rows, depth, classes, keeps(a), a.accuracy
        )
        return held + rows * (8 if a.x.dtype == torch.float64 else 4)

    return Backend("cpu", forward, backward, why_not, extra_bytes)


def _or_none(output: torch.Tensor) -> torch.Tensor | None:
    return output.contiguous().view(-1) if output.numel() else None


def _operands(a: Any) -> tuple[torch.Tensor | None, ...]:
    """Return x, weight, target, bias and class_weight as the kernels expect them."""
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    vectors = (None if t is None else t.to(work).contiguous() for t in (a.bias, a.class_weight))
    return (
        a.x.reshape(-1, a.x.shape[-1]).contiguous(),
        a.weight.contiguous(),
        a.target.reshape(-1).contiguous(),
        *vectors,
    )
