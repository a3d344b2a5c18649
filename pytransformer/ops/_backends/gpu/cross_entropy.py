# SPDX-License-Identifier: Apache-2.0
"""Code of linear_cross_entropy that the backends ``triton`` and ``cuda`` share.

Backward recomputes the logits for every reduction. Forward saves only the split lse, the same on
every backend, so backward may run on another backend. This costs a fourth product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.backend import Recorded
from ..._core.registry import Backend, Op
from ..._core.tensors import as_written, looks_at_values


class Kernels(NamedTuple):
    """The kernels of a backend, called with the op's arguments, x (rows, d) and target (rows,).

    - ``forward(a, losses, split_lse)`` writes the loss (rows,) and the split lse (2, rows),
      float32.
    - ``backward(a, g, split_lse, dx, d_weight, d_bias)`` writes dx (rows, d), d_weight (float32)
      and d_bias (float32, initially zero) if not None. g is the upstream gradient of each row's
      loss, float32, 0 if the target is ignored. There is at least one row.
    """

    forward: Callable[..., None]
    backward: Callable[..., None]


def backend(
    name: str,
    op: Op,
    load: Callable[[], Kernels],
    check_values: Callable[[Any], None],
    why_not: Callable[[Any], str | None],
    extra_bytes: Callable[[Any], int],
    recorded: Recorded,
) -> Backend:
    """Return the backend of linear_cross_entropy; ``load`` imports its kernels on first use."""

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if looks_at_values(a.x.device):
            check_values(a)
        with as_written(a.x.device):  # covers the full call: a recording has one precision setting
            loss, split_lse, product = op.empty_outputs(a)
            if product.numel():  # only for tensors on the CPU
                product.copy_(a.x.to(product.dtype) @ a.weight.to(product.dtype).T)
            losses = loss if a.reduction == "none" else torch.empty_like(split_lse[0])
            load().forward(_flat(a), losses.view(-1), split_lse.view(2, -1))
            if a.reduction != "none":
                torch.sum(losses.view(-1), 0, out=loss)
            if a.reduction == "mean":
                loss /= _count(a)
        return loss, split_lse, product

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        with as_written(a.x.device):
            results = op.empty_gradients(a, wanted)
            (grad,), (split_lse, _) = grads, saved
            if grad is None or a.target.numel() == 0:
                return [None if r is None else r.zero_() for r in results]
            grad = grad.float() / _count(a) if a.reduction == "mean" else grad.float()
            g = torch.where(a.target != a.ignore_index, grad, 0.0).reshape(-1)
            dx, d_weight, d_bias = results
            rows = None if dx is None else a.x.new_empty(g.numel(), a.x.shape[-1])
            sums = (
                None if d_weight is None else torch.empty(d_weight.shape, device=d_weight.device),
                None if d_bias is None else torch.zeros(d_bias.shape, device=d_bias.device),
            )
            load().backward(_flat(a), g, split_lse.reshape(2, -1), rows, *sums)
            for result, found in zip(results, (rows, *sums)):
                if result is not None and found is not None:
                    result.copy_(found.view(result.shape))
        return results

    return Backend(name, forward, backward, why_not, extra_bytes, recorded=recorded)


def _flat(a: Any) -> Any:
    """Return the arguments with rows in one dimension."""
    return a._replace(
        x=a.x.reshape(-1, a.x.shape[-1]),
        target=a.target.reshape(-1).contiguous(),
        bias=None if a.bias is None else a.bias.contiguous(),
    )


def _count(a: Any) -> torch.Tensor:
    """Return the number of targets that are not ignored, as a tensor to avoid a synchronization."""
    return (a.target != a.ignore_index).sum()
