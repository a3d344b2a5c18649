# SPDX-License-Identifier: Apache-2.0
"""Feed-forward, backward: the gemm's epilogue applies dropout, gate and activation to d_hidden.

    d_hidden = dropout(d_out @ w2);   d_pre = d_hidden * act'(pre)
    gated: d_pre = d_hidden * act(gate),  d_gate = d_hidden * pre * act'(gate)
    d_x = d_pre @ w1 (+ d_gate @ gate_weight),  d_w1 = d_preᵀ @ x
    d_gate_weight = d_gateᵀ @ x,  d_w2 = d_outᵀ @ hidden
    over rows: d_b1 = sum of d_pre,  d_gate_bias = sum of d_gate,  d_b2 = sum of d_out

One kernel writes d_pre, d_gate, hidden (recomputed from pre) and each row tile's partial bias
gradients, which are summed in a fixed order. The library computes the other gemms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .._lang import kernel, launch, narrow
from .fwd import first_product
from .tiles import (
    Shape,
    activate,
    choose,
    describe,
    drop,
    products,
    programs,
    slope,
    steps,
    tile_of,
)


@kernel(do_not_specialize=["rows"])
def feed_forward_d_hidden(
    D_OUT, W2, D_HIDDEN, PRE, GATE, D_PRE, D_GATE, HIDDEN, D_B1, D_GATE_BIAS, rows, shape, dropout,
    C: tl.constexpr
):  # fmt: skip
    i_tile, i, n = tile_of(rows, shape.N, C)
    m = (i < rows)[:, None] & (n < shape.N)[None, :]
    here = i[:, None] * shape.N + n[None, :]
    if C.FUSED:
        b_dh, _none = products(D_OUT, W2, None, rows, shape, i, n, C)
    else:
        b_dh = tl.load(D_HIDDEN + here, mask=m, other=0.0).to(tl.float32)
    b_dh = drop(b_dh, i, n, dropout, C)
    b_pre = tl.load(PRE + here, mask=m, other=0.0).to(tl.float32)
    if C.GATED:
        b_gate = tl.load(GATE + here, mask=m, other=0.0).to(tl.float32)
        b_act = activate(b_gate, C)
        b_hidden = b_act * b_pre
        b_dpre = b_dh * b_act
        b_dgate = b_dh * b_pre * slope(b_gate, C)
        tl.store(D_GATE + here, narrow(b_dgate, D_GATE.dtype.element_ty), mask=m)
        if D_GATE_BIAS is not None:
            store_sum(D_GATE_BIAS, b_dgate, m, i_tile, n, shape.N)
    else:
        b_hidden = activate(b_pre, C)
        b_dpre = b_dh * slope(b_pre, C)
    tl.store(D_PRE + here, narrow(b_dpre, D_PRE.dtype.element_ty), mask=m)
    if D_B1 is not None:
        store_sum(D_B1, b_dpre, m, i_tile, n, shape.N)
    if HIDDEN is not None:
        tl.store(
            HIDDEN + here, narrow(drop(b_hidden, i, n, dropout, C), HIDDEN.dtype.element_ty), mask=m
        )


@triton.jit
def store_sum(P, b_x, m, i_tile, n, N):
    """Store row i_tile of P: the column sums over this tile's rows."""
    tl.store(P + i_tile.to(tl.int64) * N + n, tl.sum(tl.where(m, b_x, 0.0), 0), mask=n < N)


def backward(
    a: Any,
    d_out: torch.Tensor,
    pre: torch.Tensor | None,
    gate: torch.Tensor | None,
    wanted: dict[str, torch.Tensor],
) -> None:
    """Write the gradients in ``wanted``, keyed by the op's argument names.

    x and d_out are matrices; d_out's last dimension is contiguous. If pre and gate are None, they
    are recomputed.
    """
    size = a.x.shape[0], a.w1.shape[0]
    if "b2" in wanted:
        wanted["b2"].copy_(d_out.sum(0, dtype=torch.float32))
    if wanted.keys() <= {"b2"}:
        return
    if pre is None:
        pre = a.x.new_empty(size)
        gate = None if a.gate_weight is None else a.x.new_empty(size)
        first_product(a, pre, gate, None)
    hidden = a.x.new_empty(size) if "w2" in wanted else None
    if wanted.keys() <= {"b2", "w2"}:
        first_product(a, pre, gate, hidden, given=True)
    else:
        d_pre = a.x.new_empty(size)
        d_gate = None if gate is None else a.x.new_empty(size)
        _second_product(a, d_out, pre, gate, d_pre, d_gate, hidden, wanted)
        if "x" in wanted:
            torch.mm(d_pre, a.w1, out=wanted["x"])
            if d_gate is not None:
                wanted["x"].addmm_(d_gate, a.gate_weight)
        if "w1" in wanted:
            torch.mm(d_pre.t(), a.x, out=wanted["w1"])
        if "gate_weight" in wanted:
            torch.mm(d_gate.t(), a.x, out=wanted["gate_weight"])
    if "w2" in wanted:
        torch.mm(d_out.t(), hidden, out=wanted["w2"])


def _second_product(
    a: Any,
    d_out: torch.Tensor,
    pre: torch.Tensor,
    gate: torch.Tensor | None,
    d_pre: torch.Tensor,
    d_gate: torch.Tensor | None,
    hidden: torch.Tensor | None,
    wanted: dict[str, torch.Tensor],
) -> None:
    """Compute d_pre, d_gate, hidden, and the bias gradients."""
    rows, columns = pre.shape
    tile = choose("d_hidden", a, rows)
    d_hidden = torch.mm(d_out, a.w2) if tile.library else None
    dropout, kind = describe(a, tile, d_out.shape[1], fused=not tile.library)
    shape = Shape(d_out.shape[1], columns, d_out.stride(0), *steps(a.w2), 0, 0)
    tiles = -(-rows // tile.BM)
    parts = {
        name: torch.empty(tiles, columns, device=a.x.device)
        for name in ("b1", "gate_bias")
        if name in wanted
    }
    launch(
        feed_forward_d_hidden, programs(rows, columns, tile), a.x.device, d_out, a.w2, d_hidden,
        pre, gate, d_pre, d_gate, hidden,
        parts.get("b1"), parts.get("gate_bias"), rows, shape, dropout, kind, warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip
    for name, part in parts.items():
        wanted[name].copy_(part.sum(0))
