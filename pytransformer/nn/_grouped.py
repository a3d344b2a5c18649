# SPDX-License-Identifier: Apache-2.0
"""PyTorch's grouped gemm as a custom op; torch 2.13 traces ``grouped_mm`` in bfloat16 only."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


@torch.library.custom_op("pytransformer_nn::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return ``x[n] @ weight[e].T``, (N, d_out), for the rows ends[e - 1] <= n < ends[e].

    Args:
        weight: (groups, d_out, d_in), of x's dtype.
        ends: (groups,) int32, on x's device, ascending. Rows after the last end are undefined.
    """
    return F.grouped_mm(x, weight.mT, offs=ends)


@grouped_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    return grouped_linear(grad, weight.mT, ends), grouped_outer(grad, x, ends), None


@torch.library.custom_op("pytransformer_nn::grouped_outer", mutates_args=())
def grouped_outer(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return each group's weight gradient ``grad[rows].T @ x[rows]``, (groups, d_out, d_in)."""
    return F.grouped_mm(grad.contiguous().mT, x.contiguous(), offs=ends)


@grouped_outer.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


grouped_linear.register_autograd(_backward, setup_context=_keep)
