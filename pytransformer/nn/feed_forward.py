# SPDX-License-Identifier: Apache-2.0
"""The position-wise feed-forward network, and the mixture of experts that may stand in its place."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..ops._core.options import ActivationName
from ..ops.feed_forward import feed_forward


class FeedForward(nn.Module):
    """``w2(dropout(act(w1(x))))``, or gated ``w2(dropout(act(gate(x)) * w1(x)))``: :func:`pytransformer.feed_forward`.

    Args:
        d_model, hidden: sizes; d_out defaults to d_model.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
        dropout: probability of dropping an element of the hidden layer in training.

    Source: Vaswani et al. (2017), section 3.3; gates: Shazeer, "GLU Variants Improve Transformer" (2020).
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
            x, self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias, activation=self.activation,
            gate_weight=None if gate is None else gate.weight, gate_bias=None if gate is None else gate.bias,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip


class MixtureOfExperts(nn.Module):
    """The two best of several feed-forward networks for each token: ``sum_{e in top2} g_e / (g_1 + g_2) * expert_e(x)``.

    ``g = softmax(x W_g)``. An expert takes at most ``capacity = ceil(2 tokens / experts * capacity_factor)`` tokens, those with
    an earlier choice and position first; a token that finds no room there gets nothing from that expert. ``balance_loss`` is
    left by each forward: ``E * sum_e f_e * m_e``, with f_e the share of tokens whose first choice is e and m_e the mean gate;
    1 when balanced (the paper's loss times E²). Add a small multiple of :func:`balance_loss` to what is trained on.

    Args:
        capacity_factor: None: no token is dropped.
        dropout, activation: of the experts.

    Source: Lepikhin et al., "GShard" (2021), algorithm 1; without its random dispatch to the second expert.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        num_experts: int,
        *,
        capacity_factor: float | None = None,
        activation: ActivationName = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if num_experts < 2:
            raise ValueError(f"MixtureOfExperts: num_experts must be at least 2, got {num_experts}")
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(d_model, hidden, activation=activation, dropout=dropout) for _ in range(num_experts)
        )
        self.balance_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # The gates' softmax is float32 even in a bfloat16 model: a rounded tie would change which expert a token goes to.
        gates = torch.softmax(self.router(tokens).to(torch.promote_types(x.dtype, torch.float32)), -1)
        best, expert = gates.topk(2, -1)
        share = best / best.sum(-1, keepdim=True)
        self.balance_loss = self._balance(gates, expert[:, 0])
        # Slots (choice, token) sorted by expert: all first choices before all second ones, so that those find room first.
        slots = expert.t().flatten()
        order = slots.argsort(stable=True)
        counts = slots.bincount(minlength=len(self.experts)).tolist()
        outs = [self._expert(e, rows, tokens) for e, rows in enumerate((order % len(tokens)).split(counts))]
        # Each slot is read once here, so backward adds nothing in an order of its own.
        out = torch.cat(outs)[order.argsort()].unflatten(0, (2, -1))
        mixed = out[0] * share[:, :1].to(x.dtype) + out[1] * share[:, 1:].to(x.dtype)
        return mixed.view_as(x)

    def _expert(self, e: int, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kept = rows
        if self.capacity_factor is not None:
            kept = rows[: math.ceil(2 * len(tokens) / len(self.experts) * self.capacity_factor)]
        out = self.experts[e](tokens[kept])
        return out if len(kept) == len(rows) else torch.cat([out, out.new_zeros(len(rows) - len(kept), out.shape[1])])

    def _balance(self, gates: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        share = first.bincount(minlength=gates.shape[1]).to(gates.dtype) / max(1, len(first))
        return gates.shape[1] * (share * gates.mean(0)).sum()


def balance_loss(model: nn.Module) -> torch.Tensor | None:
    """The sum of ``balance_loss`` over a model's mixtures of experts in their last forward; None if it has none."""
    losses = [m.balance_loss for m in model.modules() if isinstance(m, MixtureOfExperts) and m.balance_loss is not None]
    return torch.stack(losses).sum() if losses else None
