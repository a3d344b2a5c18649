# SPDX-License-Identifier: Apache-2.0
"""Code of linear_cross_entropy that the backends ``triton`` and ``cuda`` share.

Forward saves the split lse, the same on every backend, so backward may run on another backend. It
recomputes the logits, which costs a fourth product, unless forward computes the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.op import Op
from ..._core.registry import Backend, Recorded
from ..._core.tensors import as_written, looks_at_values
from ..._problem.cross_entropy import reduced_z_loss, row_factors, upstream, weight_of_targets


class Kernels(NamedTuple):
    """The kernels of a backend, called with the op's arguments, x (rows, d) and target (rows,).

    - ``forward(a, losses, split_lse, correct)`` writes the loss (rows,) without z-loss, the split
      lse (2, rows), and correct (rows,) if not None, float32.
    - ``backward(a, g, p_factor, split_lse, dx, d_weight, d_bias)`` writes dx (rows, d), d_weight,
      both contiguous and of x's dtype, and d_bias (float32, initially zero) if not None.
      ``row_factors`` returns g and p_factor, float32. There is at least one row.
    - ``forward_with_gradients(a, losses, split_lse, dx, d_weight, d_bias)`` does both for a reduced
      loss with an upstream gradient of 1.
    """

    forward: Callable[..., None]
    backward: Callable[..., None]
    forward_with_gradients: Callable[..., None] | None = None


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
            loss, split_lse, product, *gradients, correct = op.empty_outputs(a)
            if product.numel():  # only for tensors on the CPU
                product.copy_(a.x.to(product.dtype) @ a.weight.to(product.dtype).T)
            losses = loss if a.reduction == "none" else torch.empty_like(split_lse[0])
            kernels, outputs = load(), (losses.view(-1), split_lse.view(2, -1))
            results = [t if t.numel() else None for t in gradients]
            if kernels.forward_with_gradients and any(t is not None for t in results):
                targets = _targets(results)
                kernels.forward_with_gradients(_flat(a), *outputs, *targets)
                _deliver(results, targets)
            else:
                kernels.forward(_flat(a), *outputs, correct.view(-1) if a.accuracy else None)
            if a.reduction != "none":
                torch.sum(losses.view(-1), 0, out=loss)
            if a.reduction == "mean":
                loss /= weight_of_targets(a)
            if a.z_loss_weight:
                loss += reduced_z_loss(a, split_lse)
        return loss, split_lse, product, *gradients, correct

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
            factors = row_factors(a, *upstream(a, grad, torch.float32), split_lse)
            targets = _targets(results)
            load().backward(_flat(a), *factors, split_lse.reshape(2, -1), *targets)
            _deliver(results, targets)
        return results

    return Backend(name, forward, backward, why_not, extra_bytes, recorded=recorded)


def _targets(results: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return the kernels' dx (rows, d), d_weight and float32 d_bias; the results if they fit."""
    matrices = [t if t is None or t.is_contiguous() else t.new_empty(t.shape) for t in results[:2]]
    d_bias = results[2]
    return [
        *(t if t is None else t.view(-1, t.shape[-1]) for t in matrices),
        None if d_bias is None else torch.zeros(d_bias.shape, device=d_bias.device),
    ]


def _deliver(
    results: Sequence[torch.Tensor | None], targets: Sequence[torch.Tensor | None]
) -> None:
    """Copy the kernels' gradients to the results that did not fit."""
    for result, found in zip(results, targets):
        if result is not None and found is not None and found.data_ptr() != result.data_ptr():
            result.copy_(found.view(result.shape))


def _flat(a: Any) -> Any:
    """Return the arguments with rows in one dimension."""
    return a._replace(
        x=a.x.reshape(-1, a.x.shape[-1]),
        target=a.target.reshape(-1).contiguous(),
        bias=None if a.bias is None else a.bias.contiguous(),
        class_weight=None if a.class_weight is None else a.class_weight.float().contiguous(),
    )
