# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of attention and attention_varlen.

It allocates tensors and calls csrc/cpu/attention/attention.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.registry import WRONG_DEVICE, Backend, Op
from ..._core.tensors import last_contiguous
from ..._problem.attention import ALIGN, AttentionProblem
from ...masks import bucket_starts

MAX_HEAD_DIM = 512
NONE, NOTHING = frozenset((None,)), (None,) * 20  # the raw op's optional arguments


def backend(op: Op, check_values: Callable[[AttentionProblem], None]) -> Backend:
    """Return the backend for an op with attention's argument names.

    Packed ops also have cu_seqlens and maximum lengths.
    """

    def why_not(a: AttentionProblem) -> str | None:
        if a.query.device.type != "cpu":
            return f"{WRONG_DEVICE}the CPU, and query is on {a.query.device}"
        if (
            reason := native.why_not("attention_fwd") or native.why_not("attention_bwd")
        ) is not None:
            return reason
        if max(a.head_dim, a.value_dim) > MAX_HEAD_DIM:
            return f"head sizes up to {MAX_HEAD_DIM}, got {a.head_dim} and {a.value_dim}"
        return None

    def forward(a: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
        check_values(a)
        out, lse = op.empty_outputs(a)
        tensors, numbers = _native_arguments(a)
        torch.ops.pytransformer_C.attention_fwd.default(
            *tensors[:3], out, lse, *tensors[3:], *numbers
        )
        return out, lse

    def infer(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute forward in fewer steps if query, key and value are the only tensors.

        After a kernel has flushed the caches, Python took 40 of 180 µs (512 tokens, bf16).
        """
        query, key, value = a[:3]
        if (
            not NONE.issuperset(a[3:22])
            or not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        ):
            return forward(a)
        out, lse = op.empty_outputs(a)
        torch.ops.pytransformer_C.attention_fwd.default(
            query, key, value, out, lse, *NOTHING, False, ALIGN[a.causal], a.left, a.right,
            a.global_keys, 0, 0, a.query_start,
            a.key_start, query.shape[2], key.shape[2], a.scale, a.softcap, 0.0,
        )  # fmt: skip
        return out, lse

    def backward(
        a: AttentionProblem,
        grads: Sequence[torch.Tensor | None],
        saved: Any,
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        out, lse = saved
        grad_out, grad_lse = grads
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif grad_out.dtype != out.dtype:
            grad_out = grad_out.to(out.dtype)
        grad_out = last_contiguous(grad_out)
        results = op.empty_gradients(a, wanted)
        # The kernel adds gradients of score terms into float32 zeros, for any dtype.
        sums = [None if r is None else torch.zeros(r.shape, dtype=a.work) for r in results[3:]]
        tensors, numbers = _native_arguments(a)
        dense = [None, None] if a.packed else []  # packed problems have no mask and no dense bias
        torch.ops.pytransformer_C.attention_bwd.default(
            grad_out,
            grad_lse,
            *tensors[:3],
            last_contiguous(out),
            lse,
            *tensors[3:],
            *numbers,
            *results[:3],
            *dense,
            *sums,
        )
        return [
            *results[:3],
            *(None if r is None or s is None else r.copy_(s) for r, s in zip(results[3:], sums)),
        ]

    def extra_bytes(a: AttentionProblem) -> int:
        check_values(a)  # the plan reads lengths
        return _extra_bytes(a)

    return Backend("cpu", forward, backward, why_not, extra_bytes, infer, _note)


def _note(a: AttentionProblem) -> str | None:
    """Return the share of a block mask that runs."""
    return None if a.blocks is None else f"attn_mask: {a.blocks.note}"


def _native_arguments(a: AttentionProblem) -> tuple[list[torch.Tensor | None], list[Any]]:
    """Return the raw C++ op's tensors after query, key, value and the outputs, and its numbers."""
    tensors = [
        last_contiguous(a.query), last_contiguous(a.key), last_contiguous(a.value), a.mask, a.bias,
        None if a.slopes is None else a.slopes.to(a.work).contiguous(),
        None if a.table is None else a.table.to(a.work).contiguous(),
        None if a.table is None else torch.tensor(bucket_starts(*a.buckets)),
        None if a.sinks is None else a.sinks.to(a.work).contiguous(),
        *a.lengths, a.cu_seqlens_q, a.cu_seqlens_k,
        a.block_offsets, a.block_entries, a.block_bits, a.page_table, a.key_scale, a.value_scale,
        a.dropout_seed,
    ]  # fmt: skip
    numbers = [
        a.bidirectional, a.align, a.left, a.right, a.global_keys, a.batch_start, a.head_start,
        a.query_start, a.key_start, a.num_queries,
        a.num_keys, a.scale, a.softcap, a.dropout_p,
    ]  # fmt: skip
    return tensors, numbers


def _extra_bytes(a: AttentionProblem) -> int:
    """Return the bytes of the kernels' scratch and of the score terms' gradient sums."""
    tensors, numbers = _native_arguments(a)
    added = [
        t for t in (a.mask, a.bias, a.slopes, a.table, a.sinks) if t is not None and t.requires_grad
    ]
    backward = torch.is_grad_enabled() and (
        bool(added) or any(t.requires_grad for t in (a.query, a.key, a.value))
    )
    held = torch.ops.pytransformer_C.attention_scratch.default(*tensors, *numbers, backward)
    return held + (sum(t.numel() for t in added) * a.work.itemsize if backward else 0)
