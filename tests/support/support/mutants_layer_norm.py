# SPDX-License-Identifier: Apache-2.0
"""Wrong norms; see `faults`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .faults import (
    FAITHFUL,
    Fault,
    Outputs,
    as_contiguous,
    different_every_time,
    outputs,
    patching,
    replacing,
    shifted,
    value_of,
)

# Import the module, because the package has functions of the same names.
norms = importlib.import_module("pytransformer.reference._layer_norm")


def _one_pass_variance(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """Compute rstd from E[h^2] - E[h]^2."""
    out, *rest = forward(a)
    if getattr(a, "rms", a.__class__.__name__.startswith("rms")):
        return out, *rest
    h = (rest[0] if len(rest) == 3 else a.x).detach().to(rest[-1].dtype)
    over = tuple(range(-a.dims, 0))
    variance = h.square().mean(over) - h.mean(over).square()
    wrong = (variance.clamp(min=0) + a.eps).rsqrt() / rest[-1].detach()
    factor = wrong.reshape(*wrong.shape, *(1,) * a.dims)
    bias = 0.0 if a.bias is None else a.bias.to(h.dtype)
    return ((out.to(h.dtype) - bias) * factor + bias).to(out.dtype), *rest


def _norm_of_the_unrounded_sum(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    if not hasattr(a, "residual"):
        return forward(a)
    wide = (
        a._replace(x=a.x.float(), residual=None if a.residual is None else a.residual.float())
        if a.x.dtype != torch.float64
        else a
    )
    normed, _, *rest = forward(wide)
    return normed.to(a.x.dtype), forward(a)[1], *rest


def _stream_gradient_ignored(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    outputs = forward(a)
    return (
        outputs
        if len(outputs) < 4
        else (outputs[0], outputs[1].detach() + 0 * outputs[0].to(outputs[1].dtype), *outputs[2:])
    )


FAULTS: dict[str, Fault] = {
    "faithful": FAITHFUL,
    "scale_off_by_0.4_percent": outputs(lambda y: y * 1.004),
    "one_pass_variance": _one_pass_variance,
    "eps_ignored": replacing(eps=lambda a: 0.0),
    "eps_always_1e-5": replacing(eps=lambda a: 1e-5),
    "weight_ignored": replacing(weight=lambda a: value_of(torch.ones_like(a.weight), a.weight)),
    "bias_ignored": replacing(bias=lambda a: value_of(torch.zeros_like(a.bias), a.bias)),
    "weight_rounded_to_half": replacing(
        weight=lambda a: value_of(a.weight.half().to(a.weight.dtype), a.weight)
    ),
    "weight_gradient_dropped": replacing(weight=lambda a: a.weight.detach()),
    "bias_gradient_dropped": replacing(bias=lambda a: a.bias.detach()),
    "bias_gradient_off_by_0.4_percent": replacing(bias=lambda a: value_of(a.bias, 1.004 * a.bias)),
    "residual_gradient_dropped": replacing(residual=lambda a: a.residual.detach()),
    "stream_gradient_ignored": _stream_gradient_ignored,
    "norm_of_the_unrounded_sum": _norm_of_the_unrounded_sum,
    "dropoutshifted_by_a_column": patching(norms, column_keep_mask=shifted),
    "dropout_with_the_tag_of_feed_forward": patching(
        norms, column_keep_mask=lambda keep, *a: keep(*a[:-1], 0x80000002)
    ),
    "dropout_not_scaled": patching(norms, keep_scale=lambda scale, p: 1.0),
    "dropout_scaled_by_p_alone": patching(
        norms, keep_scale=lambda scale, p: 1 / (1 - p) if p < 1 else 0.0
    ),
    "x_read_as_contiguous": replacing(x=lambda a: value_of(as_contiguous(a.x), a.x)),
    "different_every_time": different_every_time,
}
