# SPDX-License-Identifier: Apache-2.0
"""What converted modules share: a linear layer that can be fused, an activation's name, and the ops on modules' parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...ops import feed_forward as ff
from ...ops import layer_norm as norms
from ...ops._core.options import ActivationName
from .rules import find_rule

_FUNCTIONS: dict[Any, ActivationName] = {F.relu: "relu", torch.relu: "relu", F.gelu: "gelu", F.silu: "silu"}
# Classes by module. transformers' GELUActivation may compute erf in Python, which is the same function.
_CLASSES: dict[str, dict[str, ActivationName]] = {
    "transformers.activations": {
        "GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh", "SiLUActivation": "silu",
    },
    "timm.layers.activations": {"GELU": "gelu", "GELUTanh": "gelu_tanh"},
}  # fmt: skip


def activation_name(activation: Any) -> ActivationName | None:
    """Our name of an activation function or module, or None if we have no such activation."""
    cls = type(activation)
    if cls is nn.ReLU:
        return "relu"
    if cls is nn.SiLU:
        return "silu"
    if cls is nn.GELU:
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if cls.__module__ in _CLASSES:
        return _CLASSES[cls.__module__].get(cls.__name__)
    try:
        return _FUNCTIONS.get(activation)
    except TypeError:  # not hashable
        return None


def unfusable(*linears: nn.Module) -> str | None:
    """Why these linear layers cannot be computed from their weights alone, or None."""
    for linear in linears:
        if getattr(type(linear), "converted_from", type(linear)) is not nn.Linear:
            return f"has a {type(linear).__name__} where a torch.nn.Linear was expected"
    return unhooked(*linears)


def unhooked(*modules: nn.Module) -> str | None:
    """Why these modules must be called as such, or None."""
    for m in modules:
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            return f"has a {type(m).__name__} with hooks, which a fused op would not call"
    return None


def needs(activation: Any, *linears: nn.Module) -> str | None:
    """The condition of a feed-forward network's rule."""
    if activation_name(activation) is None:
        return f"its activation, {getattr(activation, '__name__', type(activation).__name__)}, is not one of ours"
    return unfusable(*linears)


def feed_forward(
    x: torch.Tensor,
    linear1: nn.Linear,
    linear2: nn.Linear,
    activation: Any,
    *,
    gate: nn.Linear | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """``linear2(dropout(activation(linear1(x))))``, or with a gate ``linear2(dropout(activation(gate(x)) * linear1(x)))``."""
    name = activation_name(activation)
    assert name is not None, "checked when the module was converted"
    return ff.feed_forward(
        x,
        linear1.weight,
        linear1.bias,
        linear2.weight,
        linear2.bias,
        activation=name,
        gate_weight=None if gate is None else gate.weight,
        gate_bias=None if gate is None else gate.bias,
        dropout_p=dropout,
    )


def add_norm(x: torch.Tensor, residual: torch.Tensor, norm: Any, dropout: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(r), r)`` with ``r = residual + dropout(x)``, for a norm that :func:`fusable_norm` has nothing against."""
    if x.dtype != residual.dtype or x.dtype != norm.weight.dtype:  # sum or norm would have torch's promoted dtype
        stream = residual + F.dropout(x, dropout, dropout > 0)
        return norm(stream), stream
    layer = isinstance(norm, nn.LayerNorm)
    return norms.add_norm(
        x,
        residual,
        norm.weight,
        norm.bias if layer else None,
        eps=norm.eps if layer else norm.variance_epsilon,
        dropout_p=dropout,
        kind="layer" if layer else "rms",
    )


def fusable_norm(*candidates: nn.Module) -> str | None:
    """The condition of a rule that takes a block's norms into add_norm. They may be converted already."""
    for norm in candidates:
        cls = getattr(type(norm), "converted_from", type(norm))
        if is_norm(cls, "layer_norm"):
            if not isinstance(norm.weight, torch.Tensor) or norm.weight.dim() != 1:
                return "its norm has no weight, or is over more than one dimension"
            rule = find_rule(cls)
            assert rule is not None
            if (reason := rule.condition(norm)) is not None:
                return f"its norm {reason}"
        elif cls is nn.RMSNorm or not is_norm(cls, "rms_norm"):
            return f"has a {type(norm).__name__} where a LayerNorm or a known RMS norm was expected"
    return unhooked(*candidates)


def is_norm(cls: type, what: str) -> bool:
    """Whether the class has a rule that makes it this op, and has the code that the rule knows."""
    rule = find_rule(cls)
    return rule is not None and rule.what == what and rule.checked(cls)


def probability(dropout: nn.Dropout | float, training: bool) -> float:
    """The probability with which a module's dropout drops at the moment."""
    return (dropout if isinstance(dropout, float) else dropout.p) if training else 0.0


def first_reason(*reasons: str | None) -> str | None:
    return next((r for r in reasons if r is not None), None)
