# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts that may stand in place of a feed-forward network: a router, and experts that compute their tokens together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from ..ops._core.options import ActivationName
from ..ops.feed_forward import feed_forward
from ..reference.feed_forward import ACTIVATIONS
from ._grouped import grouped_linear
from .feed_forward import FeedForward

Second = Literal["all", "random"]


@dataclass(frozen=True)
class MixtureOptions:
    """What a model's config says of its experts.

    Args:
        num_experts: of a mixture.
        every: the last of so many blocks has a mixture in place of its feed-forward network.
        balance_weight: of the balance loss in what is trained on.
        choices, capacity_factor, second: see :class:`MixtureOfExperts`.
    """

    num_experts: int
    every: int = 2
    balance_weight: float = 0.01
    choices: int = 2
    capacity_factor: float | None = None
    second: Second = "all"

    @staticmethod
    def of(experts: Mapping[str, Any] | None, layer: int) -> MixtureOptions | None:
        """Those of block ``layer``, counted from 0; None if it has a feed-forward network."""
        options = None if experts is None else MixtureOptions(**experts)
        return options if options is not None and layer % options.every == options.every - 1 else None


class Experts(nn.Module):
    """Feed-forward networks of one shape, whose weights are stacked: w1 (experts, hidden, d), w2 (experts, d, hidden), biases alike.

    Args: those of :class:`FeedForward`.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        hidden: int,
        *,
        activation: ActivationName = "relu",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        shapes = {"w1": (hidden, d_model), "gate": (hidden, d_model), "w2": (d_model, hidden)}
        for name, shape in shapes.items():
            there = gated or name != "gate"
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, *shape)) if there else None)
            self.register_parameter(
                f"{name}_bias", nn.Parameter(torch.empty(num_experts, shape[0])) if there and bias else None
            )
        self.reset_parameters()

    w1: nn.Parameter
    w2: nn.Parameter
    gate: nn.Parameter | None
    w1_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None

    def __len__(self) -> int:
        return self.w1.shape[0]

    def reset_parameters(self) -> None:
        """As so many ``nn.Linear``."""
        self.initialise(lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)))
        for weight, bias in ((self.w1, self.w1_bias), (self.gate, self.gate_bias), (self.w2, self.w2_bias)):
            if weight is not None and bias is not None:
                nn.init.uniform_(bias, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def initialise(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """Each expert's matrices by ``fill``; biases zero."""
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.zero_() if name.endswith("bias") else [fill(matrix) for matrix in parameter.unbind(0)]

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """(N, d) to the same. Rows starts[e] to starts[e + 1] are expert e's; what those after the last become is undefined.

        On a GPU two grouped products, with the starts on the device: no wait for it, and any split of the rows is the same graph. On
        the CPU, where the host knows the starts, each expert is one fused call: 0.5 times the time of grouped products forward in
        float32 and 0.7 with backward, 1.1 in bfloat16 with backward (2,048 rows, d 512, hidden 2,048, 16 experts; Zen 5, one thread).
        """
        return (
            self._grouped(x, starts[1:])
            if x.device.type != "cpu" or torch.compiler.is_compiling()
            else self._one_by_one(x, starts)
        )

    def _one_by_one(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        all_of = [self.w1, self.w1_bias, self.w2, self.w2_bias, self.gate, self.gate_bias]
        of_each = zip(*([None] * len(self) if t is None else t.unbind(0) for t in all_of))
        *rows, rest = x.tensor_split(starts[1:].long())
        outs = [
            feed_forward(r, w1, b1, w2, b2, activation=self.activation, gate_weight=gate, gate_bias=b, dropout_p=p)
            for r, (w1, b1, w2, b2, gate, b) in zip(rows, of_each)
        ]
        return torch.cat([*outs, rest.to(outs[0].dtype)])

    def _grouped(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        row = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, row, right=True)

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out = grouped_linear(x.to(dtype), weight.to(dtype), ends)
            # Rows after the last end have a bias of their own: their gradient, undefined as they are, goes nowhere.
            return out if bias is None else out + F.pad(bias.to(dtype), (0, 0, 0, 1))[expert]

        activate, hidden = ACTIVATIONS[self.activation], linear(x, self.w1, self.w1_bias)
        hidden = activate(hidden) if self.gate is None else activate(linear(x, self.gate, self.gate_bias)) * hidden
        return linear(F.dropout(hidden, self.dropout, self.training), self.w2, self.w2_bias)


def network(experts: Mapping[str, Any] | None, layer: int, d_model: int, hidden: int, **networks: Any) -> nn.Module:
    """The feed-forward network of block ``layer`` of a model, or its mixture of experts: a config's ``experts`` says which."""
    options = MixtureOptions.of(experts, layer)
    if options is None:
        return FeedForward(d_model, hidden, **networks)
    return MixtureOfExperts(
        d_model, hidden, options.num_experts, choices=options.choices, capacity_factor=options.capacity_factor,
        second=options.second, **networks,
    )  # fmt: skip


class MixtureOfExperts(nn.Module):
    """The best of several feed-forward networks for each token: ``sum_{e in best} g_e / sum(g) * expert_e(x)``.

    ``g = softmax(x W_g)``. With one choice its gate scales it, ``g_1 * expert_1(x)``. An expert takes at most ``capacity =
    ceil(choices * tokens / experts * capacity_factor)`` tokens, those with an earlier choice and position first; a token that finds no
    room there gets nothing from that expert. ``balance_loss`` is left by each forward: ``E * sum_e f_e * m_e``, with f_e the share of
    tokens whose first choice is e and m_e the mean gate; 1 when balanced (GShard's loss times E²). Add a small multiple of
    :func:`balance_loss` to what is trained on.

    Args:
        choices: experts of a token: 1 (Switch) or 2 (GShard), or more.
        capacity_factor: None: no token is dropped.
        second: ``"random"``: in training a token goes to a later choice with probability ``2 g_e / sum(g)`` (GShard).
        activation, gated, bias, dropout: of the experts.

    Source: Lepikhin et al., "GShard" (2021), algorithm 1; Fedus et al., "Switch Transformers" (2022), section 2.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        num_experts: int,
        *,
        choices: int = 2,
        capacity_factor: float | None = None,
        second: Second = "all",
        **networks: Any,
    ) -> None:
        super().__init__()
        if num_experts < 2:
            raise ValueError(f"MixtureOfExperts: num_experts must be at least 2, got {num_experts}")
        if not 1 <= choices <= num_experts:
            raise ValueError(f"MixtureOfExperts: choices must be between 1 and {num_experts} experts, got {choices}")
        if second not in ("all", "random"):
            raise ValueError(f"MixtureOfExperts: second must be 'all' or 'random', got {second!r}")
        self.choices, self.capacity_factor, self.second = choices, capacity_factor, second
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.experts = Experts(num_experts, d_model, hidden, **networks)
        self.balance_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # The gates' softmax is float32 even in a bfloat16 model: a rounded tie would change which expert a token goes to.
        gates = torch.softmax(self.router(tokens).to(torch.promote_types(x.dtype, torch.float32)), -1)
        best, expert = gates.topk(self.choices, -1)
        weight = best / best.sum(-1, keepdim=True) if self.choices > 1 else best
        self.balance_loss = self._balance(gates, expert[:, 0])
        order, starts = self._sent(expert, weight)
        rows = tokens[order % max(1, len(tokens))]
        sent = (torch.arange(len(order), device=x.device) < starts[-1])[:, None]
        # Rows that no expert takes are undefined in what comes out, and so would be their gradient.
        out = torch.where(sent, self.experts(torch.where(sent, rows, 0), starts), 0)
        # Each slot is read once here, so backward adds nothing in an order of its own.
        mixed = (out[order.argsort()].unflatten(0, (self.choices, -1)) * weight.t()[..., None].to(out.dtype)).sum(0)
        return mixed.view_as(x)

    def _sent(self, expert: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots (choice, token), counted through, by expert, those that no expert takes last; where each expert's begin, and their end.

        All first choices come before all second ones, so that those find room first. Nothing here waits for the device.
        """
        count, slots = len(self.experts), expert.t().flatten()
        if self.second == "random" and self.training:
            stays = torch.rand_like(weight[:, 1:]) < 2 * weight[:, 1:]
            slots = torch.where(F.pad(stays, (1, 0), value=True).t().flatten(), slots, count)
        slots, order = slots.sort(stable=True)
        every = torch.arange(count + 1, device=slots.device)
        starts = torch.searchsorted(slots, every)
        if self.capacity_factor is not None:
            capacity = math.ceil(self.choices * len(expert) / count * self.capacity_factor)
            place = torch.arange(len(slots), device=slots.device) - starts[slots]
            slots, again = torch.where(place < capacity, slots, count).sort(stable=True)
            order, starts = order[again], torch.searchsorted(slots, every)
        return order, starts.int()

    def _balance(self, gates: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        share = F.one_hot(first, gates.shape[1]).to(gates.dtype).sum(0) / max(1, len(first))
        return gates.shape[1] * (share * gates.mean(0)).sum()


def balance_loss(model: nn.Module) -> torch.Tensor | None:
    """The sum of ``balance_loss`` over a model's mixtures of experts in their last forward; None if it has none."""
    losses = [m.balance_loss for m in model.modules() if isinstance(m, MixtureOfExperts) and m.balance_loss is not None]
    return torch.stack(losses).sum() if losses else None
