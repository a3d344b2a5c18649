# SPDX-License-Identifier: Apache-2.0
"""Liger-Kernel's fused linear cross entropy on :func:`pytransformer.linear_cross_entropy`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops.cross_entropy import linear_cross_entropy
from ..ops.options import Reduction
from ._refuse import refuse


class CrossEntropyOutput(NamedTuple):
    """The loss, and what was requested besides; the z-loss and the accuracy have no gradient."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Cross entropy of ``input @ lin_weightᵀ + bias`` without stored logits.

    ``accum_dtype`` may be None or torch.float32: sums are in float32 (float64 for float64 inputs).

    Raises:
        ValueError: an option that :func:`pytransformer.linear_cross_entropy` does not have.

    Returns:
        The loss, or with ``return_z_loss`` or ``return_token_accuracy`` a `CrossEntropyOutput`.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        refuse(
            name, "linear_cross_entropy has no such option",
            use_token_scaling=(use_token_scaling, False),
            return_predicted_tokens=(return_predicted_tokens, False),
        )  # fmt: skip
        if accum_dtype not in (None, torch.float32):
            raise ValueError(
                f"{name}: accum_dtype must be None or torch.float32, got {accum_dtype}; leave"
                " it out"
            )
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        weight = self.ce_weight
        out = linear_cross_entropy(
            _input, lin_weight, target, bias=bias,
            class_weight=None if weight is None else weight.detach(),
            ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            softcap=self.softcap, z_loss_weight=self.lse_square_scale, reduction=self.reduction,
            return_z_loss=self.return_z_loss, return_accuracy=self.return_token_accuracy,
        )  # fmt: skip
        if isinstance(out, torch.Tensor):
            return out
        loss, *more = out
        return CrossEntropyOutput(
            loss,
            more.pop(0) if self.return_z_loss else None,
            more.pop(0) if self.return_token_accuracy else None,
        )
