# SPDX-License-Identifier: Apache-2.0
"""The position-wise feed-forward network."""

from __future__ import annotations

import torch
from torch import nn

from ..ops.feed_forward import feed_forward
from ..ops.options import ActivationName


class FeedForward(nn.Module):
    """Feed-forward network, :func:`pytransformer.feed_forward`.

    ``w2(dropout(act(w1(x))))``, or gated ``w2(dropout(act(gate(x)) * w1(x)))``.

    Args:
        d_model, hidden: sizes; d_out defaults to d_model.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
        dropout: probability of dropping an element of the hidden layer in training.

    Source: Vaswani et al. (2017), section 3.3; gates: Shazeer, "GLU Variants Improve Transformer"
    (2020).
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        activation: ActivationName = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        d_out: int | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        self.w1 = nn.Linear(d_model, hidden, bias)
        self.gate = nn.Linear(d_model, hidden, bias) if gated else None
        self.w2 = nn.Linear(hidden, d_out or d_model, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate
        return feed_forward(
            x, self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias,
            activation=self.activation,
            gate_weight=None if gate is None else gate.weight,
            gate_bias=None if gate is None else gate.bias,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
