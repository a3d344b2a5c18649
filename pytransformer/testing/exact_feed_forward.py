# SPDX-License-Identifier: Apache-2.0
"""Exact results of feed_forward in float64, with their error bounds.

The bound propagates errors through both products. r = eps(float32) / eps(dtype) applies to float32
sums, and L = 1.13 is the max slope of an activation (and bounds its curvature):

    E(pre)  = |pre| + r (|x| |w1|^T + |b1|)    the stored pre-activation and its sum;
                                               E(gate) likewise
    E(h)    = |h| + L E(pre)                   gated: |h| + |act(gate)| E(pre) + |pre| L E(gate)
    S(y)    = E(h) |w2|^T + |b2|
    E(dh)   = |dh| + r |dy| |w2|
    E(dpre) = L E(dh) + |dh| L E(pre); for relu with pre within rounding of 0, |dh| / eps,
              because the slope is undecided there
    S(dx) = E(dpre) |w1|, S(dw1) = E(dpre)^T |x|, S(db1) = sum E(dpre),
    S(dw2) = |dy|^T E(h), S(db2) = sum |dy|
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Problem
from .exact_layer_norm import column_keep

TAG = 0x80000002
SLOPE = 1.13
_HALF = {"zero_mean": (1.0, 1.0), "any": (1.0, 1.0)}
LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    **dict.fromkeys((torch.bfloat16, torch.float16), _HALF),
    torch.float32: {"zero_mean": (1.0, 2.0), "any": (4.0, 2.0)},
}


def _activation(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and slope in float64 from explicit formulas."""
    if name == "relu":
        return x.clamp(min=0), (x > 0).double()
    if name == "gelu":
        cdf = 0.5 * torch.erfc(-x / math.sqrt(2))
        return x * cdf, cdf + x * torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    slope = torch.ones_like(x)
    z = x
    if name == "gelu_tanh":
        c = 2 * math.sqrt(2 / math.pi)
        z, slope = c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x.square())
    s = torch.sigmoid(z)
    return x * s, s + x * s * torch.sigmoid(-z) * slope


def solve(problem: Problem) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S."""
    t = {n: v.double() for n, v in problem.tensors.items()}
    eps = torch.finfo(problem.dtype).eps
    r = 1.0 if problem.dtype == torch.float64 else torch.finfo(torch.float32).eps / eps
    out: dict[str, oracle.Result] = {}

    def put(name: str, value: Tensor, size: Tensor, gradient: bool, like: str) -> None:
        dtype = problem.tensors[like].dtype
        # Subnormal fp16 intermediates may add this through sums of a few hundred terms of order
        # one.
        floor = torch.full_like(size, 2.0**-24 * 64 if problem.dtype == torch.float16 else 0.0)
        out[name] = oracle.Result(value, size, floor, gradient, dtype)

    x = t["x"].reshape(-1, t["x"].shape[-1])
    zero = torch.zeros(())
    b1, b2, bg = t.get("b1", zero), t.get("b2", zero), t.get("gate_bias", zero)
    pre = x @ t["w1"].T + b1
    e_pre = pre.abs() + r * (x.abs() @ t["w1"].abs().T + b1.abs())
    p = problem.keywords.get("dropout_p", 0.0)
    threshold = round(65536 * p)
    if threshold in (0, 65536):
        keep = torch.full_like(pre, 0.0 if threshold else 1.0)
    else:
        keep = column_keep(
            problem.keywords["dropout_seed"], threshold, pre.shape[0], pre.shape[1], TAG
        )
    name = problem.keywords["activation"]
    gated = "gate_weight" in t
    source, e_source = pre, e_pre
    if gated:
        source = x @ t["gate_weight"].T + bg
        e_source = source.abs() + r * (x.abs() @ t["gate_weight"].abs().T + bg.abs())
    value, slope = _activation(name, source)
    e_slope = SLOPE * e_source
    if name == "relu":
        e_slope = torch.where(source.abs() <= 16 * eps * e_source, 1.0 / eps, 0.0)
    if gated:
        h = value * pre
        e_h = h.abs() + value.abs() * e_pre + pre.abs() * SLOPE * e_source
    else:
        h, e_h = value, value.abs() + SLOPE * e_source
    h, e_h = h * keep, e_h * keep
    shape = (*problem.tensors["x"].shape[:-1], t["w2"].shape[0])
    put(
        "out",
        (h @ t["w2"].T + b2).reshape(shape),
        (e_h @ t["w2"].abs().T + b2.abs()).reshape(shape),
        False,
        "x",
    )
    if "grad_out" not in t:
        return out

    dy = t["grad_out"].reshape(-1, t["w2"].shape[0])
    dh = dy @ t["w2"] * keep
    e_dh = dh.abs() + r * (dy.abs() @ t["w2"].abs()) * keep
    e_act = slope.abs() * e_dh + dh.abs() * (slope.abs() + e_slope)
    if gated:
        dpre, dgate = dh * value, dh * pre * slope
        e_dpre = value.abs() * e_dh + dh.abs() * (value.abs() + SLOPE * e_source)
        e_dgate = pre.abs() * e_act + dh.abs() * slope.abs() * e_pre + dgate.abs()
    else:
        dpre, e_dpre = dh * slope, e_act
    dx, s_dx = dpre @ t["w1"], e_dpre @ t["w1"].abs()
    if gated:
        dx, s_dx = dx + dgate @ t["gate_weight"], s_dx + e_dgate @ t["gate_weight"].abs()
        put("gate_weight", dgate.T @ x, e_dgate.T @ x.abs(), True, "gate_weight")
        if "gate_bias" in t:
            put("gate_bias", dgate.sum(0), e_dgate.sum(0), True, "gate_bias")
    put("x", dx.reshape(t["x"].shape), s_dx.reshape(t["x"].shape), True, "x")
    put("w1", dpre.T @ x, e_dpre.T @ x.abs(), True, "w1")
    put("w2", dy.T @ h, dy.abs().T @ e_h, True, "w2")
    if "b1" in t:
        put("b1", dpre.sum(0), e_dpre.sum(0), True, "b1")
    if "b2" in t:
        put("b2", dy.sum(0), dy.abs().sum(0), True, "b2")
    return out
