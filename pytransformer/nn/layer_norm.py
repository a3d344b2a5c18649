# SPDX-License-Identifier: Apache-2.0
"""Layer norm and RMS norm modules that fuse the preceding residual connection."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.layer_norm import add_norm, layer_norm, rms_norm
from ..ops.options import NormKind


class Norm(nn.Module):
    """Base of :class:`LayerNorm` and :class:`RMSNorm`: weight, optional bias and :meth:`add`."""

    kind: NormKind = "layer"

    def __init__(self, d_model: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, dropout_p: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(norm(stream), stream)`` with ``stream = residual + dropout(x)``, in one pass.

        It calls :func:`pytransformer.add_norm`.
        """
        return add_norm(
            x, residual, self.weight, self.bias, eps=self.eps, dropout_p=dropout_p, kind=self.kind
        )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(Norm):
    """Layer norm over the last dimension, :func:`pytransformer.layer_norm`.

    ``(x - mean) / sqrt(var + eps) * weight + bias``.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(d_model, eps, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, x.shape[-1], self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    """RMS norm over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    It calls :func:`pytransformer.rms_norm`.
    """

    kind = "rms"

    def __init__(self, d_model: int, eps: float = 1e-6) -> None:
        super().__init__(d_model, eps, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1], self.weight, self.eps)
