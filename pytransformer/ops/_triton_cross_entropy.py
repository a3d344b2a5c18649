"""The backend ``triton`` of linear_cross_entropy: kernels/cross_entropy called with tensors allocated here.

The gradients are computed in backward, from logits computed again, for every reduction: what forward leaves is lse alone, on every
backend the same, so that backward may run on another one. It costs a fourth product where three would do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _triton
from ._registry import Backend, Op


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """The backend of linear_cross_entropy."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.cross_entropy.fwd import forward as run

        if a.x.device.type == "cpu":
            check_values(a)
        loss, lse, product = op.empty_outputs(a)
        if product.numel():  # promised for tensors on the CPU, where these kernels are only interpreted
            product.copy_(a.x.to(product.dtype) @ a.weight.to(product.dtype).T)
        losses = loss if a.reduction == "none" else torch.empty_like(lse)
        run(_flat(a), losses.view(-1), lse.view(-1))
        if a.reduction != "none":
            torch.sum(losses.view(-1), 0, out=loss)
        if a.reduction == "mean":
            loss /= _count(a)
        return loss, lse, product

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        from pytransformer.kernels.cross_entropy.bwd import backward as run

        results = op.empty_gradients(a, wanted)
        (grad,), (lse, _) = grads, saved
        if grad is None or a.target.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        grad = grad.float() / _count(a) if a.reduction == "mean" else grad.float()
        g = torch.where(a.target != a.ignore_index, grad, 0.0).reshape(-1)
        dx, d_weight, d_bias = results
        rows = None if dx is None else a.x.new_empty(g.numel(), a.x.shape[-1])
        sums = [None if r is None else torch.zeros(r.shape, device=r.device) for r in (d_weight, d_bias)]
        run(_flat(a), g, lse.reshape(-1), rows, *sums)
        for result, found in zip(results, (rows, *sums)):
            if result is not None:
                result.copy_(found.view(result.shape))
        return results

    return Backend("triton", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    return _triton.why_not(x=a.x)


def _flat(a: Any) -> Any:
    """The arguments with rows in one dimension."""
    return a._replace(
        x=a.x.reshape(-1, a.x.shape[-1]),
        target=a.target.reshape(-1).contiguous(),
        bias=None if a.bias is None else a.bias.contiguous(),
    )


def _count(a: Any) -> torch.Tensor:
    """How many targets are not ignored: a tensor, so that nothing waits for the device."""
    return (a.target != a.ignore_index).sum()


def _extra_bytes(a: Any) -> int:
    """A chunk of float32 logits, and in backward its gradient in x's dtype and the weight's gradient in float32, twice."""
    from pytransformer.kernels.cross_entropy.configs import chunk_rows

    classes, d = a.weight.shape
    chunk = min(a.target.numel(), chunk_rows(classes)) * classes
    return chunk * (4 if a.x.dtype == torch.float32 else 4 + a.x.element_size()) + 8 * classes * d
