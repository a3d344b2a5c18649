# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts, a replacement for a feed-forward network: a router and batched experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ..distributed.experts import ScaledGradient, dispatch
from ..distributed.group import check_group
from ..ops.feed_forward import feed_forward
from ..ops.options import ActivationName
from ..reference._feed_forward import ACTIVATIONS
from ._grouped import grouped_linear
from .feed_forward import FeedForward

Second = Literal["all", "random"]


@dataclass(frozen=True)
class MixtureOptions:
    """The expert options of a model's config.

    Args:
        num_experts: experts of a mixture.
        every: the last of this many blocks has a mixture in place of its feed-forward network.
        balance_weight: weight of the balance loss in the training loss.
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
        """Return the options of block ``layer`` (from 0); None for a feed-forward network."""
        options = None if experts is None else MixtureOptions(**experts)
        return (
            options if options is not None and layer % options.every == options.every - 1 else None
        )


class Experts(nn.Module):
    """Feed-forward networks of one shape with stacked weights.

    w1 is (experts, hidden, d) and w2 (experts, d, hidden); biases are stacked too.

    Args: as in :class:`FeedForward`.
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
            self.register_parameter(
                name, nn.Parameter(torch.empty(num_experts, *shape)) if there else None
            )
            self.register_parameter(
                f"{name}_bias",
                nn.Parameter(torch.empty(num_experts, shape[0])) if there and bias else None,
            )
        self.reset_parameters()

    w1: nn.Parameter
    w2: nn.Parameter
    gate: nn.Parameter | None
    w1_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    gate_bias: nn.Parameter | None

    # set by parallelize: the group and the gradient factor
    split: tuple[dist.ProcessGroup | None, float] | None = None

    def __len__(self) -> int:
        return self.w1.shape[0]

    def parallelize(self, group: dist.ProcessGroup | None = None, *, mean: bool = False) -> None:
        """Split the experts over the ranks of a group; see :meth:`MixtureOfExperts.parallelize`."""
        _, ranks = check_group("Experts", group)
        if len(self) % ranks:
            raise ValueError(
                f"Experts: {ranks} ranks must divide the {len(self)} experts: use a smaller group,"
                " or another number of experts"
            )
        # the import takes longer than this package
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        of_all = dist.distributed_c10d._get_default_group() if group is None else group
        mesh = DeviceMesh.from_group(of_all, self.w1.device.type)
        for name, parameter in list(self.named_parameters()):
            t = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(t, requires_grad=parameter.requires_grad))
        self.split = group, 1 / ranks if mean else 1.0

    def _own(self, name: str) -> torch.Tensor | None:
        """Return this rank's part of an expert parameter."""
        t: Any = getattr(self, name)
        if t is None or self.split is None:
            return t
        local: torch.Tensor = t.to_local()
        return ScaledGradient.apply(local, self.split[1]) if self.split[1] != 1.0 else local

    def reset_parameters(self) -> None:
        """Initialize each expert as ``nn.Linear`` does."""
        self.initialise(lambda weight: nn.init.kaiming_uniform_(weight, a=math.sqrt(5)))
        for weight, bias in (
            (self.w1, self.w1_bias),
            (self.gate, self.gate_bias),
            (self.w2, self.w2_bias),
        ):
            if weight is not None and bias is not None:
                nn.init.uniform_(bias, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def initialise(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """Initialize each expert's matrices with ``fill`` and set biases to zero."""
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                (
                    parameter.zero_()
                    if name.endswith("bias")
                    else [fill(matrix) for matrix in parameter.unbind(0)]
                )

    def forward(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return (N, d) from (N, d); rows starts[e] to starts[e + 1] belong to expert e.

        Rows after the last expert's are undefined. On a GPU two grouped gemms read the starts on
        the device, so there is no synchronization and any split of the rows is the same graph. On
        the CPU, where the host has the starts, each expert is one fused call. It takes 0.5 times
        the time of grouped gemms in float32 forward, 0.7 with backward, and 1.1 in bfloat16 with
        backward (2,048 rows, d 512, hidden 2,048, 16 experts; Zen 5, one thread).
        """
        return (
            self._grouped(x, starts[1:])
            if x.device.type != "cpu" or torch.compiler.is_compiling()
            else self._one_by_one(x, starts)
        )

    def _one_by_one(self, x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        all_of = [
            self._own(name) for name in ("w1", "w1_bias", "w2", "w2_bias", "gate", "gate_bias")
        ]
        of_each = zip(*([None] * (len(starts) - 1) if t is None else t.unbind(0) for t in all_of))
        *rows, rest = x.tensor_split(starts[1:].long())
        outs = [
            feed_forward(
                r,
                w1,
                b1,
                w2,
                b2,
                activation=self.activation,
                gate_weight=gate,
                gate_bias=b,
                dropout_p=p,
            )
            for r, (w1, b1, w2, b2, gate, b) in zip(rows, of_each)
        ]
        return torch.cat([*outs, rest.to(outs[0].dtype)])

    def _grouped(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        row = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(ends, row, right=True)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            weight, bias = self._own(name), self._own(f"{name}_bias")
            assert weight is not None
            out = grouped_linear(x.to(dtype), weight.to(dtype), ends)
            # Rows after the last end index a zero bias, so their undefined gradient is dropped.
            return out if bias is None else out + F.pad(bias.to(dtype), (0, 0, 0, 1))[expert]

        activate, hidden = ACTIVATIONS[self.activation], linear(x, "w1")
        hidden = activate(hidden) if self.gate is None else activate(linear(x, "gate")) * hidden
        return linear(F.dropout(hidden, self.dropout, self.training), "w2")


def network(
    experts: Mapping[str, Any] | None, layer: int, d_model: int, hidden: int, **networks: Any
) -> nn.Module:
    """Return the feed-forward network or mixture of block ``layer``, by a config's ``experts``."""
    options = MixtureOptions.of(experts, layer)
    if options is None:
        return FeedForward(d_model, hidden, **networks)
    return MixtureOfExperts(
        d_model, hidden, options.num_experts, choices=options.choices,
        capacity_factor=options.capacity_factor,
        second=options.second, **networks,
    )  # fmt: skip


class MixtureOfExperts(nn.Module):
    """Mixture of experts: ``sum_{e in best} g_e / sum(g) * expert_e(x)`` for each token.

    ``g = softmax(x W_g)``. With one choice the output is ``g_1 * expert_1(x)``. An expert accepts
    at most ``capacity = ceil(choices * tokens / experts * capacity_factor)`` tokens, ordered by
    choice and then by position. A token beyond the capacity gets no output from that expert. Each
    forward sets ``balance_loss = E * sum_e f_e * m_e``, with f_e the share of tokens whose first
    choice is e and m_e the mean gate; it is 1 when balanced (GShard's loss times E²). Add a small
    multiple of :func:`balance_loss` to the training loss.

    Args:
        choices: experts per token: 1 (Switch), 2 (GShard) or more.
        capacity_factor: None disables the capacity limit.
        second: with ``"random"``, training uses a later choice with probability ``2 g_e / sum(g)``
            (GShard).
        activation, gated, bias, dropout: options of the experts.

    Source: Lepikhin et al., "GShard" (2021), algorithm 1; Fedus et al., "Switch Transformers"
    (2022), section 2.
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
            raise ValueError(
                f"MixtureOfExperts: choices must be between 1 and {num_experts} experts, got"
                f" {choices}"
            )
        if second not in ("all", "random"):
            raise ValueError(f"MixtureOfExperts: second must be 'all' or 'random', got {second!r}")
        self.choices, self.capacity_factor, self.second = choices, capacity_factor, second
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.experts = Experts(num_experts, d_model, hidden, **networks)
        self.balance_loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        # The gate softmax is float32 even in a bfloat16 model: a rounded tie would change a token's
        # expert.
        gates = torch.softmax(
            self.router(tokens).to(torch.promote_types(x.dtype, torch.float32)), -1
        )
        best, expert = gates.topk(self.choices, -1)
        weight = best / best.sum(-1, keepdim=True) if self.choices > 1 else best
        self.balance_loss = self._balance(gates, expert[:, 0])
        if self.experts.split is not None:
            return self._elsewhere(tokens, expert, weight, self.experts.split[0]).view_as(x)
        order, starts = self._sent(expert, weight)
        rows = tokens[order % max(1, len(tokens))]
        sent = (torch.arange(len(order), device=x.device) < starts[-1])[:, None]
        # Rows without an expert are undefined in the output, and so would be their gradient.
        out = torch.where(sent, self.experts(torch.where(sent, rows, 0), starts), 0)
        # Each slot is read once here, so backward accumulates nothing in an undefined order.
        mixed = (
            out[order.argsort()].unflatten(0, (self.choices, -1))
            * weight.t()[..., None].to(out.dtype)
        ).sum(0)
        return mixed.view_as(x)

    def parallelize(self, group: dist.ProcessGroup | None = None, *, mean: bool = False) -> None:
        """Split the experts over the ranks of ``group`` (None: all), each with its local tokens.

        Results, including the capacity limit, equal one process with the tokens of all ranks. Every
        rank must call forward and backward. The expert parameters become DTensors. Their gradient
        is the gradient of the sum of the ranks' losses, or of the mean with ``mean``, which matches
        DDP and FSDP2. Exclude the experts from DDP and FSDP2 (``fully_shard(...,
        ignored_params=...)``). ``balance_loss`` is per rank; with equal token counts, its mean over
        the ranks equals one process's.

        Raises:
            ValueError: the number of experts is not a multiple of the ranks, or torch.distributed
                is not initialized.
        """
        self.experts.parallelize(group, mean=mean)

    def _elsewhere(
        self,
        tokens: torch.Tensor,
        expert: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Return the mixture's output, with experts split over ranks."""
        found = dispatch(
            self._slots(expert, weight), self.choices, len(self.experts), self._capacity, group
        )
        rows = found.run(tokens[found.order % max(1, len(tokens))], self.experts)
        out = rows.new_zeros(self.choices * len(tokens), tokens.shape[1]).index_copy(
            0, found.order, rows
        )
        return (out.unflatten(0, (self.choices, -1)) * weight.t()[..., None].to(out.dtype)).sum(0)

    def _slots(self, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the expert of each flattened slot (choice, token); num_experts if unused."""
        slots = expert.t().flatten()
        if self.second == "random" and self.training:
            stays = torch.rand_like(weight[:, 1:]) < 2 * weight[:, 1:]
            slots = torch.where(
                F.pad(stays, (1, 0), value=True).t().flatten(), slots, len(self.experts)
            )
        return slots

    def _capacity(self, tokens: int) -> int:
        """Return the maximum number of slots of an expert."""
        full = self.choices * tokens
        return (
            full
            if self.capacity_factor is None
            else math.ceil(full / len(self.experts) * self.capacity_factor)
        )

    def _sent(
        self, expert: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flattened slots (choice, token) sorted by expert, and each expert's start.

        Unused slots are last; the final start is the end of the last expert's slots. All first
        choices precede the second choices, so they have priority. No step synchronizes with the
        device.
        """
        count, slots = len(self.experts), self._slots(expert, weight)
        slots, order = slots.sort(stable=True)
        every = torch.arange(count + 1, device=slots.device)
        starts = torch.searchsorted(slots, every)
        if self.capacity_factor is not None:
            capacity = self._capacity(len(expert))
            place = torch.arange(len(slots), device=slots.device) - starts[slots]
            slots, again = torch.where(place < capacity, slots, count).sort(stable=True)
            order, starts = order[again], torch.searchsorted(slots, every)
        return order, starts.int()

    def _balance(self, gates: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        share = F.one_hot(first, gates.shape[1]).to(gates.dtype).sum(0)
        tokens = torch.full_like(share[:1], len(first))
        if self.experts.split is not None:
            both = torch.cat([share, tokens])
            dist.all_reduce(both, group=self.experts.split[0])
            share, tokens = both[:-1], both[-1:]
        share = share / tokens.clamp(min=1)
        return gates.shape[1] * (share * gates.sum(0)).sum() / max(1, len(gates))


def balance_loss(model: nn.Module) -> torch.Tensor | None:
    """Return the summed ``balance_loss`` of a model's mixtures after a forward, or None."""
    losses = [
        m.balance_loss
        for m in model.modules()
        if isinstance(m, MixtureOfExperts) and m.balance_loss is not None
    ]
    return torch.stack(losses).sum() if losses else None
