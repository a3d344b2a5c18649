# SPDX-License-Identifier: Apache-2.0
"""The backend ``triton`` of attention and attention_varlen, on kernels/attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import last_contiguous
from ..._problem.attention import AttentionProblem
from ..gpu.attention import gradients, outputs, why_not_sizes
from . import availability

WIDE_SHARED = 102400  # bytes of shared memory of bwd_dkdv in float32 with head sizes above 128


def backend(op: Op, check_values: Callable[[AttentionProblem], None]) -> Backend:
    """Return the backend for an op with attention's argument names."""

    def forward(a: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
        from pytransformer.kernels.attention.fwd import forward as run

        out, lse = outputs(op, a, check_values)
        run(_contiguous(a), out, lse)
        return out, lse

    def backward(
        a: AttentionProblem,
        grads: Sequence[torch.Tensor | None],
        saved: Any,
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        from pytransformer.kernels.attention.bwd import backward as run

        if a.page_table is not None:
            raise ValueError("attention: page_table has no gradients")
        out, lse = saved
        grad_out, grad_lse = grads
        grad_out = (
            torch.zeros_like(out) if grad_out is None else last_contiguous(grad_out.to(out.dtype))
        )
        results, by_name = gradients(op, a, wanted)
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        run(_contiguous(a), grad_out, grad_lse, last_contiguous(out), lse.contiguous(), by_name)
        return results

    return Backend(
        "triton",
        forward,
        backward,
        why_not,
        _extra_bytes,
        note=_note,
        recorded=availability.recorded,
    )


def why_not(a: AttentionProblem) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    return (
        availability.why_not(query=a.query)
        or why_not_sizes(a)
        or _why_not_blocks(a)
        or _why_not_shared(a.query, a.value)
    )


def _why_not_blocks(a: AttentionProblem) -> str | None:
    """Return why a key tile would span two blocks, or None.

    Key tiles start at absolute multiples of 32 and blocks at the first key.
    """
    if a.blocks is None or a.key_start % 32 == 0:
        return None
    return f"block masks where key_start is a multiple of 32, got {a.key_start}"


def _why_not_shared(query: torch.Tensor, value: torch.Tensor) -> str | None:
    """Return why the GPU has too little shared memory for wide float32 heads, or None.

    The limit affects compute capability 8.6, 8.9 and 12.0.
    """
    if (
        query.device.type != "cuda"
        or query.dtype != torch.float32
        or max(query.shape[-1], value.shape[-1]) <= 128
    ):
        return None
    # Missing in torch's stubs.
    has = torch.cuda.get_device_properties(query.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if has >= WIDE_SHARED:
        return None
    return (
        f"float32 with head sizes above 128 needs {WIDE_SHARED:,} bytes of shared memory in"
        f" backward, this GPU has {has:,}"
    )


def _extra_bytes(a: AttentionProblem) -> int:
    """Return the bytes of all buffers.

    Forward needs the split-KV partials. Backward needs three float32 numbers per row: delta,
    maximum, and with a dense term the log of the sum. Both need the lists of a boolean mask's
    blocks.
    """
    from pytransformer.kernels.attention.configs import listing_of, plan_forward

    listed = listing_of(a)
    return max(plan_forward(a).bytes, 12 * a.query.numel() // a.head_dim) + (
        a.lists_bytes(listed) if listed else 0
    )


def _note(a: AttentionProblem) -> str | None:
    """Return the kernel form that computes forward, and the share of a mask that runs."""
    from pytransformer.kernels.attention.configs import listing_of, plan_forward

    if a.empty:
        return None
    listed = listing_of(a)
    mask = a.blocks.note if a.blocks else a.lists_note(listed) if listed else None
    return plan_forward(a).note + (f"; attn_mask: {mask}" if mask else "")


def _contiguous(a: AttentionProblem) -> AttentionProblem:
    return a._replace(
        query=last_contiguous(a.query), key=last_contiguous(a.key), value=last_contiguous(a.value)
    )
