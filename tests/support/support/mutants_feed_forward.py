# SPDX-License-Identifier: Apache-2.0
"""Wrong feed-forward networks; see `faults`."""

from __future__ import annotations

import importlib

import torch

from .faults import (
    FAITHFUL,
    Fault,
    as_contiguous,
    different_every_time,
    outputs,
    patching,
    replacing,
    shifted,
    value_of,
)

# Import the module, because the package has functions of the same names.
networks = importlib.import_module("pytransformer.reference._feed_forward")

FAULTS: dict[str, Fault] = {
    "faithful": FAITHFUL,
    "scale_off_by_0.4_percent": outputs(lambda y: y * 1.004),
    "b1_ignored": replacing(b1=lambda a: value_of(torch.zeros_like(a.b1), a.b1)),
    "b2_ignored": replacing(b2=lambda a: value_of(torch.zeros_like(a.b2), a.b2)),
    "gate_bias_ignored": replacing(
        gate_bias=lambda a: value_of(torch.zeros_like(a.gate_bias), a.gate_bias)
    ),
    "b1_gradient_dropped": replacing(b1=lambda a: a.b1.detach()),
    "b2_gradient_dropped": replacing(b2=lambda a: a.b2.detach()),
    "gate_gradient_dropped": replacing(gate_weight=lambda a: a.gate_weight.detach()),
    "w2_gradient_off_by_0.4_percent": replacing(w2=lambda a: value_of(a.w2, 1.004 * a.w2)),
    "gelu_by_tanh": replacing(
        activation=lambda a: "gelu_tanh" if a.activation == "gelu" else a.activation
    ),
    "silu_for_gelu": replacing(
        activation=lambda a: "silu" if a.activation == "gelu" else a.activation
    ),
    "gate_and_up_exchanged": lambda a, forward: forward(
        a
        if a.gate_weight is None
        else a._replace(w1=a.gate_weight, gate_weight=a.w1, b1=a.gate_bias, gate_bias=a.b1)
    ),
    "dropoutshifted_by_a_column": patching(networks, column_keep_mask=shifted),
    "dropout_with_the_tag_of_add_norm": patching(
        networks, column_keep_mask=lambda keep, *a: keep(*a[:-1], 0x80000001)
    ),
    "dropout_not_scaled": patching(networks, keep_scale=lambda scale, p: 1.0),
    "w1_rounded_to_bfloat16": replacing(
        w1=lambda a: value_of(a.w1.bfloat16().to(a.w1.dtype), a.w1)
    ),
    "w2_read_as_contiguous": replacing(w2=lambda a: value_of(as_contiguous(a.w2), a.w2)),
    "different_every_time": different_every_time,
}
