# SPDX-License-Identifier: Apache-2.0
"""Peers of `feed_forward`: plain matrix products, and `F.linear` with activations.

With ``recompute``, our op saves only x for backward; the peers use checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pytransformer.cli.providers import (
    NAIVE,
    TORCH,
    Outputs,
    Prepared,
    Problem,
    Provider,
    Row,
    compiled,
)

Linear = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]


def _naive_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.t()
    return y if bias is None else y + bias


_NAIVE_ACTIVATIONS: dict[str, Activation] = {
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    ),
    "silu": lambda x: x * torch.sigmoid(x),
}
_TORCH_ACTIVATIONS: dict[str, Activation] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def _prepare(
    problem: Problem, linear: Linear, activations: dict[str, Activation], label: str
) -> Prepared:
    named, dropout = problem.named, problem.dropout
    act = activations[named.get("activation", "relu")]
    x, w1, b1, w2, b2 = (named[name] for name in ("x", "w1", "b1", "w2", "b2"))
    gate_weight, gate_bias = named.get("gate_weight"), named.get("gate_bias")

    def network(x: torch.Tensor) -> torch.Tensor:
        hidden = linear(x, w1, b1)
        hidden = (
            act(hidden) if gate_weight is None else act(linear(x, gate_weight, gate_bias)) * hidden
        )
        return linear(F.dropout(hidden, dropout) if dropout else hidden, w2, b2)

    def recomputing() -> Outputs:  # like ours, saves only x for backward
        return (checkpoint(network, x, use_reentrant=False, preserve_rng_state=dropout > 0),)

    if named.get("recompute"):
        return Prepared(f"{label}; checkpointed", recomputing, own_dropout=dropout > 0)
    return Prepared(label, lambda: (network(x),), own_dropout=dropout > 0)


def prepare_naive(problem: Problem) -> Prepared:
    return _prepare(
        problem, _naive_linear, _NAIVE_ACTIVATIONS, "x @ w.t() + b and the activation written out"
    )


def prepare_torch(problem: Problem) -> Prepared:
    return _prepare(problem, F.linear, _TORCH_ACTIVATIONS, "F.linear, activation, F.linear")


PROVIDERS = {
    "feed_forward": (
        Provider(NAIVE, prepare_naive),
        Provider(TORCH, prepare_torch),
        compiled(prepare_naive),
    )
}
QUICK = (Row("feed_forward_gelu", {"rows": 256, "d": 512, "hidden": 2048}),)
_GELU = Row("feed_forward_gelu", {"rows": 1024, "d": 512, "hidden": 2048})
SUITES = {
    "aims": (
        _GELU,
        Row("feed_forward_relu", {"rows": 2048, "d": 768, "hidden": 3072}),
        Row("feed_forward_swiglu", {"rows": 1024, "d": 512, "hidden": 1376}),
        Row("feed_forward_recompute", {"rows": 1024, "d": 512, "hidden": 2048}),
    ),
    "isa": (_GELU,),
}
