# SPDX-License-Identifier: Apache-2.0
"""The backend ``cpu`` of attention and attention_varlen.

It allocates tensors and calls csrc/cpu/attention/attention.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core import native
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend
from ..._core.tensors import last_contiguous
from ..._problem.attention import AttentionProblem, bind
from ...masks import bucket_starts

MAX_HEAD_DIM = 512
OPERANDS = ("query", "key", "value")


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
        _call("attention_fwd", a, out=out, lse=lse)
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
        by_name = dict(zip(op.differentiable, results))
        sums = {
            name: None if r is None else torch.zeros(r.shape, dtype=a.work)
            for name, r in by_name.items()
            if name not in OPERANDS
        }
        outputs = {
            **dict.fromkeys(("dmask", "dbias")),
            **{f"d{name}": t for name, t in sums.items()},
        }
        _call(
            "attention_bwd", a, grad_out=grad_out, grad_lse=grad_lse, out=last_contiguous(out),
            lse=lse, dq=by_name["query"], dk=by_name["key"], dv=by_name["value"], **outputs,
        )  # fmt: skip
        for result, total in zip(results[len(OPERANDS) :], sums.values()):
            if result is not None and total is not None:
                result.copy_(total)
        return results

    def extra_bytes(a: AttentionProblem) -> int:
        check_values(a)  # the plan reads lengths
        return _extra_bytes(a)

    return Backend("cpu", forward, backward, why_not, extra_bytes, note=_note)


def _note(a: AttentionProblem) -> str | None:
    """Return the share of a block mask that runs."""
    return None if a.blocks is None else f"attn_mask: {a.blocks.note}"


def _call(name: str, a: AttentionProblem, **given: Any) -> Any:
    raw = getattr(torch.ops.pytransformer_C, name).default
    given |= {operand: last_contiguous(getattr(a, operand)) for operand in OPERANDS}
    given["bucket_starts"] = None if a.table is None else torch.tensor(bucket_starts(*a.buckets))
    return raw(*bind(raw, a, given))


def _extra_bytes(a: AttentionProblem) -> int:
    """Return the bytes of the kernels' scratch and of the score terms' gradient sums."""
    added = [
        t for t in (a.mask, a.bias, a.slopes, a.table, a.sinks) if t is not None and t.requires_grad
    ]
    backward = torch.is_grad_enabled() and (
        bool(added) or any(t.requires_grad for t in (a.query, a.key, a.value))
    )
    held = _call("attention_scratch", a, backward=backward)
    return held + (sum(t.numel() for t in added) * a.work.itemsize if backward else 0)
