"""The backend ``cpu`` of layer_norm, rms_norm and add_norm: csrc/cpu/layer_norm.cpp called with tensors allocated here.

The kernels see every tensor of rows as (outer, inner, columns) with contiguous columns. Two strides for the rows are enough
for a (B, L, C) view of (L, B, C) memory, so that is not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from . import _native
from ._registry import WRONG_DEVICE, Backend, Op

BLOCK_BYTES = 32 << 20  # partial sums of dweight and dbias are kept below about this


def backend(op: Op) -> Backend:
    """The backend for an op with the argument names of layer_norm, rms_norm or add_norm."""
    plain = op.name != "add_norm"

    def rms(a: Any) -> bool:
        return op.name == "rms_norm" if plain else a.rms

    def why_not(a: Any) -> str | None:
        if a.x.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and x is on {a.x.device}"
        if (reason := _native.why_not("norm_fwd")) is not None:
            return reason
        residual = None if plain else a.residual
        if residual is not None and (residual.dtype == torch.float64) != (a.x.dtype == torch.float64):
            return f"x and residual both float64 or neither, got {a.x.dtype} and {residual.dtype}"
        return None

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        by_name = dict(zip(op.outputs, outputs))
        grid = Grid(a.x, a.dims)
        out = grid.target(outputs[0])
        stream = None if plain else grid.target(by_name["residual_out"])
        mean = None if rms(a) else by_name["mean"]
        residual, bias, seed, p = _optional(a)
        torch.ops.pytransformer_C.norm_fwd(
            grid.rows(a.x), None if residual is None else grid.rows(residual), _vector(a.weight, a.x), _vector(bias, a.x), seed,
            out, stream, mean, by_name["rstd"], a.eps, p, rms(a),
        )  # fmt: skip
        grid.deliver(out, outputs[0])
        if stream is not None:
            grid.deliver(stream, by_name["residual_out"])
        return outputs

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[Any]:
        results = dict(zip(op.differentiable, op.empty_gradients(a, wanted)))
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results.values()]
        by_name = dict(zip(op.saved, saved))
        want = dict(zip(op.differentiable, wanted))
        stream = a.x if plain else by_name["residual_out"]
        grid = Grid(stream, a.dims)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0].to(a.x.dtype)
        d_stream = None if plain or grads[1] is None else grid.rows(grads[1].to(stream.dtype))
        _, _, seed, p = _optional(a)
        work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
        columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
        sums = [torch.empty(columns, dtype=work) if want.get(n) else None for n in ("weight", "bias")]
        rows = {n: grid.target(results[n]) for n in ("x", "residual") if want.get(n)}
        torch.ops.pytransformer_C.norm_bwd(
            grid.rows(d_out), d_stream, grid.rows(stream), _vector(a.weight, a.x), None if rms(a) else by_name["mean"],
            by_name["rstd"], seed, rows.get("x"), rows.get("residual"), *sums, p, rms(a),
        )  # fmt: skip
        for name, target in rows.items():
            grid.deliver(target, results[name])
        for name, total in zip(("weight", "bias"), sums):
            if total is not None:
                results[name].copy_(total.view(results[name].shape))
        return [results[n] for n in op.differentiable]

    return Backend("cpu", forward, backward, why_not, _extra_bytes)


def _optional(a: Any) -> tuple[Any, Any, Any, float]:
    """(residual, bias, dropout_seed, dropout_p) of any of the three ops."""
    return (
        getattr(a, "residual", None),
        getattr(a, "bias", None),
        getattr(a, "dropout_seed", None),
        getattr(a, "dropout_p", 0.0),
    )


def _vector(t: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if t is None else t.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


class Grid:
    """How a problem's tensors are seen as (outer, inner, columns): the leading dimensions are cut where x's strides break."""

    def __init__(self, x: torch.Tensor, dims: int) -> None:
        lead = x.dim() - dims
        cut = next((d for d in range(1, lead) if x.stride(d - 1) != x.stride(d) * x.shape[d]), 0)
        self.shape = (math.prod(x.shape[:cut]), math.prod(x.shape[cut:lead]), math.prod(x.shape[lead:]))

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        """A view where the strides allow it, else a copy."""
        t = t.reshape(self.shape)
        return t if t.stride(2) == 1 or self.shape[2] <= 1 else t.contiguous()

    def target(self, t: torch.Tensor) -> torch.Tensor:
        """The view to write t through, or where its strides allow none, a new tensor to be delivered."""
        try:
            view = t.view(self.shape)
        except RuntimeError:
            return t.new_empty(self.shape)
        return view if view.stride(2) == 1 or self.shape[2] <= 1 else t.new_empty(self.shape)

    def deliver(self, target: torch.Tensor, t: torch.Tensor) -> None:
        if target.data_ptr() != t.data_ptr():
            t.copy_(target.view(t.shape))


def _extra_bytes(a: Any) -> int:
    """A cached row for each thread; in backward the partial sums of the parameters' gradients."""
    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    rows = a.x.numel() // max(1, columns)
    size = 8 if a.x.dtype == torch.float64 else 4
    blocks = max(1, min(-(-rows // 64), 256, max(8, (BLOCK_BYTES >> 3) // max(1, columns))))
    return size * columns * (torch.get_num_threads() + 2 * blocks)
