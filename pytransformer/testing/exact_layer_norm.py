# SPDX-License-Identifier: Apache-2.0
"""Exact results of layer_norm, rms_norm and add_norm in float64, with their error bounds.

The bound, with xhat = (h - mean) rstd, g = dy weight and r = eps(float32) / eps(dtype). A float32
mean shifts a row's xhat by up to m = rstd mean|h| float32 units, which such a kernel cannot avoid.
The variance about the mean is insensitive to that shift, so E[h^2] - E[h]^2 violates the bound on
offset data.

    y        |weight xhat| + |bias| + r |weight| m
    dh       rstd (|g| + mean|g| + |xhat| mean|g xhat|
             + r m (mean|g xhat| + |xhat| mean|g|)) + |d residual_out|
    dweight  sum over rows of |dy| (|xhat| + r m)
    dbias    sum over rows of |dy|

The exact norm is computed from our stored residual_out, which is compared with residual +
dropout(x) separately.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import bounds, oracle
from .case import Problem

TAG = 0x80000001
LIMITS: bounds.Limits = {
    **bounds.LIMITS,
    torch.float32: {"zero_mean": (2.0, 4.0), "any": (4.0, 8.0)},
}


def keep_factor(problem: Problem) -> Tensor | float:
    """Return 0 at dropped elements, else the scale, in x's shape; uses the oracle's Philox."""
    p = problem.keywords.get("dropout_p", 0.0)
    threshold = round(65536 * p)
    if threshold in (0, 65536):
        return 0.0 if threshold else 1.0
    shape = problem.tensors["x"].shape
    split = len(shape) - problem.dims
    return column_keep(
        problem.keywords["dropout_seed"],
        threshold,
        math.prod(shape[:split]),
        math.prod(shape[split:]),
        TAG,
    ).view(shape)


def column_keep(seed: int, threshold: int, rows: int, columns: int, tag: int) -> Tensor:
    """Return (rows, columns) float64: 0 or 65536 / (65536 - threshold)."""
    c = torch.arange(columns)
    group, slot = 4 * (c // 32) + (c % 8) // 2, 2 * ((c % 32) // 8) + c % 2
    row = torch.arange(rows)[:, None]
    counter = (group[None], row & 0xFFFFFFFF, row >> 32, torch.tensor(tag))
    words = oracle.philox(tuple(torch.broadcast_tensors(*counter)), seed)
    draws = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)])
    kept = draws.gather(0, slot[None, None].expand(1, rows, columns))[0] >= threshold
    return kept.double() * (65536.0 / (65536 - threshold))


def solve(problem: Problem, stored: Tensor | None) -> dict[str, oracle.Result]:
    """Return every result in float64 with its S; `stored` is our residual_out, the norm's input."""
    t = {n: v.double() for n, v in problem.tensors.items()}
    factor = keep_factor(problem)
    rms = problem.op == "rms_norm" or problem.keywords.get("kind") == "rms"
    work = torch.float64 if problem.dtype == torch.float64 else torch.float32
    ratio = torch.finfo(work).eps / torch.finfo(problem.coarse_dtype).eps
    out: dict[str, oracle.Result] = {}

    def put(name: str, value: Tensor, size: Tensor, gradient: bool, dtype: torch.dtype) -> None:
        # fp16's min subnormal is a rounding step in itself.
        floor = torch.full_like(size, 2.0**-24 if dtype == torch.float16 else 0.0)
        out[name] = oracle.Result(value, size, floor, gradient, dtype)

    h = t["x"]
    if problem.op == "add_norm":
        branch = torch.where(torch.as_tensor(factor) == 0, 0.0, t["x"] * factor)
        residual = t.get("residual", torch.zeros(()))
        put(
            "residual_out",
            branch + residual,
            branch.abs() + residual.abs() + 0 * branch,
            False,
            problem.stream_dtype,
        )
        h = out["residual_out"].value if stored is None else stored.detach().double()
    over = tuple(range(-problem.dims, 0))
    eps = problem.keywords.get("eps")
    if eps is None:
        eps = torch.finfo(problem.stream_dtype).eps if problem.op == "rms_norm" else 1e-5
    mean = torch.zeros(()) if rms else h.mean(over, keepdim=True)
    rstd = ((h - mean).square().mean(over, keepdim=True) + eps).rsqrt()
    xhat = (h - mean) * rstd
    m = 0.0 if rms else rstd * h.abs().mean(over, keepdim=True)
    weight, bias = t.get("weight", torch.ones(())), t.get("bias", torch.zeros(()))
    name = "normed" if problem.op == "add_norm" else "out"
    put(
        name,
        xhat * weight + bias,
        (xhat * weight).abs() + bias.abs() + ratio * weight.abs() * m,
        False,
        problem.dtype,
    )

    dy = t.get("grad_out", torch.zeros_like(h))
    stream = t.get("grad_residual_out", torch.zeros_like(h))
    g = dy * weight
    gx = (g * xhat).mean(over, keepdim=True)
    gm = torch.zeros(()) if rms else g.mean(over, keepdim=True)
    gx_size, gm_size = (g * xhat).abs().mean(over, keepdim=True), g.abs().mean(over, keepdim=True)
    dh = rstd * (g - gm - xhat * gx) + stream
    size = g.abs() + xhat.abs() * gx_size + ratio * m * (gx_size + xhat.abs() * gm_size)
    size = rstd * (size if rms else size + gm_size) + stream.abs()
    put("residual", dh, size, True, problem.stream_dtype)
    dropped = torch.as_tensor(factor) == 0
    put(
        "x",
        torch.where(dropped, 0.0, dh * factor),
        torch.where(dropped, 0.0, size * factor),
        True,
        problem.dtype,
    )
    lead = tuple(range(h.dim() - problem.dims))

    def over_rows(v: Tensor) -> Tensor:
        return v.sum(lead) if lead else v

    if "weight" in t:
        put(
            "weight",
            over_rows(dy * xhat),
            over_rows(dy.abs() * (xhat.abs() + ratio * m)),
            True,
            problem.tensors["weight"].dtype,
        )
    if "bias" in t:
        put("bias", over_rows(dy), over_rows(dy.abs()), True, problem.tensors["bias"].dtype)
    return out
