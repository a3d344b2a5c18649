# SPDX-License-Identifier: Apache-2.0
"""The feed-forward network: public function and raw op; see docs/ops/feed_forward.md."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..reference._feed_forward import ACTIVATIONS, feed_forward_forward
from ._backends.cpu import feed_forward as cpu
from ._backends.cuda import feed_forward as cuda
from ._backends.triton import feed_forward as triton
from ._core import fast_path
from ._core.autograd import needs_gradient
from ._core.op import Op
from ._core.registry import check_backend
from ._core.tensors import (
    autocast,
    check_choice,
    check_same,
    check_tensor,
    dropout_arguments,
    empty_in_order,
    shape_of,
)
from .options import ActivationName

# Shapes: x (..., d), w1 and gate_weight (hidden, d), w2 (d_out, hidden), all of one dtype; biases
# of any dtype. If ``save``, backward reads the stored pre-activations pre and gate, otherwise it
# recomputes them. The starts are the absolute indices of the first row of x, over its flattened
# leading dimensions, and of the first column of hidden; only dropout reads them.
ARGUMENTS = (
    "Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, Tensor? gate_weight, Tensor?"
    " gate_bias, Tensor? dropout_seed, str activation, SymInt row_start, SymInt column_start, float"
    " dropout_p, bool save"
)


def _empty(a: Any) -> tuple[torch.Tensor, ...]:
    out = empty_in_order(a.x, (*a.x.shape[:-1], a.w2.shape[0]))
    hidden = (*a.x.shape[:-1], a.w1.shape[0])
    return (
        out,
        a.x.new_empty(hidden if a.save else 0),
        a.x.new_empty(hidden if a.save and a.gate_weight is not None else 0),
    )


def _flops_in(a: Any) -> int:
    """Return 2 rows d hidden, twice if gated."""
    return 2 * a.x.numel() * a.w1.shape[0] * (1 if a.gate_weight is None else 2)


def _flops(a: Any) -> int:
    return _flops_in(a) + 2 * math.prod(a.x.shape[:-1]) * a.w2.numel()


feed_forward_op = Op(
    "feed_forward",
    arguments=ARGUMENTS,
    outputs=("out", "pre", "gate"),
    differentiable_outputs=1,
    differentiable=("x", "w1", "b1", "w2", "b2", "gate_weight", "gate_bias"),
    saved=("pre", "gate"),
    empty_outputs=_empty,
    flops=(_flops, lambda a: 2 * _flops(a) + (0 if a.save else _flops_in(a))),
)


# ---- public function


def feed_forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: ActivationName = "relu",
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    recompute: bool = False,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Compute the position-wise feed-forward network, ``dropout(hidden) @ w2ᵀ + b2``.

    ``hidden = act(x @ w1ᵀ + b1)``, or with a gate
    ``act(x @ gate_weightᵀ + gate_bias) * (x @ w1ᵀ + b1)``.

    Args:
        x: (..., d), float32, bfloat16, float16 or float64; any strides.
        w1, gate_weight: (hidden, d), as in torch.nn.Linear, of x's dtype; gate_weight None disables
            the gate.
        b1, gate_bias: (hidden,), any floating dtype, or None.
        w2: (d_out, hidden), of x's dtype; usually d_out = d.
        b2: (d_out,), any floating dtype, or None.
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"`` or ``"silu"``.
        dropout_p: probability of dropping an element of hidden. The same seed drops the same
            elements on every backend.
        dropout_seed: int or int64 tensor; drawn from torch's generator if None.
        recompute: store only the inputs for backward, which recomputes the pre-activations;
            otherwise forward stores them too.
        backend: force ``"triton"``, ``"cuda"``, ``"cpu"`` or ``"reference"``; raises if
            unsupported.
        strict: raise instead of running on the reference.

    Returns:
        (..., d_out) in x's dtype and memory order. Products are accumulated in float32 (float64 for
        float64).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.

    Autocast casts x and the weights to its dtype; biases keep their dtype.

    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.3; gates: Shazeer, "GLU
    Variants Improve Transformer" (2020).
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.feed_forward(
            x,
            w1,
            b1,
            w2,
            b2,
            activation,
            gate_weight,
            gate_bias,
            dropout_p,
            dropout_seed,
            recompute,
            backend,
            strict,
        )
        if found is not NotImplemented:
            return found
    prepared = _prepare(
        x, w1, b1, w2, b2, activation=activation, gate_weight=gate_weight, gate_bias=gate_bias,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed, recompute=recompute, backend=backend, strict=strict,
    )  # fmt: skip
    return feed_forward_op(*prepared)[0]


# ---- checks and lowering


def _prepare(
    x: Any,
    w1: Any,
    b1: Any,
    w2: Any,
    b2: Any,
    *,
    activation: Any = "relu",
    gate_weight: Any = None,
    gate_bias: Any = None,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
    recompute: bool = False,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "feed_forward"
    check_tensor(op, "x", x, floating=True)
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have at least one dimension, got a number")
    for name, t in (("w1", w1), ("w2", w2), ("gate_weight", gate_weight)):
        if t is not None or name != "gate_weight":
            check_tensor(op, name, t, floating=True, ndim=2)
            check_same(op, "x", x, name, t)
    if gate_weight is None and gate_bias is not None:
        raise ValueError(f"{op}: gate_bias needs gate_weight; give both or neither")
    x, w1, w2, gate_weight = autocast(x.device, x, w1, w2, gate_weight)
    hidden, d = w1.shape
    if x.shape[-1] != d:
        raise ValueError(
            f"{op}: w1 must be (hidden, d) with d = {x.shape[-1]}, the last dimension of x, got"
            f" {shape_of(w1)}"
        )
    if w2.shape[1] != hidden:
        raise ValueError(
            f"{op}: w2 must be (d_out, hidden) with hidden = {hidden}, the rows of w1, got"
            f" {shape_of(w2)}"
        )
    if gate_weight is not None and gate_weight.shape != w1.shape:
        raise ValueError(
            f"{op}: gate_weight must have the shape of w1 {shape_of(w1)}, got"
            f" {shape_of(gate_weight)}"
        )
    for name, t in (("w1", w1), ("w2", w2), ("gate_weight", gate_weight)):
        check_same(op, "x", x, name, t, dtype=True)
    for name, t, n in (
        ("b1", b1, hidden),
        ("b2", b2, w2.shape[0]),
        ("gate_bias", gate_bias, hidden),
    ):
        if t is not None:
            check_tensor(op, name, t, floating=True)
            check_same(op, "x", x, name, t)
            if tuple(t.shape) != (n,):
                raise ValueError(f"{op}: {name} must have shape ({n},), got {shape_of(t)}")
    check_choice(op, "activation", activation, tuple(ACTIVATIONS))
    p, seed = dropout_arguments(op, dropout_p, dropout_seed, x.device)
    check_backend(op, backend)
    save = not recompute and needs_gradient(x, w1, b1, w2, b2, gate_weight, gate_bias)
    return (
        feed_forward_op.Arguments(
            x, w1, b1, w2, b2, gate_weight, gate_bias, seed, activation, 0, 0, p, save
        ),
        backend,
        bool(strict),
    )


feed_forward_op.prepare = _prepare
fast_path.facts["held_bytes"] = cpu.HELD_BYTES


# ---- backends


def _reference_bytes(a: Any) -> int:
    """Return the bytes of the intermediates and of the operands in the work dtype."""
    size = 8 if a.x.dtype == torch.float64 else 4
    rows = math.prod(a.x.shape[:-1])
    return size * (
        rows * a.w1.shape[0] * (2 if a.gate_weight is None else 4)
        + a.x.numel()
        + a.w1.numel()
        + a.w2.numel()
    )


feed_forward_op.add_reference(feed_forward_forward, extra_bytes=_reference_bytes)
feed_forward_op.backend(cpu.backend(feed_forward_op))
feed_forward_op.backend(triton.backend(feed_forward_op))
feed_forward_op.backend(cuda.backend(feed_forward_op))
