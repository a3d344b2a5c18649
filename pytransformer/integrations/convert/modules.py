# SPDX-License-Identifier: Apache-2.0
"""Helpers of converted modules: checks of linear layers and norms, activation names, op calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from ...ops import feed_forward as ff
from ...ops import layer_norm as norms
from ...ops.options import ActivationName
from . import code
from .rules import find_rule, library, original_class

_PLAIN = (nn.Parameter, torch.Tensor)
# Tensors that represent plain ones during tracing, and DTensor, for which the ops have rules.
_KNOWN_SUBCLASSES = (
    "torch._subclasses",
    "torch.distributed.tensor",
    "torch.fx",
    "torch.nn.parameter",
)
# Digests of the forwards of bypassed modules without a rule, by module and class.
_BYPASSED: dict[str, dict[str, str]] = {
    "transformers.activations": {
        "GELUActivation": "c023091653f3",
        "GELUTanh": "c023091653f3",
        "SiLUActivation": "281694387071",
    },
    "timm.layers.activations": {"GELU": "75ced0491999", "GELUTanh": "15f351500331"},
}
observed: set[nn.Module] = set()  # modules that only have explain's hooks, which change nothing
_FUNCTIONS: dict[Any, ActivationName] = {
    F.relu: "relu",
    torch.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
}
# Classes by module. transformers' GELUActivation may compute erf in Python; the function is equal.
_CLASSES: dict[str, dict[str, ActivationName]] = {
    "transformers.activations": {
        "GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh",
        "SiLUActivation": "silu",
    },
    "timm.layers.activations": {"GELU": "gelu", "GELUTanh": "gelu_tanh"},
}  # fmt: skip


def activation_name(activation: Any) -> ActivationName | None:
    """Return our name of an activation function or module, or None if it is unsupported."""
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
    """Return why these linear layers cannot be computed from their weights only, or None."""
    for linear in linears:
        if original_class(linear) is not nn.Linear:
            return f"has a {type(linear).__name__} where a torch.nn.Linear was expected"
    return unhooked(*linears)


def bypass(digest: str, **models: str) -> None:
    """Register the digest of inner modules that a rule bypasses, as ``model="Class Class"``."""
    for model, classes in models.items():
        _BYPASSED.setdefault(f"transformers.models.{model}.modeling_{model}", {}).update(
            dict.fromkeys(classes.split(), digest)
        )


# Class to its forward and the result of _changed.
_FORWARDS: dict[type, tuple[Any, str | None]] = {}


def _changed(cls: Any) -> str | None:
    """Return why the class's forward is not the code that rules bypass, or None.

    The result is cached until the forward is replaced. torch.compile can trace access to a dict,
    but not the digest of a source.
    """
    if cls not in _FORWARDS or not (
        torch.compiler.is_compiling() or _FORWARDS[cls][0] is cls.forward
    ):
        rule, known = find_rule(cls), _BYPASSED.get(cls.__module__, {}).get(cls.__name__)
        if rule is not None and rule.method == "forward":
            own = rule.checked(cls)
        else:
            own = (
                code.is_own(cls, "forward")
                if library(cls) == "torch"
                else code.digest(cls, "forward") == known or code.accepted(cls, "forward")
            )
        _FORWARDS[cls] = (
            cls.forward,
            None if own else f"has a {cls.__name__} whose forward is not one we have checked",
        )
    return _FORWARDS[cls][1]


def unknown_bypassed(module: nn.Module) -> list[type]:
    """Return the listed classes of modules inside whose forward has an unknown digest."""
    classes = dict.fromkeys(original_class(inner) for inner in module.modules())
    return [
        cls
        for cls in classes
        if (known := _BYPASSED.get(cls.__module__, {}).get(cls.__name__)) is not None
        and code.digest(cls, "forward") != known
        and code.is_own(cls, "forward")
    ]


@contextlib.contextmanager
def assumed(classes: list[type]) -> Iterator[None]:
    """Let rules bypass modules of these classes inside the block; afterwards check them again."""
    for cls in classes:
        _FORWARDS[cls] = (cls.forward, None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for cls in classes:
            del _FORWARDS[cls]


def unhooked(*modules: nn.Module) -> str | None:
    """Return why these modules must be called, not bypassed, or None.

    Reasons are those of :func:`hooked` and a ``forward`` replaced in the class.
    """
    return hooked(*modules) or first_reason(*(_changed(original_class(m)) for m in modules))


def hooked(*modules: nn.Module) -> str | None:
    """Return what calls of these modules do beside their class's forward, or None.

    Reasons are hooks, a ``forward`` set on the instance, and special weights.
    """
    if _has_any_global_hook():
        return "hooks for all modules are registered, which a fused op would not call"
    for m in modules:
        hooks = (
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        )
        if hooks and m not in observed:
            return f"has a {type(m).__name__} with hooks, which a fused op would not call"
        if "forward" in m.__dict__:
            return f"has a {type(m).__name__} with a forward of its own, set on the instance"
        if (reason := special_weights(m)) is not None:
            return reason
    return None


def special_weights(m: nn.Module) -> str | None:
    """Return why an op cannot read a parameter as a dense tensor (a tensor subclass), or None."""
    for name, t in m._parameters.items():
        if t is None or type(t) in _PLAIN:
            continue
        if not type(t).__module__.startswith(_KNOWN_SUBCLASSES):
            return f"its {name} is a {type(t).__name__}, whose numbers our ops cannot read"
    return None


def droppable(*dropouts: Any) -> str | None:
    """Return why :func:`probability` cannot represent these dropouts, or None."""
    for dropout in dropouts:
        if isinstance(dropout, nn.Module):
            if type(dropout) is not nn.Dropout and type(dropout) is not nn.Identity:
                return f"has a {type(dropout).__name__} where a torch.nn.Dropout was expected"
            if (reason := unhooked(dropout)) is not None:
                return reason
        elif not isinstance(dropout, (int, float)):
            return f"has a {type(dropout).__name__} where a dropout was expected"
    return None


def needs(activation: Any, *linears: nn.Module) -> str | None:
    """Return why a feed-forward network's rule does not apply, or None."""
    if activation_name(activation) is None:
        return (
            f"its activation, {getattr(activation, '__name__', type(activation).__name__)}, is not"
            " one of ours"
        )
    if isinstance(activation, nn.Module) and (reason := unhooked(activation)) is not None:
        return reason
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
    """Return ``linear2(dropout(activation(linear1(x))))``.

    With a gate it is ``linear2(dropout(activation(gate(x)) * linear1(x)))``.
    """
    name = activation_name(activation)
    assert name is not None, "the rule's condition holds at each call"
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


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, norm: Any, dropout: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(norm(r), r)`` with ``r = residual + dropout(x)``, for a :func:`fusable_norm`."""
    # torch returns the promoted dtype.
    if x.dtype != residual.dtype or x.dtype != norm.weight.dtype:
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
    """Return why a rule cannot fuse these norms into add_norm, or None.

    The norms may already be converted.
    """
    for norm in candidates:
        rule = find_rule(cls := original_class(norm))
        what = "" if rule is None else rule.what
        if rule is not None and what == "layer_norm":
            if not isinstance(norm.weight, torch.Tensor) or norm.weight.dim() != 1:
                return "its norm has no weight, or is over more than one dimension"
            if (reason := rule.condition(norm)) is not None:
                return f"its norm {reason}"
        elif cls is nn.RMSNorm or what != "rms_norm":
            return f"has a {type(norm).__name__} where a LayerNorm or a known RMS norm was expected"
    return unhooked(*candidates)


def is_norm(module: nn.Module, what: str) -> bool:
    """Return whether a rule converts the module's class to this op."""
    rule = find_rule(original_class(module))
    return rule is not None and rule.what == what


def probability(dropout: nn.Module | float, training: bool) -> float:
    """Return the current dropout probability; ``training`` applies to a number only."""
    if isinstance(dropout, nn.Module):
        return dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    return float(dropout) if training else 0.0


def first_reason(*reasons: str | None) -> str | None:
    return next((r for r in reasons if r is not None), None)
