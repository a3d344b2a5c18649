# SPDX-License-Identifier: Apache-2.0
"""The last linear layer of a language model fused with cross entropy, in plain PyTorch.

::

    u_r    = x_r weight^T + bias                                            (classes)
    z_r    = cap tanh(u_r / cap), or u_r without a softcap
    lse_r  = log(sum_c exp(z_rc))
    q_rc   = (1 - s) [c = target_r] + s / classes                           s = label_smoothing
    loss_r = sum_c w_c q_rc (lse_r - z_rc) + lambda lse_r^2

w is class_weight (1 if absent) and lambda is z_loss_weight. The first term is PyTorch's: each
class's -log p_rc = lse_r - z_rc, weighted by its share q_rc of the target and by its class weight,
which thus scales the smoothed part of every class, not only of the target. With
A_r = sum_c w_c q_rc = (1 - s) w_target + s mean(w), the gradient is

::

    dloss_r/dz_rc = (A_r + 2 lambda lse_r) p_rc - w_c q_rc                  p_r = softmax(z_r)
    dloss_r/du_rc = dloss_r/dz_rc (1 - (z_rc / cap)^2)

because dlse_r/dz_rc = p_rc and tanh' = 1 - tanh^2. z_r - m_r replaces z_r in the code, where m_r is
the row's largest logit. This is exact in theory and preserves the digits of logits that share a
large offset.

"mean" divides the first term by the sum of the targets' class weights, as PyTorch does, and the
second by the number of targets, because the z-loss has no class weights.

A row whose target is ``ignore_index`` has loss 0 and no gradient, even if it holds NaN. Arithmetic
and loss are float32 (float64 for float64), because bfloat16 keeps only two digits of a long sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..ops._problem.cross_entropy import reduced_z_loss, weight_of_targets


def cross_entropy_forward(
    a: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, split lse, x weight^T, correct) for the arguments of linear_cross_entropy.

    loss has target's shape for "none" and is a scalar otherwise. The split lse, (2, *target.shape),
    holds each row's m_r and log(sum_c exp(z_rc - m_r)), which a fused backward needs besides the
    inputs. correct is 1 for each target that is the first largest logit of its row, and has no
    element if ``a.accuracy`` is false.

    "mean" divides by the number of targets that are not ignored. If all are ignored it is NaN, as
    in PyTorch.
    """
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    valid = a.target != a.ignore_index
    # select, not multiply: an ignored row may hold NaN
    rows = torch.where(valid.unsqueeze(-1), a.x.to(work), 0.0)
    product = F.linear(rows, a.weight.to(work))
    logits = product if a.bias is None else product + a.bias.to(work)
    if a.softcap:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    target = torch.where(valid, a.target, 0)
    row_max = logits.detach().amax(-1)
    if a.accuracy:
        correct = (valid & (logits.argmax(-1) == target)).to(work)
    else:
        correct = product.new_zeros(0)
    logits = logits - row_max.unsqueeze(-1)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    log_sum = torch.logsumexp(logits, -1)
    split_lse = torch.stack([row_max, log_sum])
    loss = _row_losses(a, logits, picked, log_sum, target)
    loss = torch.where(valid, loss, 0.0)
    if a.reduction != "none":
        loss = loss.sum()
    if a.reduction == "mean":
        loss = loss / weight_of_targets(a)
    if a.z_loss_weight:
        loss = loss + reduced_z_loss(a, split_lse)
    return loss, split_lse.detach(), product.detach(), correct.detach()


def _row_losses(
    a: Any, logits: torch.Tensor, picked: torch.Tensor, log_sum: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Return sum_c w_c q_rc (log_sum_r - z_rc) of each row, where z_r has a largest logit of 0."""
    s = a.label_smoothing
    if a.class_weight is None:
        loss = log_sum - (1.0 - s) * picked
        return loss - s * logits.mean(-1) if s > 0.0 else loss
    w = a.class_weight.to(logits.dtype)
    loss = (1.0 - s) * w[target] * (log_sum - picked)
    return loss + s * (w * (log_sum.unsqueeze(-1) - logits)).mean(-1) if s > 0.0 else loss
