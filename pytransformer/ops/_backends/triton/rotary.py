# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of rotary and append_kv, on kernels/rotary.

Tables and weights may have any dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import last_contiguous
from ..gpu import rotary as gpu
from ..gpu.rotary import flat
from . import availability


def backend(op: Op) -> Backend:
    """Return the backend of rotary."""

    def forward(a: Any, x: torch.Tensor, out: torch.Tensor, rstd: torch.Tensor | None) -> None:
        from pytransformer.kernels.rotary.fwd import forward as launch

        launch(
            x,
            *_tables(a),
            flat(a.weight),
            out,
            rstd,
            interleaved=a.interleaved,
            eps=a.eps,
            weight_offset=a.weight_offset,
        )

    def backward(
        a: Any, d_out: torch.Tensor, x: torch.Tensor, *results: torch.Tensor | None
    ) -> None:
        from pytransformer.kernels.rotary.bwd import backward as launch

        launch(
            d_out,
            x,
            *_tables(a),
            flat(a.weight),
            *results,
            interleaved=a.interleaved,
            weight_offset=a.weight_offset,
        )

    def why_not(a: Any) -> str | None:
        return availability.why_not(x=a.x, weight=a.weight) or _too_large(x=a.x)

    def extra_bytes(a: Any) -> int:
        """Return the bytes of backward's weight-gradient partials: a float32 row per program."""
        from pytransformer.kernels.rotary.configs import programs

        return 0 if a.weight is None else 4 * a.x.shape[3] * programs(a.x.device)

    return gpu.backend(
        "triton", op, (forward, backward), why_not, extra_bytes, availability.recorded
    )


def append_backend(op: Op) -> Backend:
    """Return the backend of append_kv."""

    def append(
        a: Any, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor
    ) -> None:
        from pytransformer.kernels.rotary.append import append as launch

        launch(
            rows, (a.key_cache, a.value_cache), (a.key_scale, a.value_scale), flat(a.page_table),
            a.positions.contiguous(),
            _tables(a), (flat(a.q_norm), flat(a.k_norm)), out, interleaved=a.interleaved, eps=a.eps,
            weight_offset=a.weight_offset,
        )  # fmt: skip

    def why_not(a: Any) -> str | None:
        if (
            reason := availability.why_not(query=a.query, q_norm=a.q_norm, k_norm=a.k_norm)
        ) is not None:
            return reason
        from pytransformer.kernels.rotary.configs import MOST_ROWS

        return gpu.too_much_room(a, MOST_ROWS) or _too_large(
            query=a.query, value=a.value, key_cache=a.key_cache
        )

    return gpu.append_backend("triton", op, append, why_not, availability.recorded)


def _tables(a: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return cos and sin with the same strides, because the kernels have one set."""
    if a.cos is None:
        return None, None
    cos, sin = last_contiguous(a.cos), last_contiguous(a.sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


def _too_large(**tensors: torch.Tensor) -> str | None:
    from pytransformer.kernels.rotary.configs import MOST_COLUMNS, MOST_ROWS

    return gpu.too_large(MOST_COLUMNS, MOST_ROWS, **tensors)
