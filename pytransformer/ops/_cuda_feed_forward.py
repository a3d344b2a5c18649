"""The backend ``cuda`` of feed_forward: csrc/cuda/feed_forward and csrc/cuda/matmul called with tensors allocated here.

The kernels see matrices whose rows begin at multiples of 16 bytes; other tensors are copied. A result's rows hold a multiple of eight
columns. Products with an epilogue are the kernels'; plain ones the library's, unless ``matmul_by_library`` says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..reference.feed_forward import ACTIVATIONS
from . import _cuda
from ._gpu_feed_forward import as_written, deliver, empty, hidden_bytes, matrix, target
from ._registry import Backend, Op

DTYPES = (torch.bfloat16, torch.float16)
WIDTH = 8  # elements of 16 bytes
LARGEST_SIDE = 2**31 - 1024  # of a matrix; csrc/cuda/matmul/plan.h
ROWS_OF_A_PART = 64  # rows that a line of partial sums of a bias's gradient covers; csrc/cuda/feed_forward/problem.h


def backend(op: Op) -> Backend:
    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        if empty(a):
            return op.backends["reference"].forward(a)
        out, pre, gate = op.empty_outputs(a)
        x = operand(matrix(a.x))
        hidden = _room(x, a.w1.shape[0])
        with as_written(a.x.device), _whole_sums(a.x.device):
            with _result(pre if a.save else None) as pre_to, _result(gate if a.save and gate.numel() else None) as gate_to:
                _first_product(a, x, hidden, pre_to, gate_to)
            to = target(out)
            product(hidden[:, : a.w1.shape[0]], operand(matrix(a.w2)).t(), to, bias=a.b2)
            deliver(to, out)
        return out, pre, gate

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        if empty(a):
            return op.backends["reference"].backward(a, grads, saved, wanted)
        results = op.empty_gradients(a, wanted)
        by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
        with as_written(a.x.device), _whole_sums(a.x.device):
            _backward(a, operand(matrix(grads[0].to(a.x.dtype))), saved, by_name)
        return results

    return Backend("cuda", forward, backward, why_not, hidden_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := _cuda.why_not("hidden_fwd", a.x.device)) is not None:
        return reason
    if a.x.dtype not in DTYPES:
        dtype = str(a.x.dtype).removeprefix("torch.")
        return f"bfloat16 or float16, got {dtype}; the backends triton and reference have float32, and reference float64"
    if not _cuda.runs_sm90a(a.x.device):
        return "a GPU of compute capability 9.0 and kernels built for it (sm_90a), not PYTRANSFORMER_CUDA_PATH=portable"
    if (largest := max(a.x.numel() // max(1, a.x.shape[-1]), *a.w1.shape, *a.w2.shape)) > LARGEST_SIDE:
        return f"sides of at most {LARGEST_SIDE:,}, got {largest:,}"
    return None


def _backward(a: Any, d_out: torch.Tensor, saved: Sequence[torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Write the gradients that ``wanted`` has, by the names of the op's arguments."""
    if "b2" in wanted:
        wanted["b2"].copy_(d_out.sum(0, dtype=torch.float32))
    if wanted.keys() <= {"b2"}:
        return
    columns, gated = a.w1.shape[0], a.gate_weight is not None
    x = operand(matrix(a.x))

    def room(needed: bool) -> torch.Tensor | None:
        return _room(x, columns) if needed else None

    if a.save:
        pre, gate = (operand(matrix(t)) if t.numel() else None for t in saved)
    else:
        pre_to, gate_to = room(True), room(gated)
        _first_product(a, x, None, pre_to, gate_to)
        pre, gate = (t if t is None else t[:, :columns] for t in (pre_to, gate_to))
    d_pre, hidden = room(not wanted.keys().isdisjoint(("x", "w1"))), room("w2" in wanted)
    d_gate = room(gated and not wanted.keys().isdisjoint(("x", "gate_weight")))
    height = -(-x.shape[0] // ROWS_OF_A_PART)
    parts = {n: torch.empty(height, columns, device=x.device) for n in ("b1", "gate_bias") if n in wanted}
    _cuda.call(
        "hidden_bwd", x.device, d_out, operand(matrix(a.w2)), pre, gate, a.dropout_seed, d_pre, d_gate, hidden,
        parts.get("b1"), parts.get("gate_bias"), _activation(a), a.dropout_p,
    )  # fmt: skip
    for name, part in parts.items():
        wanted[name].copy_(part.sum(0))
    d_pre, d_gate, hidden = (t if t is None else t[:, :columns] for t in (d_pre, d_gate, hidden))
    if "x" in wanted:
        to = target(wanted["x"])
        second = (d_gate, operand(matrix(a.gate_weight))) if gated else ()
        product(d_pre, operand(matrix(a.w1)), to, *second)
        deliver(to, wanted["x"])
    for name, rows, values in (("w1", d_pre, x), ("gate_weight", d_gate, x), ("w2", d_out, hidden)):
        if name in wanted:
            product(rows.t(), values, wanted[name])


# ---- products


def _first_product(
    a: Any, x: torch.Tensor, hidden: torch.Tensor | None, pre: torch.Tensor | None, gate: torch.Tensor | None
) -> None:
    """Write those of hidden, pre and gate that are there."""
    w1, gate_weight = (w if w is None else operand(matrix(w)).t() for w in (a.w1, a.gate_weight))
    _cuda.call(
        "hidden_fwd", x.device, x, w1, gate_weight, _bias(a.b1), _bias(a.gate_bias), a.dropout_seed, hidden, pre, gate,
        _activation(a), a.dropout_p,
    )  # fmt: skip


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    a2: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """out = a @ b (+ a2 @ b2) + bias, of operands as the kernels take them."""
    if not _by_library(*out.shape, a.shape[1], os.environ.get("PYTRANSFORMER_CUDA_PATH") == "sm90"):
        with _result(out) as to:
            _cuda.call("matmul", a.device, a, b, a2, b2, _bias(bias), to)
        return
    if bias is not None and bias.dtype == out.dtype:
        torch.addmm(bias, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
    if a2 is not None:
        out.addmm_(a2, b2)
    if bias is not None and bias.dtype != out.dtype:
        out.copy_(out + bias)


@functools.lru_cache(maxsize=256)
def _by_library(rows: int, columns: int, depth: int, ours: bool) -> bool:
    """Whether a plain product is the library's: a pure function of csrc/cuda/matmul/plan.h."""
    name = f"{'emulated' if _cuda.emulating() else 'cuda'}_matmul_by_library"
    return getattr(torch.ops.pytransformer_C, name)(rows, columns, depth, ours)


@contextlib.contextmanager
def _whole_sums(device: torch.device) -> Iterator[None]:
    """Library products add up in float32: by default it may round parts of long sums to 16 bits, beyond the promised bound."""
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    flags = torch.backends.cuda.matmul
    before = {name: getattr(flags, name) for name in names} if device.type == "cuda" else {}
    changed = {name: value for name, value in before.items() if value}
    for name in changed:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in changed.items():
            setattr(flags, name, value)


# ---- memory


def operand(t: torch.Tensor) -> torch.Tensor:
    """The matrix if its rows begin at multiples of 16 bytes and lie apart, else a copy that is so."""
    if t.stride(0) % WIDTH == 0 and t.stride(0) > 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0:
        return t
    return _room(t, t.shape[1])[:, : t.shape[1]].copy_(t)


def _room(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Uninitialised rows for a result of so many columns."""
    return like.new_empty(like.shape[0], -(-columns // WIDTH) * WIDTH)


@contextlib.contextmanager
def _result(t: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
    """What a kernel may write for t, (..., columns): its own memory if that will do, else rows that are copied into it at the end."""
    columns = 0 if t is None else t.shape[-1]
    if t is None or (t.is_contiguous() and columns % WIDTH == 0 and t.data_ptr() % 16 == 0):
        yield t if t is None else t.view(-1, columns)
        return
    rows = t.new_empty(t.numel() // columns, -(-columns // WIDTH) * WIDTH)
    yield rows
    t.copy_(rows[:, :columns].view(t.shape))


def _bias(b: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous from a multiple of 16 bytes on, of a multiple of eight numbers that the kernels read."""
    if b is None:
        return None
    b = b.float() if b.dtype == torch.float64 else b
    if b.is_contiguous() and b.numel() % WIDTH == 0 and b.data_ptr() % 16 == 0:
        return b
    padded = b.new_zeros(-(-b.numel() // WIDTH) * WIDTH)
    padded[: b.numel()] = b
    return padded


def _activation(a: Any) -> int:
    return list(ACTIVATIONS).index(a.activation)
