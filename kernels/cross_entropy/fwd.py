"""Cross entropy forward, of logits that exist a chunk of rows at a time.

    z = x weightᵀ + bias;  lse = log sum exp z;  loss = lse - (1 - s) z_target - s mean(z),  0 where the target is ignored

The product is the library's, with a float32 result; one program then reads each row of it once, with the maximum and the sum
kept as it goes (online softmax). Source of the chunks: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training"
(2024), section 3.2; there logits and their gradient have x's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._lang import LN2, LOG2E, launch
from .chunks import Kind, Problem, chunks, load_logits, logits_of
from .configs import chunk_rows, tile


@triton.jit(do_not_specialize=["p"])
def cross_entropy_forward(LOGITS, BIAS, TARGET, LOSS, LSE, classes, p, C: tl.constexpr):
    """loss and lse of one row."""
    i = tl.program_id(0)
    LOGITS += i.to(tl.int64) * classes
    b_m = tl.full([], float("-inf"), tl.float32)
    b_l = tl.full([], 0.0, tl.float32)
    b_sum = tl.full([], 0.0, tl.float32)
    for t in range(tl.cdiv(classes, C.BN)):
        j = t * C.BN + tl.arange(0, C.BN)
        b_z = load_logits(LOGITS, BIAS, j, classes)
        b_top = tl.maximum(b_m, tl.max(b_z, 0))
        safe = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_l = b_l * tl.exp2((b_m - safe) * LOG2E) + tl.sum(tl.exp2((b_z - safe) * LOG2E), 0)
        b_m = b_top
        if C.SMOOTH:
            b_sum += tl.sum(tl.where(j < classes, b_z, 0.0), 0)
    b_lse = b_m + tl.log2(b_l) * LN2
    target = tl.load(TARGET + i)
    k = tl.minimum(tl.maximum(target, 0), classes - 1)  # values are checked elsewhere; here no address leaves the row
    b_loss = b_lse - load_target(LOGITS, BIAS, k) * p.on_target
    if C.SMOOTH:
        b_loss -= p.on_each * (b_sum / classes)
    tl.store(LOSS + i, tl.where(target == p.ignore_index, 0.0, b_loss))
    tl.store(LSE + i, b_lse)


@triton.jit
def load_target(LOGITS, BIAS, k):
    b_z = tl.load(LOGITS + k)
    if BIAS is not None:
        b_z += tl.load(BIAS + k).to(tl.float32)
    return b_z


def forward(a: Any, losses: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the loss and lse of every row, (rows,) float32, of the op's arguments with x (rows, d) and target (rows,)."""
    (rows, _), classes = a.x.shape, a.weight.shape[0]
    config = tile(classes)
    kind = Kind(config.BN, SMOOTH=a.label_smoothing > 0.0)
    p = Problem(a.ignore_index, 1.0 - a.label_smoothing, a.label_smoothing)
    buffer = torch.empty(min(rows, chunk_rows(classes)), classes, dtype=torch.float32, device=a.x.device)
    for part in chunks(rows, classes):
        logits = logits_of(a, a.x[part], buffer)
        launch(
            cross_entropy_forward, len(logits), a.x.device, logits, a.bias, a.target[part], losses[part], lse[part], classes, p,
            kind, warps=config.warps, stages=1,
        )  # fmt: skip
