"""Cross entropy backward: logits again, a chunk of rows at a time, and two products of their gradient.

    dz = p - q,  p = exp(z - lse),  q = (1 - s) at the target + s / classes;  g = the row's upstream gradient, 0 where ignored
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

from .._lang import LOG2E, launch, narrow
from .chunks import Kind, Problem, chunks, load_logits, logits_of, product
from .configs import BIAS, chunk_rows, tile

HALF_SCALE = 2.0**15  # float16 ends at 2^16


@triton.jit(do_not_specialize=["p"])
def cross_entropy_backward(LOGITS, BIAS, TARGET, LSE, DZ, classes, p, C: tl.constexpr):
    """dz of BN classes of one row; DZ may be LOGITS."""
    blocks = tl.cdiv(classes, C.BN)
    i = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * C.BN + tl.arange(0, C.BN)
    row = i.to(tl.int64) * classes
    target = tl.load(TARGET + i)
    b_z = load_logits(LOGITS + row, BIAS, j, classes)
    b_dz = tl.exp2((b_z - tl.load(LSE + i)) * LOG2E) - tl.where(j == target, p.on_target, 0.0)
    if C.SMOOTH:
        b_dz -= p.on_each / classes
    b_dz = tl.where(target == p.ignore_index, 0.0, b_dz * C.SCALE)
    tl.store(DZ + row + j, narrow(b_dz, DZ.dtype.element_ty), mask=j < classes)


@triton.jit(do_not_specialize=["rows"])
def cross_entropy_backward_bias(DZ, G, DBIAS, classes, rows, ROWS: tl.constexpr, BN: tl.constexpr):
    """DBIAS += sum over a chunk's rows of g dz, for BN classes."""
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    b_sum = tl.full([ROWS, BN], 0.0, tl.float32)
    for i0 in range(0, rows, ROWS):
        i = i0 + tl.arange(0, ROWS)
        m = (i < rows)[:, None] & (j < classes)[None, :]
        b_dz = tl.load(DZ + i.to(tl.int64)[:, None] * classes + j[None, :], mask=m, other=0.0).to(tl.float32)
        b_sum += b_dz * tl.load(G + i, mask=i < rows, other=0.0)[:, None]
    b_sum = tl.load(DBIAS + j, mask=j < classes, other=0.0) + tl.sum(b_sum, 0)
    tl.store(DBIAS + j, b_sum, mask=j < classes)


def backward(
    a: Any,
    g: torch.Tensor,
    lse: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
    d_bias: torch.Tensor | None,
) -> None:
    """Write those of dx (rows, d), d_weight and d_bias (both float32, zeros before) that are given, of the op's arguments with x
    (rows, d) and target (rows,); g is the upstream gradient of each row's loss, float32, 0 where the target is ignored."""
    (rows, d), classes, device = a.x.shape, a.weight.shape[0], a.x.device
    config, wanted = tile(classes, backward=True), (dx, d_weight, d_bias)
    kind = Kind(config.BN, a.label_smoothing > 0.0, HALF_SCALE if a.x.dtype == torch.float16 else 1.0)
    p = Problem(a.ignore_index, 1.0 - a.label_smoothing, a.label_smoothing)
    step = min(rows, chunk_rows(classes))
    logits = torch.empty(step, classes, dtype=torch.float32, device=device)
    dz = logits if a.x.dtype == torch.float32 else torch.empty(step, classes, dtype=a.x.dtype, device=device)
    dx_part = None if dx is None else torch.empty(step, d, dtype=torch.float32, device=device)
    dw_part = None if d_weight is None or rows <= step else torch.empty_like(d_weight)
    most = g.abs().max() if rows else g.sum()
    share = torch.where(most > 0, g / most, 0.0)
    valid = (a.target != a.ignore_index)[:, None]
    for part in chunks(rows, classes):
        x, n = a.x[part], len(a.x[part])
        logits_of(a, x, logits)
        launch(
            cross_entropy_backward, n * -(-classes // config.BN), device, logits, a.bias, a.target[part], lse[part], dz, classes,
            p, kind, warps=config.warps, stages=1,
        )  # fmt: skip
        if dx is not None:
            product(dz[:n], a.weight, dx_part[:n])
            dx[part] = torch.where(valid[part], dx_part[:n] * (g[part] / kind.SCALE)[:, None], 0.0)
        if d_weight is not None:
            x = torch.where(valid[part], x * share[part, None], 0.0).to(x.dtype)  # an ignored row may hold NaN
            product(dz[:n].t(), x, d_weight if dw_part is None else dw_part)
            if dw_part is not None:
                d_weight += dw_part
        if d_bias is not None:
            launch(
                cross_entropy_backward_bias, -(-classes // BIAS.BN), device, dz, g[part], d_bias, classes, n, BIAS.ROWS, BIAS.BN,
                warps=BIAS.warps, stages=1,
            )  # fmt: skip
    if d_weight is not None:
        d_weight *= most / kind.SCALE
    if d_bias is not None:
        d_bias /= kind.SCALE
