# SPDX-License-Identifier: Apache-2.0
"""The last linear layer of a language model fused with cross entropy, in plain PyTorch.

::

    z_r    = x_r weight^T + bias - m_r                                      (classes)
    loss_r = log(sum_c exp(z_rc)) - (1 - s) z_r,target - s mean_c(z_rc)     s = label_smoothing

m_r is the row's largest logit. Subtracting it first is exact in theory and preserves the digits of
logits that share a large offset.

A row whose target is ``ignore_index`` has loss 0 and no gradient, even if it holds NaN. Arithmetic
and loss are float32 (float64 for float64), because bfloat16 keeps only two digits of a long sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def cross_entropy_forward(a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, split lse, x weight^T) for the arguments of the op linear_cross_entropy.

    loss has target's shape for "none" and is a scalar otherwise. The split lse, (2, *target.shape),
    holds each row's m_r and log(sum_c exp(z_rc)), which a fused backward needs besides the inputs.

    "mean" divides by the number of targets that are not ignored. If all are ignored it is NaN, as
    in PyTorch.
    """
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    valid = a.target != a.ignore_index
    # select, not multiply: an ignored row may hold NaN
    rows = torch.where(valid.unsqueeze(-1), a.x.to(work), 0.0)
    product = F.linear(rows, a.weight.to(work))
    logits = product if a.bias is None else product + a.bias.to(work)
    row_max = logits.detach().amax(-1)
    logits = logits - row_max.unsqueeze(-1)
    picked = logits.gather(-1, torch.where(valid, a.target, 0).unsqueeze(-1)).squeeze(-1)
    log_sum = torch.logsumexp(logits, -1)
    loss = log_sum - (1.0 - a.label_smoothing) * picked
    if a.label_smoothing > 0.0:
        loss = loss - a.label_smoothing * logits.mean(-1)
    loss = torch.where(valid, loss, 0.0)
    if a.reduction != "none":
        loss = loss.sum()
    return (
        loss / valid.sum() if a.reduction == "mean" else loss,
        torch.stack([row_max, log_sum.detach()]),
        product.detach(),
    )
