# SPDX-License-Identifier: Apache-2.0
"""Code that backends of linear_cross_entropy share: chunks, gemm, reductions, row factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def chunks(rows: int, step: int) -> Iterator[slice]:
    """Return slices of ``step`` rows that cover all rows."""
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def float_gemm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute out = a @ b in float32 with the library, for any dtype of a and b.

    16-bit logits would lose every digit of a small probability beside a large logit.
    """
    if a.dtype == torch.float32 or a.device.type == "cpu":
        return torch.mm(a.float(), b.float(), out=out)
    return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)


def weight_of_targets(a: Any) -> torch.Tensor:
    """Return the divisor of "mean": the sum of the class weights of targets that are not ignored.

    Without class weights it is their number. It stays a tensor to avoid a synchronization.
    """
    valid = a.target != a.ignore_index
    if a.class_weight is None:
        return valid.sum()
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    return target_weights(a, work).sum()


def target_weights(a: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the class weight of each target, 0 if it is ignored."""
    valid = a.target != a.ignore_index
    # Clamp: a GPU does not check values, and no address may leave class_weight.
    place = torch.where(valid, a.target, 0).clamp(0, a.weight.shape[0] - 1)
    return torch.where(valid, a.class_weight.to(dtype)[place], 0.0)


def reduced_z_loss(a: Any, split_lse: torch.Tensor) -> torch.Tensor:
    """Return z_loss_weight lse^2 of each row, 0 if ignored, reduced by ``a.reduction``."""
    valid = a.target != a.ignore_index
    z_loss = torch.where(valid, a.z_loss_weight * (split_lse[0] + split_lse[1]) ** 2, 0.0)
    if a.reduction == "none":
        return z_loss
    return z_loss.sum() / valid.sum() if a.reduction == "mean" else z_loss.sum()


def upstream(a: Any, grad: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upstream gradients of a row's loss and of its z-loss."""
    grad = grad.to(dtype)
    if a.reduction != "mean":
        return grad, grad
    of_loss = grad / weight_of_targets(a)
    return of_loss, grad / (a.target != a.ignore_index).sum() if a.z_loss_weight else of_loss


def row_factors(
    a: Any, of_loss: torch.Tensor, of_z_loss: torch.Tensor, split_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (g, p_factor), each (rows,), from ``upstream``; 0 where the target is ignored.

    The gradient of the logits is dz_rc = p_factor_r p_rc - g_r w_c q_rc (see the reference). g_r is
    the upstream gradient of row r's loss, and p_factor_r = g_r A_r + 2 lambda lse_r g'_r, where
    g'_r is the upstream gradient of its z-loss. p_factor is None if it equals g: without class
    weights and z-loss.
    """
    valid, dtype = a.target != a.ignore_index, of_loss.dtype
    g = torch.where(valid, of_loss, 0.0)
    if a.class_weight is None and not a.z_loss_weight:
        return g.reshape(-1), None
    p_factor = g
    if a.class_weight is not None:
        s = a.label_smoothing
        share = (1.0 - s) * target_weights(a, dtype) + s * a.class_weight.to(dtype).mean()
        p_factor = g * share
    if a.z_loss_weight:
        lse = split_lse[0].to(dtype) + split_lse[1]
        more = of_z_loss * (2.0 * a.z_loss_weight) * lse
        p_factor = p_factor + torch.where(valid, more, 0.0)
    return g.reshape(-1), p_factor.reshape(-1)
