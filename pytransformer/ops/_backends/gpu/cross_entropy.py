# SPDX-License-Identifier: Apache-2.0
"""Code of linear_cross_entropy that the backends ``triton`` and ``cuda`` share.

Backward recomputes the logits for every reduction. Forward saves only the split lse, the same on
every backend, so backward may run on another backend. This costs a fourth product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..._core.op import Op
from ..._core.registry import Backend, Recorded
from ..._core.tensors import as_written, looks_at_values
from ..._problem.cross_entropy import reduced_z_loss, row_factors, weight_of_targets


class Kernels(NamedTuple):
    """The kernels of a backend, called with the op's arguments, x (rows, d) and target (rows,).

    - ``forward(a, losses, split_lse, correct)`` writes the loss (rows,) without z-loss, the split
      lse (2, rows), and correct (rows,) if not None, float32.
    - ``backward(a, g, p_factor, split_lse, dx, d_weight, d_bias)`` writes dx (rows, d), d_weight
      (float32) and d_bias (float32, initially zero) if not None. ``row_factors`` returns g and
      p_factor, float32. There is at least one row.
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
            loss, split_lse, product, correct = op.empty_outputs(a)
            if product.numel():  # only for tensors on the CPU
                product.copy_(a.x.to(product.dtype) @ a.weight.to(product.dtype).T)
            losses = loss if a.reduction == "none" else torch.empty_like(split_lse[0])
            load().forward(
                _flat(a), losses.view(-1), split_lse.view(2, -1),
                correct.view(-1) if a.accuracy else None,
            )  # fmt: skip
            if a.reduction != "none":
                torch.sum(losses.view(-1), 0, out=loss)
            if a.reduction == "mean":
                loss /= weight_of_targets(a)
            if a.z_loss_weight:
                loss += reduced_z_loss(a, split_lse)
        return loss, split_lse, product, correct

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
            g, p_factor = row_factors(a, grad, split_lse, torch.float32)
            dx, d_weight, d_bias = results
            rows = None if dx is None else a.x.new_empty(g.numel(), a.x.shape[-1])
            sums = (
                None if d_weight is None else torch.empty(d_weight.shape, device=d_weight.device),
                None if d_bias is None else torch.zeros(d_bias.shape, device=d_bias.device),
            )
            load().backward(_flat(a), g, p_factor, split_lse.reshape(2, -1), rows, *sums)
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
        class_weight=None if a.class_weight is None else a.class_weight.float().contiguous(),
    )
