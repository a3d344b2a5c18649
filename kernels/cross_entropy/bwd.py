# SPDX-License-Identifier: Apache-2.0
"""Cross entropy backward: recompute logits in chunks of rows, then two gemms with their gradient.

    dz = p - q,  p = exp(z - m - l),  q = (1 - s) at the target + s / classes
    g = the row's upstream gradient, 0 where ignored
    dx = g (dz weight);  dweight = sum over rows of dzᵀ (g x);  dbias = sum over rows of g dz

With class weights w or a z-loss, dz = P p - Q w q: `row_factors` returns g P and g Q, and g is a
power of two of their size. With a softcap, dz (1 - (z / cap)²) replaces dz.

dz is between -1 and 1 and stored in x's dtype, times 2^15 for float16, where small probabilities
would underflow. g is applied after the gemm in dx, and to x in dweight, relative to its largest
value, so that no upstream scale is rounded away. dweight is summed over the chunks in float32, in
order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pytransformer.ops._problem.cross_entropy import chunks, float_gemm

from .._lang import LOG2E, kernel, launch, narrow
from .chunks import describe, load_logits, logits_of, rows_of
from .configs import chunk_rows, part_rows, tile

HALF_SCALE = 2.0**15  # float16 ends at 2^16


@triton.jit
def load_gradient(
    LOGITS, BIAS, CLASS_WEIGHT, P_FACTOR, Q_FACTOR, TARGET, SPLIT_LSE, i, j, classes, p,
    C: tl.constexpr,
):  # fmt: skip
    """Return dz [ROWS, BN] in float32; 0 for ignored targets and past the last row and class."""
    target = tl.load(TARGET + i, mask=i < p.rows, other=0)
    b_m = tl.load(SPLIT_LSE + i, mask=i < p.rows, other=float("inf"))
    b_log = tl.load(SPLIT_LSE + p.all_rows + i, mask=i < p.rows, other=0.0)
    b_z = load_logits(LOGITS, BIAS, i, j, classes, p, C)
    b_p = tl.exp2((b_z - b_m[:, None] - b_log[:, None]) * LOG2E)
    b_q = tl.where(j[None, :] == target[:, None], p.on_target, 0.0)
    if P_FACTOR is None:
        b_dz = b_p - b_q
        if C.SMOOTH:
            b_dz -= p.on_each / classes
    else:
        if C.SMOOTH:
            b_q += p.on_each / classes
        if CLASS_WEIGHT is not None:
            b_q *= tl.load(CLASS_WEIGHT + j, mask=j < classes, other=0.0)[None, :]
        b_p *= tl.load(P_FACTOR + i, mask=i < p.rows, other=0.0)[:, None]
        b_dz = b_p - b_q * tl.load(Q_FACTOR + i, mask=i < p.rows, other=0.0)[:, None]
    if C.SOFTCAP > 0:
        b_t = b_z / C.SOFTCAP
        b_dz *= (1.0 - b_t) * (1.0 + b_t)
    return tl.where(
        ((target != p.ignore_index) & (i < p.rows))[:, None] & (j < classes)[None, :], b_dz, 0.0
    )


@kernel
def cross_entropy_backward(
    LOGITS, BIAS, CLASS_WEIGHT, P_FACTOR, Q_FACTOR, TARGET, SPLIT_LSE, DZ, classes, p,
    C: tl.constexpr,
):  # fmt: skip
    """Write dz of ROWS rows and BN classes, as stored; DZ may be LOGITS."""
    blocks = tl.cdiv(classes, C.BN)
    i = rows_of(tl.program_id(0) // blocks, C)
    j = tl.program_id(0) % blocks * C.BN + tl.arange(0, C.BN)
    b_dz = load_gradient(
        LOGITS, BIAS, CLASS_WEIGHT, P_FACTOR, Q_FACTOR, TARGET, SPLIT_LSE, i, j, classes, p, C
    )
    b_dz *= C.SCALE
    m = (i < p.rows)[:, None] & (j < classes)[None, :]
    tl.store(DZ + i[:, None] * classes + j[None, :], narrow(b_dz, DZ.dtype.element_ty), mask=m)


@kernel
def cross_entropy_backward_bias(
    LOGITS, BIAS, CLASS_WEIGHT, P_FACTOR, Q_FACTOR, TARGET, SPLIT_LSE, G, DBIAS, classes, p,
    C: tl.constexpr,
):  # fmt: skip
    """DBIAS += sum over a chunk's rows of g dz, for BN classes, without rounding dz to 16 bits."""
    j = tl.program_id(0) * C.BN + tl.arange(0, C.BN)
    b_sum = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    for t in range(tl.cdiv(p.rows, C.ROWS)):
        i = rows_of(t, C)
        b_dz = load_gradient(
            LOGITS, BIAS, CLASS_WEIGHT, P_FACTOR, Q_FACTOR, TARGET, SPLIT_LSE, i, j, classes, p, C
        )
        b_sum += b_dz * tl.load(G + i, mask=i < p.rows, other=0.0)[:, None]
    b_sum = tl.load(DBIAS + j, mask=j < classes, other=0.0) + tl.sum(b_sum, 0)
    tl.store(DBIAS + j, b_sum, mask=j < classes)


def backward(
    a: Any,
    g: torch.Tensor,
    p_factor: torch.Tensor | None,
    split_lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    """Write dx (rows, d), d_weight and d_bias (float32, initially zeros), if given.

    a has x (rows, d) and target (rows,). g and p_factor are those of `row_factors`, float32.
    """
    (rows, d), classes, device = a.x.shape, a.weight.shape[0], a.x.device
    config, bias_tile = (tile(kernel, classes, device) for kernel in ("backward", "bias"))
    p, kind = describe(a, config, HALF_SCALE if a.x.dtype == torch.float16 else 1.0)
    _, sums = describe(a, bias_tile)
    step = min(rows, chunk_rows(classes))
    logits = torch.empty(step, classes, dtype=torch.float32, device=device)
    dz = (
        logits
        if a.x.dtype == torch.float32
        else torch.empty(step, classes, dtype=a.x.dtype, device=device)
    )
    dx_part = None if dx is None else torch.empty(step, d, dtype=torch.float32, device=device)
    dw_part, total = None, d_weight
    if d_weight is not None and d_weight.dtype != torch.float32:
        total = torch.empty(classes, d, dtype=torch.float32, device=device)
    if d_weight is not None and rows > step:
        dw_part = torch.empty(min(classes, part_rows(d)), d, dtype=torch.float32, device=device)
    g, factors = _relative(g, p_factor, a.class_weight)
    most = g.abs().max() if rows else g.sum()
    share = torch.where(most > 0, g / most, 0.0)
    valid = (a.target != a.ignore_index)[:, None]
    for part in chunks(rows, step):
        x, n = a.x[part], len(a.x[part])
        logits_of(a, x, logits)
        given = (
            logits, a.bias, a.class_weight, *(None if f is None else f[part] for f in factors),
            a.target[part], split_lse[0, part],
        )  # fmt: skip
        p = p._replace(rows=n)
        if d_bias is not None:
            launch(
                cross_entropy_backward_bias, -(-classes // sums.BN), device, *given, g[part],
                d_bias, classes, p, sums,
                warps=bias_tile.warps, stages=1,
            )  # fmt: skip
        if dx is None and d_weight is None:
            continue
        launch(
            cross_entropy_backward, -(-n // kind.ROWS) * -(-classes // kind.BN), device, *given, dz,
            classes, p, kind,
            warps=config.warps, stages=1,
        )  # fmt: skip
        if dx is not None:
            float_gemm(dz[:n], a.weight, dx_part[:n])
            dx[part] = torch.where(valid[part], dx_part[:n] * (g[part] / kind.SCALE)[:, None], 0.0)
        if d_weight is not None:
            # Select, because an ignored row may contain NaN.
            x = torch.where(valid[part], x * share[part, None], 0.0).to(x.dtype)
            if dw_part is None or part.start == 0:
                float_gemm(dz[:n].t(), x, total)
            else:
                for some in chunks(classes, len(dw_part)):
                    total[some] += float_gemm(dz[:n, some].t(), x, dw_part[: len(total[some])])
    if d_weight is not None:
        torch.mul(total, most / kind.SCALE, out=d_weight)


def _relative(
    g: torch.Tensor, p_factor: torch.Tensor | None, class_weight: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return (g, (P, Q)), where P p - Q w q is between -1 and 1, and (g, (None, None)) without P.

    The new g is a power of two, so no digit changes except in factors that become subnormal.
    """
    if p_factor is None:
        return g, (None, None)
    largest = g.abs() if class_weight is None else g.abs() * class_weight.abs().max()
    exponent = torch.frexp(torch.maximum(p_factor.abs(), largest)).exponent.clamp(-100, 100)
    size = torch.ldexp(torch.ones_like(g), exponent)
    return size, (p_factor / size, g / size)
