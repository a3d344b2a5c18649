# SPDX-License-Identifier: Apache-2.0
"""Liger-Kernel's fused linear cross entropy on :func:`pytransformer.linear_cross_entropy`."""

from __future__ import annotations

import torch

from ..ops._core.options import Reduction
from ..ops.cross_entropy import linear_cross_entropy
from ._refuse import refuse


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Cross entropy of ``input @ lin_weightᵀ + bias`` without stored logits.

    ``accum_dtype`` may be None or torch.float32: sums are in float32 (float64 for float64 inputs).

    Raises:
        ValueError: an option that :func:`pytransformer.linear_cross_entropy` does not have.
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
            ce_weight=(ce_weight, None), lse_square_scale=(lse_square_scale, 0.0),
            softcap=(softcap, None),
            return_z_loss=(return_z_loss, False), use_token_scaling=(use_token_scaling, False),
            return_token_accuracy=(return_token_accuracy, False),
            return_predicted_tokens=(return_predicted_tokens, False),
        )  # fmt: skip
        if accum_dtype not in (None, torch.float32):
            raise ValueError(
                f"{name}: accum_dtype must be None or torch.float32, got {accum_dtype}; leave"
                " it out"
            )
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return linear_cross_entropy(
            _input, lin_weight, target, bias=bias, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, reduction=self.reduction,
        )  # fmt: skip
