# SPDX-License-Identifier: Apache-2.0
"""Cross entropy forward, for logits that exist in chunks of rows.

    z = x weightᵀ + bias;  m = max z;  l = log sum exp(z - m)
    loss = l - (1 - s) (z_target - m) - s (mean(z) - m),  0 where the target is ignored

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

from .._lang import LN2, LOG2E, kernel, launch
from .chunks import describe, load_logits, logits_of, rows_of
from .configs import chunk_rows, tile


@kernel
def cross_entropy_forward(LOGITS, BIAS, TARGET, LOSS, SPLIT_LSE, classes, p, C: tl.constexpr):
    """Write loss, row_max and log_sum of ROWS rows."""
    i = rows_of(tl.program_id(0), C)
    m_i = i < p.rows
    b_m = tl.full([C.ROWS], float("-inf"), tl.float32)
    b_l = tl.full([C.ROWS], 0.0, tl.float32)
    b_sum = tl.full([C.ROWS], 0.0, tl.float32)
    for t in range(tl.cdiv(classes, C.BN)):
        j = t * C.BN + tl.arange(0, C.BN)
        b_z = load_logits(LOGITS, BIAS, i, j, classes, p)
        b_top = tl.maximum(b_m, tl.max(b_z, 1))
        safe = tl.where(b_top == float("-inf"), 0.0, b_top)
        b_l = b_l * tl.exp2((b_m - safe) * LOG2E) + tl.sum(
            tl.exp2((b_z - safe[:, None]) * LOG2E), 1
        )
        b_m = b_top
        if C.SMOOTH:
            b_sum += tl.sum(tl.where((j < classes)[None, :], b_z, 0.0), 1)
    b_log = tl.log2(b_l) * LN2
    target = tl.load(TARGET + i, mask=m_i, other=0)
    # clamp: the caller checks values; here no address leaves the row
    k = tl.minimum(tl.maximum(target, 0), classes - 1)
    b_z = tl.load(LOGITS + i * classes + k, mask=m_i, other=0.0)
    if BIAS is not None:
        b_z += tl.load(BIAS + k, mask=m_i, other=0.0).to(tl.float32)
    b_loss = b_log - (b_z - b_m) * p.on_target
    if C.SMOOTH:
        b_loss -= p.on_each * (b_sum / classes - b_m)
    tl.store(LOSS + i, tl.where(target == p.ignore_index, 0.0, b_loss), mask=m_i)
    tl.store(SPLIT_LSE + i, b_m, mask=m_i)
    tl.store(SPLIT_LSE + p.all_rows + i, b_log, mask=m_i)


def forward(a: Any, losses: torch.Tensor, split_lse: torch.Tensor) -> None:
    """Write each row's loss (rows,) and split lse (2, rows), float32. a has x (rows, d) and target
    (rows,).
    """
    (rows, _), classes = a.x.shape, a.weight.shape[0]
    config = tile("forward", classes, a.x.device)
    p, kind = describe(a, config)
    step = chunk_rows(classes)
    buffer = torch.empty(min(rows, step), classes, dtype=torch.float32, device=a.x.device)
    for part in chunks(rows, step):
        logits = logits_of(a, a.x[part], buffer)
        launch(
            cross_entropy_forward, -(-len(logits) // kind.ROWS), a.x.device, logits, a.bias,
            a.target[part], losses[part],
            split_lse[0, part], classes, p._replace(rows=len(logits)), kind, warps=config.warps,
            stages=1,
        )  # fmt: skip
