# SPDX-License-Identifier: Apache-2.0
"""Cross entropy backward: logits again, a chunk of rows at a time, and two products of their gradient.

    dz = p - q,  p = exp(z - m - l),  q = (1 - s) at the target + s / classes;  g = the row's upstream gradient, 0 where ignored
    dx = g (dz weight);  dweight = sum over rows of dzᵀ (g x);  dbias = sum over rows of g dz

dz is between -1 and 1 and stored in x's dtype, times 2^15 if that is float16, of which small probabilities would be nothing. g comes
after the product in dx, and into x for dweight, relative to the largest, so that no upstream scale is rounded away.
dweight is summed over the chunks in float32, in order.
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
def load_gradient(LOGITS, BIAS, TARGET, SPLIT_LSE, i, j, classes, p, C: tl.constexpr):
    """dz [ROWS, BN] in float32, 0 where the target is ignored and beyond the last row and class."""
    target = tl.load(TARGET + i, mask=i < p.rows, other=0)
    b_m = tl.load(SPLIT_LSE + i, mask=i < p.rows, other=float("inf"))
    b_log = tl.load(SPLIT_LSE + p.all_rows + i, mask=i < p.rows, other=0.0)
    b_z = load_logits(LOGITS, BIAS, i, j, classes, p)
    b_dz = tl.exp2((b_z - b_m[:, None] - b_log[:, None]) * LOG2E) - tl.where(j[None, :] == target[:, None], p.on_target, 0.0)
    if C.SMOOTH:
        b_dz -= p.on_each / classes
    return tl.where(((target != p.ignore_index) & (i < p.rows))[:, None] & (j < classes)[None, :], b_dz, 0.0)


@kernel
def cross_entropy_backward(LOGITS, BIAS, TARGET, SPLIT_LSE, DZ, classes, p, C: tl.constexpr):
    """dz of ROWS rows and BN classes, as stored; DZ may be LOGITS."""
    blocks = tl.cdiv(classes, C.BN)
    i = rows_of(tl.program_id(0) // blocks, C)
    j = tl.program_id(0) % blocks * C.BN + tl.arange(0, C.BN)
    b_dz = load_gradient(LOGITS, BIAS, TARGET, SPLIT_LSE, i, j, classes, p, C) * C.SCALE
    m = (i < p.rows)[:, None] & (j < classes)[None, :]
    tl.store(DZ + i[:, None] * classes + j[None, :], narrow(b_dz, DZ.dtype.element_ty), mask=m)


@kernel
def cross_entropy_backward_bias(LOGITS, BIAS, TARGET, SPLIT_LSE, G, DBIAS, classes, p, C: tl.constexpr):
    """DBIAS += sum over a chunk's rows of g dz, for BN classes; dz not rounded to 16 bits."""
    j = tl.program_id(0) * C.BN + tl.arange(0, C.BN)
    b_sum = tl.full([C.ROWS, C.BN], 0.0, tl.float32)
    for t in range(tl.cdiv(p.rows, C.ROWS)):
        i = rows_of(t, C)
        b_dz = load_gradient(LOGITS, BIAS, TARGET, SPLIT_LSE, i, j, classes, p, C)
        b_sum += b_dz * tl.load(G + i, mask=i < p.rows, other=0.0)[:, None]
    b_sum = tl.load(DBIAS + j, mask=j < classes, other=0.0) + tl.sum(b_sum, 0)
    tl.store(DBIAS + j, b_sum, mask=j < classes)


def backward(
    a: Any,
    g: torch.Tensor,
    split_lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    """Write those of dx (rows, d), d_weight (float32) and d_bias (float32, zeros before) that are given, of the op's arguments with x
    (rows, d) and target (rows,); g is the upstream gradient of each row's loss, float32, 0 where the target is ignored."""
    (rows, d), classes, device = a.x.shape, a.weight.shape[0], a.x.device
    config, bias_tile = (tile(kernel, classes, device) for kernel in ("backward", "bias"))
    p, kind = describe(a, config, HALF_SCALE if a.x.dtype == torch.float16 else 1.0)
    _, sums = describe(a, bias_tile)
    step = min(rows, chunk_rows(classes))
    logits = torch.empty(step, classes, dtype=torch.float32, device=device)
    dz = logits if a.x.dtype == torch.float32 else torch.empty(step, classes, dtype=a.x.dtype, device=device)
    dx_part = None if dx is None else torch.empty(step, d, dtype=torch.float32, device=device)
    dw_part = None
    if d_weight is not None and rows > step:
        dw_part = torch.empty(min(classes, part_rows(d)), d, dtype=torch.float32, device=device)
    most = g.abs().max() if rows else g.sum()
    share = torch.where(most > 0, g / most, 0.0)
    valid = (a.target != a.ignore_index)[:, None]
    for part in chunks(rows, step):
        x, n = a.x[part], len(a.x[part])
        logits_of(a, x, logits)
        given = logits, a.bias, a.target[part], split_lse[0, part]
        p = p._replace(rows=n)
        if d_bias is not None:
            launch(
                cross_entropy_backward_bias, -(-classes // sums.BN), device, *given, g[part], d_bias, classes, p, sums,
                warps=bias_tile.warps, stages=1,
            )  # fmt: skip
        if dx is None and d_weight is None:
            continue
        launch(
            cross_entropy_backward, -(-n // kind.ROWS) * -(-classes // kind.BN), device, *given, dz, classes, p, kind,
            warps=config.warps, stages=1,
        )  # fmt: skip
        if dx is not None:
            float_gemm(dz[:n], a.weight, dx_part[:n])
            dx[part] = torch.where(valid[part], dx_part[:n] * (g[part] / kind.SCALE)[:, None], 0.0)
        if d_weight is not None:
            x = torch.where(valid[part], x * share[part, None], 0.0).to(x.dtype)  # an ignored row may hold NaN
            if dw_part is None or part.start == 0:
                float_gemm(dz[:n].t(), x, d_weight)
            else:
                for some in chunks(classes, len(dw_part)):
                    d_weight[some] += float_gemm(dz[:n, some].t(), x, dw_part[: len(d_weight[some])])
    if d_weight is not None:
        d_weight *= most / kind.SCALE
