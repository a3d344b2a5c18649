# SPDX-License-Identifier: Apache-2.0
"""Wrong cross entropies; see `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from .faults import (
    FAITHFUL,
    Fault,
    Outputs,
    as_contiguous,
    different_every_time,
    outputs,
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
