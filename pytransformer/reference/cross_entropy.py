# SPDX-License-Identifier: Apache-2.0
"""The last linear map of a language model and its cross entropy in one, in plain PyTorch.

::

    z_r    = x_r weight^T + bias                                            (classes)
    loss_r = log(sum_c exp(z_rc)) - (1 - s) z_r,target - s mean_c(z_rc)     s = label_smoothing

A row whose target is ``ignore_index`` has loss 0 and no gradient, whatever it holds. All arithmetic is float32 (float64 for
float64), and so is the loss: a sum over many numbers, of which bfloat16 would keep two digits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def cross_entropy_forward(a: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, lse, x weight^T) of the arguments of the op linear_cross_entropy: loss in target's shape for "none", else a number; lse, the
    logarithm of each row's sum of exponentials, is what a fused backward needs besides the inputs.

    "mean" divides by the number of targets that are not ignored: NaN if there is none, as in PyTorch.
    """
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    valid = a.target != a.ignore_index
    rows = torch.where(valid.unsqueeze(-1), a.x.to(work), 0.0)  # select, not multiply: an ignored row may hold NaN
    product = F.linear(rows, a.weight.to(work))
    logits = product if a.bias is None else product + a.bias.to(work)
    picked = logits.gather(-1, torch.where(valid, a.target, 0).unsqueeze(-1)).squeeze(-1)
    lse = torch.logsumexp(logits, -1)
    loss = lse - (1.0 - a.label_smoothing) * picked
    if a.label_smoothing > 0.0:
        loss = loss - a.label_smoothing * logits.mean(-1)
    loss = torch.where(valid, loss, 0.0)
    if a.reduction != "none":
        loss = loss.sum()
    return loss / valid.sum() if a.reduction == "mean" else loss, lse.detach(), product.detach()
