"""The backend ``triton`` of layer_norm, rms_norm and add_norm: kernels/layer_norm called with tensors allocated here.

The kernels see every tensor of rows as (outer, inner, columns) with contiguous columns, as those of the backend ``cpu`` do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._cpu_layer_norm import Grid
from ._registry import Backend, Op
from ._triton_attention import unavailable


def backend(op: Op) -> Backend:
    """The backend for an op with the argument names of layer_norm, rms_norm or add_norm."""
    plain = op.name != "add_norm"

    def form(a: Any) -> dict[str, Any]:
        rms = op.name == "rms_norm" if plain else a.rms
        return {"rms": rms, "seed": getattr(a, "dropout_seed", None), "dropout_p": getattr(a, "dropout_p", 0.0)}

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        from pytransformer.kernels.layer_norm.fwd import forward as run

        outputs = op.empty_outputs(a)
        if a.x.numel() == 0:
            return outputs
        by_name, grid = dict(zip(op.outputs, outputs)), Grid(a.x, a.dims)
        targets = [_Target(grid, t) for t in (outputs[0], by_name.get("residual_out"))]
        run(
            _rows(grid, a.x), _rows(grid, getattr(a, "residual", None)), _flat(a.weight), _flat(getattr(a, "bias", None)),
            *(t.rows for t in targets), _mean(by_name), by_name["rstd"], eps=a.eps, **form(a),
        )  # fmt: skip
        for target in targets:
            target.deliver()
        return outputs

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        from pytransformer.kernels.layer_norm.bwd import backward as run

        results = op.empty_gradients(a, wanted)
        if a.x.numel() == 0:
            return [None if r is None else r.zero_() for r in results]
        by_name, result = dict(zip(op.saved, saved)), dict(zip(op.differentiable, results))
        h = a.x if plain else by_name["residual_out"]
        grid = Grid(h, a.dims)
        d_out = torch.zeros_like(a.x) if grads[0] is None else grads[0]
        d_stream = None if plain else grads[1]
        targets = [_Target(grid, result.get(name)) for name in ("x", "residual")]
        targets += [_Target(None, result.get(name)) for name in ("weight", "bias")]
        run(
            _rows(grid, d_out), _rows(grid, d_stream), _rows(grid, h), _flat(a.weight), _mean(by_name), _flat(by_name["rstd"]),
            *(t.rows for t in targets), **form(a),
        )  # fmt: skip
        for target in targets:
            target.deliver()
        return results

    return Backend("triton", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := unavailable(a.x.device, "x")) is not None:
        return reason
    for name in ("x", "residual"):
        t = getattr(a, name, None)
        if t is not None and t.dtype == torch.float64:
            return f"float32, bfloat16 or float16, got {name} in float64; the backend reference has it"
    if (columns := math.prod(a.x.shape[a.x.dim() - a.dims :])) >= 1 << 30:
        return f"rows of fewer than {1 << 30:,} numbers, got {columns:,}"
    return None


class _Target:
    """Where the kernels write a result: a view of it, (outer, inner, columns) or flat, or what is copied to it afterwards."""

    def __init__(self, grid: Grid | None, result: torch.Tensor | None) -> None:
        self.result = self.rows = result
        if result is not None and grid is not None:
            self.rows = grid.target(result).view(grid.shape)
        elif result is not None:
            self.rows = result.view(-1) if result.is_contiguous() else result.new_empty(result.numel())

    def deliver(self) -> None:
        if self.result is not None and self.rows.data_ptr() != self.result.data_ptr():
            self.result.copy_(self.rows.view(self.result.shape))


def _rows(grid: Grid, t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else grid.rows(t).view(grid.shape)


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.reshape(-1).contiguous()


def _mean(by_name: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The means, which an RMS norm has not."""
    mean = by_name.get("mean")
    return None if mean is None or mean.numel() == 0 else _flat(mean)


def _extra_bytes(a: Any) -> int:
    """In backward, the parts of the parameters' gradients: two rows of float32 for each program."""
    from pytransformer.kernels.layer_norm.configs import BLOCKS, programs, tile

    columns = math.prod(a.x.shape[a.x.dim() - a.dims :])
    config, wide = tile(columns, backward=True)
    rows = a.x.numel() // max(1, columns)
    return 8 * columns * min(BLOCKS if wide else programs(a.x.device, config.warps), -(-rows // config.ROWS))
