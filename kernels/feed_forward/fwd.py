# SPDX-License-Identifier: Apache-2.0
"""Feed-forward, forward: one kernel computes hidden; the library computes the second gemm.

    pre = x @ w1ᵀ + b1,  gate = x @ gate_weightᵀ + gate_bias    float32, one tile each in registers
    hidden = dropout(act(pre)), or dropout(act(gate) * pre)     in the epilogue, rounded to x's
                                                                dtype
    out = hidden @ w2ᵀ + b2                                     torch.mm

x (rows, d), weights (hidden, d) with any strides, hidden (rows, hidden). Grid: one flat dimension
over tiles of hidden, in groups of rows. pre and gate are stored, rounded to x's dtype, if backward
needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from .._lang import kernel, launch, narrow
from .tiles import (
    Shape,
    activate,
    choose,
    describe,
    drop,
    plus_bias,
    products,
    programs,
    steps,
    tile_of,
)


@kernel(do_not_specialize=["rows"])
def feed_forward_hidden(
    X, W1, B1, GATE_WEIGHT, GATE_BIAS, PRE, GATE, HIDDEN, rows, shape, dropout, C: tl.constexpr
):  # fmt: skip
    """Compute pre and gate, and store them if requested; or read them if the library computed the
    gemm.
    """
    _i_tile, i, n = tile_of(rows, shape.N, C)
    m = (i < rows)[:, None] & (n < shape.N)[None, :]
    here = i[:, None] * shape.N + n[None, :]
    if C.FUSED:
        b_pre, b_gate = products(X, W1, GATE_WEIGHT, rows, shape, i, n, C)
        b_pre = plus_bias(b_pre, B1, n, shape.N)
        b_gate = plus_bias(b_gate, GATE_BIAS, n, shape.N)
        if PRE is not None:
            tl.store(PRE + here, narrow(b_pre, PRE.dtype.element_ty), mask=m)
        if GATE is not None:
            tl.store(GATE + here, narrow(b_gate, GATE.dtype.element_ty), mask=m)
    else:
        b_pre = tl.load(PRE + here, mask=m, other=0.0).to(tl.float32)
        b_gate = b_pre
        if C.GATED:
            b_gate = tl.load(GATE + here, mask=m, other=0.0).to(tl.float32)
    if HIDDEN is not None:
        if C.GATED:
            b_hidden = activate(b_gate, C) * b_pre
        else:
            b_hidden = activate(b_pre, C)
        tl.store(
            HIDDEN + here, narrow(drop(b_hidden, i, n, dropout, C), HIDDEN.dtype.element_ty), mask=m
        )


def forward(a: Any, out: torch.Tensor, pre: torch.Tensor | None, gate: torch.Tensor | None) -> None:
    """Write out (rows, d_out), and pre and gate (rows, hidden) if given; a has x (rows, d)."""
    hidden = a.x.new_empty(a.x.shape[0], a.w1.shape[0])
    first_product(a, pre, gate, hidden)
    linear(hidden, a.w2, a.b2, out)


def first_product(
    a: Any,
    pre: torch.Tensor | None,
    gate: torch.Tensor | None,
    hidden: torch.Tensor | None,
    *,
    given: bool = False,
) -> None:
    """Write pre, gate and hidden, if they are given; pre and gate are inputs if ``given``."""
    rows, d = a.x.shape
    tile = choose("hidden", a, rows)
    fused = not given and not (tile.library and _biases_fit(a))
    if not given and not fused:
        pre = a.x.new_empty(rows, a.w1.shape[0]) if pre is None else pre
        linear(a.x, a.w1, a.b1, pre)
        if a.gate_weight is not None:
            gate = torch.empty_like(pre) if gate is None else gate
            linear(a.x, a.gate_weight, a.gate_bias, gate)
        if hidden is None:
            return
    dropout, kind = describe(a, tile, d, fused=fused)
    shape = Shape(d, a.w1.shape[0], a.x.stride(0), *steps(a.w1)[::-1], *steps(a.gate_weight)[::-1])
    launch(
        feed_forward_hidden, programs(rows, shape.N, tile), a.x.device, a.x, a.w1, a.b1,
        a.gate_weight, a.gate_bias, pre, gate,
        hidden, rows, shape, dropout, kind, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Compute out = x @ weightᵀ + bias with the library, which adds the bias in its epilogue if the
    dtypes agree.
    """
    if bias is not None and bias.dtype == x.dtype:
        torch.addmm(bias, x, weight.t(), out=out)
        return
    torch.mm(x, weight.t(), out=out)
    if bias is not None:
        out.copy_(out + bias)


def _biases_fit(a: Any) -> bool:
    return all(b is None or b.dtype == a.x.dtype for b in (a.b1, a.gate_bias))
