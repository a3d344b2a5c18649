# SPDX-License-Identifier: Apache-2.0
"""Wrong cross entropies; see `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from pytransformer.ops._problem.cross_entropy import weight_of_targets
from pytransformer.reference import _cross_entropy as reference

from .faults import (
    FAITHFUL,
    Fault,
    Outputs,
    as_contiguous,
    different_every_time,
    outputs,
    patching,
    replacing,
    value_of,
)


def _mean_over_all_targets(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    loss, *rest = forward(a)
    return (
        loss
        if a.reduction != "mean"
        else loss * (a.target != a.ignore_index).sum() / a.target.numel()
    ), *rest


def _largest_logit_not_subtracted(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """Overflow float32's exp if a logit exceeds 88."""
    with mock.patch.object(
        torch, "logsumexp", lambda z, dim: z.float().exp().sum(dim).log().to(z.dtype)
    ):
        return forward(a)


def _last_class_dropped(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """Drop the last class from the normalizer, as a kernel without a vector tail does."""
    whole = torch.logsumexp
    with mock.patch.object(
        torch, "logsumexp", lambda z, dim: whole(z[..., :-1] if z.shape[-1] > 1 else z, dim)
    ):
        return forward(a)


def _ignored_rows_counted(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    fits = (a.target >= 0) & (a.target < a.weight.shape[0])
    return forward(a._replace(ignore_index=-12345, target=torch.where(fits, a.target, 0)))


class _UnitUpstream(torch.autograd.Function):
    """The identity, whose gradient ignores the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(grad)


def _target_weight_on_smoothing(
    original: Any, a: Any, logits: Any, picked: Any, log_sum: Any, target: Any
) -> torch.Tensor:
    """Scale the full smoothed loss with the target's weight."""
    if a.class_weight is None:
        return original(a, logits, picked, log_sum, target)
    plain = original(a._replace(class_weight=None), logits, picked, log_sum, target)
    return a.class_weight.to(plain.dtype)[target] * plain


def _ignored_targets_correct(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    *rest, correct = forward(a)
    if correct.numel():
        correct = torch.where(a.target == a.ignore_index, 1.0, correct)
    return *rest, correct


FAULTS: dict[str, Fault] = {
    "faithful": FAITHFUL,
    "loss_off_by_0.4_percent": outputs(lambda y: y * 1.004),
    "loss_rounded_to_bfloat16": outputs(lambda y: value_of(y.bfloat16().to(y.dtype), y)),
    "bias_ignored": replacing(bias=lambda a: value_of(torch.zeros_like(a.bias), a.bias)),
    "bias_gradient_dropped": replacing(bias=lambda a: a.bias.detach()),
    "weight_gradient_dropped": replacing(weight=lambda a: a.weight.detach()),
    "x_gradient_off_by_0.4_percent": replacing(x=lambda a: value_of(a.x, 1.004 * a.x)),
    "label_smoothing_ignored": replacing(label_smoothing=lambda a: 0.0),
    "label_smoothing_over_the_other_classes": replacing(
        label_smoothing=lambda a: min(
            1.0, a.label_smoothing * a.weight.shape[0] / max(1, a.weight.shape[0] - 1)
        )
    ),
    "softcap_ignored": replacing(softcap=lambda a: 0.0),
    "softcap_ignored_in_backward": patching(torch, tanh=lambda tanh, x: value_of(tanh(x), x)),
    "z_loss_ignored": replacing(z_loss_weight=lambda a: 0.0),
    "z_loss_without_gradient": patching(
        reference, reduced_z_loss=lambda f, a, split_lse: f(a, split_lse.detach())
    ),
    "z_loss_not_scaled_by_upstream": patching(
        reference, reduced_z_loss=lambda f, *given: _UnitUpstream.apply(f(*given))
    ),
    "z_loss_mean_by_class_weights": patching(
        reference,
        reduced_z_loss=lambda f, a, lse: (
            f(a._replace(reduction="sum"), lse) / weight_of_targets(a)
            if a.reduction == "mean"
            else f(a, lse)
        ),
    ),
    "class_weight_ignored": replacing(class_weight=lambda a: None),
    "class_weight_of_the_target_on_smoothing": patching(
        reference, _row_losses=_target_weight_on_smoothing
    ),
    "class_weight_mean_by_count": patching(
        reference, weight_of_targets=lambda f, a: f(a._replace(class_weight=None))
    ),
    "accuracy_of_the_next_class": patching(
        torch.Tensor, argmax=lambda argmax, z, dim: (argmax(z, dim) + 1) % z.shape[dim]
    ),
    "ignored_targets_correct": _ignored_targets_correct,
    "mean_over_all_targets": _mean_over_all_targets,
    "sum_for_mean": replacing(reduction=lambda a: "sum" if a.reduction == "mean" else a.reduction),
    "ignored_rows_counted": _ignored_rows_counted,
    "last_class_dropped": _last_class_dropped,
    "largest_logit_not_subtracted": _largest_logit_not_subtracted,
    "targets_shifted": replacing(
        target=lambda a: torch.where(
            a.target == a.ignore_index, a.target, (a.target + 1) % a.weight.shape[0]
        )
    ),
    "weight_rounded_to_bfloat16": replacing(
        weight=lambda a: value_of(a.weight.bfloat16().to(a.weight.dtype), a.weight)
    ),
    "x_read_as_contiguous": replacing(x=lambda a: value_of(as_contiguous(a.x), a.x)),
    "different_every_time": different_every_time,
}
