# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of rotary and append_kv.

It allocates tensors and calls csrc/cuda/rotary. Tables and weights may have any of the kernels'
dtypes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import last_contiguous
from ..gpu import rotary as gpu
from ..gpu.rotary import flat
from . import library as cuda_library

MOST_COLUMNS, MOST_ROWS = 4096, 2**31 - 2**14  # csrc/cuda/rotary/plan.h
# approximate maximum partials of the weight's gradient: one per warp of the blocks that run at once
MOST_PARTS = 132 * 4 * 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend(op: Op) -> Backend:
    """Return the backend of rotary."""

    def forward(a: Any, x: torch.Tensor, out: torch.Tensor, rstd: torch.Tensor | None) -> None:
        cuda_library.call(
            "rotary_fwd",
            x.device,
            x,
            *_tables(a),
            flat(a.weight),
            out,
            rstd,
            a.interleaved,
            a.eps,
            a.weight_offset,
        )

    def backward(
        a: Any, d_out: torch.Tensor, x: torch.Tensor, *results: torch.Tensor | None
    ) -> None:
        cuda_library.call(
            "rotary_bwd",
            x.device,
            d_out,
            x,
            *_tables(a),
            flat(a.weight),
            *results,
            a.interleaved,
            a.weight_offset,
        )

    def why_not(a: Any) -> str | None:
        return _why_not("rotary_fwd", x=a.x, weight=a.weight) or gpu.too_large(
            MOST_COLUMNS, MOST_ROWS, x=a.x
        )

    def extra_bytes(a: Any) -> int:
        """Return the bytes of backward's partials of the weight's gradient."""
        return 0 if a.weight is None else 4 * a.x.shape[3] * min(a.x.shape[:3].numel(), MOST_PARTS)

    return gpu.backend("cuda", op, (forward, backward), why_not, extra_bytes)


def append_backend(op: Op) -> Backend:
    """Return the backend of append_kv."""

    def append(
        a: Any, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        cuda_library.call(
            "append_kv", out.device, *rows, a.key_cache, a.value_cache, flat(a.page_table),
            a.key_scale, a.value_scale,
            a.positions.contiguous(), *_tables(a), flat(a.q_norm), flat(a.k_norm), out,
            a.interleaved, a.eps, a.weight_offset,
        )  # fmt: skip

    def why_not(a: Any) -> str | None:
        return (
            _why_not("append_kv", query=a.query, q_norm=a.q_norm, k_norm=a.k_norm)
            or gpu.too_much_room(a, MOST_ROWS)
            or gpu.too_large(
                MOST_COLUMNS,
                MOST_ROWS,
                query=a.query,
                key=a.key,
                value=a.value,
                key_cache=a.key_cache,
            )
        )

    return gpu.append_backend("cuda", op, append, why_not)


def _why_not(raw: str, **tensors: torch.Tensor | None) -> str | None:
    first = next(iter(tensors.values()))
    assert first is not None
    if (reason := cuda_library.why_not(raw, first.device)) is not None:
        return reason
    for name, t in tensors.items():
        if t is not None and t.dtype not in DTYPES:
            return (
                f"float32, bfloat16 or float16, got {name} in"
                f" {str(t.dtype).removeprefix('torch.')}; the backend reference has it"
            )
    return None


def _tables(a: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return cos and sin as the kernels read them; float64 becomes float32."""
    if a.cos is None:
        return None, None
    cos, sin = (last_contiguous(t if t.dtype in DTYPES else t.float()) for t in (a.cos, a.sin))
    return cos, sin
