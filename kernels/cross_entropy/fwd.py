# SPDX-License-Identifier: Apache-2.0
"""Cross entropy forward, for logits that exist in chunks of rows.

    u = x weightᵀ + bias;  z = cap tanh(u / cap) with a softcap, else u
    m = max z;  l = log sum exp(z - m)
    loss = (1 - s) w_target (l - z_target + m) + s (mean(w) (l + m) - mean(w z))
    correct = (the first largest z is the target's);  both are 0 where the target is ignored

w is 1 without class weights. The caller adds the z-loss, which needs m + l only.


m and l are saved separately: m + l loses digits of l if all logits share a large offset.

The library computes the gemm with a float32 result. One program then reads its rows once with an
online softmax. Source of the chunks: Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM
Training" (2024), section 3.2, where logits and their gradient have x's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from pytransformer.ops._problem.cross_entropy import chunks

from .._lang import LN2, LOG2E, kernel, launch, tanh
from .chunks import describe, load_logits, logits_of, rows_of
from .configs import chunk_rows, tile


@kernel
def cross_entropy_forward(
    LOGITS, BIAS, CLASS_WEIGHT, MEAN_WEIGHT, TARGET, LOSS, SPLIT_LSE, CORRECT, classes, p,
    C: tl.constexpr,
):  # fmt: skip
    """Write loss, row_max and log_sum of ROWS rows, and correct if CORRECT is not None."""
    i = rows_of(tl.program_id(0), C)
    m_i = i < p.rows
    b_m = tl.full([C.ROWS], float("-inf"), tl.float32)
    b_l = tl.full([C.ROWS], 0.0, tl.float32)
    b_sum = tl.full([C.ROWS], 0.0, tl.float32)
    b_best = tl.full([C.ROWS], 0, tl.int32)  # first class with the largest logit
    for t in range(tl.cdiv(classes, C.BN)):
        j = t * C.BN + tl.arange(0, C.BN)
        b_z = load_logits(LOGITS, BIAS, i, j, classes, p, C)
        b_top = tl.maximum(b_m, tl.max(b_z, 1))
        if CORRECT is not None:
            b_first = t * C.BN + tl.argmax(b_z, 1, tie_break_left=True)
            b_best = tl.where(b_top > b_m, b_first, b_best)
        safe = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_l = b_l * tl.exp2((b_m - safe) * LOG2E) + tl.sum(
            tl.exp2((b_z - safe[:, None]) * LOG2E), 1
        )
        b_m = b_top
        if C.SMOOTH:
            b_w = tl.where((j < classes)[None, :], b_z, 0.0)
            if CLASS_WEIGHT is not None:
                b_w *= tl.load(CLASS_WEIGHT + j, mask=j < classes, other=0.0)[None, :]
            b_sum += tl.sum(b_w, 1)
    b_log = tl.log2(b_l) * LN2
    target = tl.load(TARGET + i, mask=m_i, other=0)
    # clamp: the caller checks values; here no address leaves the row
    k = tl.minimum(tl.maximum(target, 0), classes - 1)
    b_z = tl.load(LOGITS + i * classes + k, mask=m_i, other=0.0)
    if BIAS is not None:
        b_z += tl.load(BIAS + k, mask=m_i, other=0.0).to(tl.float32)
    if C.SOFTCAP > 0:
        b_z = C.SOFTCAP * tanh(b_z / C.SOFTCAP)
    if CLASS_WEIGHT is not None:
        b_w = tl.load(CLASS_WEIGHT + k, mask=m_i, other=0.0)
        b_loss = (b_log - (b_z - b_m)) * p.on_target * b_w
        if C.SMOOTH:
            mean = tl.load(MEAN_WEIGHT)
            b_loss += p.on_each * (mean * b_log - (b_sum / classes - mean * b_m))
    else:
        b_loss = b_log - (b_z - b_m) * p.on_target
        if C.SMOOTH:
            b_loss -= p.on_each * (b_sum / classes - b_m)
    if CORRECT is not None:
        b_correct = (target != p.ignore_index) & (b_best == k)
        tl.store(CORRECT + i, tl.where(b_correct, 1.0, 0.0), mask=m_i)
    tl.store(LOSS + i, tl.where(target == p.ignore_index, 0.0, b_loss), mask=m_i)
    tl.store(SPLIT_LSE + i, b_m, mask=m_i)
    tl.store(SPLIT_LSE + p.all_rows + i, b_log, mask=m_i)


def forward(
    a: Any, losses: torch.Tensor, split_lse: torch.Tensor, correct: torch.Tensor | None
) -> None:
    """Write each row's loss (rows,), split lse (2, rows) and correct (rows,), float32.

    a has x (rows, d) and target (rows,).
    """
    (rows, _), classes = a.x.shape, a.weight.shape[0]
    config = tile("forward", classes, a.x.device)
    p, kind = describe(a, config)
    step = chunk_rows(classes)
    mean_weight = None if a.class_weight is None else a.class_weight.mean()
    buffer = torch.empty(min(rows, step), classes, dtype=torch.float32, device=a.x.device)
    for part in chunks(rows, step):
        logits = logits_of(a, a.x[part], buffer)
        launch(
            cross_entropy_forward, -(-len(logits) // kind.ROWS), a.x.device, logits, a.bias,
            a.class_weight, mean_weight, a.target[part], losses[part], split_lse[0, part],
            None if correct is None else correct[part], classes, p._replace(rows=len(logits)), kind,
            warps=config.warps, stages=1,
        )  # fmt: skip
