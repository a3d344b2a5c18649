"""The backend ``triton`` of attention and attention_varlen: kernels/attention called with tensors allocated here.

Triton and the kernels are imported when the backend is first asked for, never with the package.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._registry import WRONG_DEVICE, Backend, Op
from ._tensors import last_contiguous


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """The backend for an op with attention's argument names."""

    def forward(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from pytransformer.kernels.attention.fwd import forward as run

        if a.query.device.type == "cpu":
            check_values(a)
        out, lse = op.empty_outputs(a)
        if hasattr(a, "cu_seqlens_q"):  # rows of no sequence are never visited
            out.zero_()
            lse.fill_(-math.inf)
        run(_contiguous(a), out, lse)
        return out, lse

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Any, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        from pytransformer.kernels.attention.bwd import backward as run

        out, lse = saved
        grad_out, grad_lse = grads
        grad_out = torch.zeros_like(out) if grad_out is None else last_contiguous(grad_out.to(out.dtype))
        results = op.empty_gradients(a, wanted)
        if hasattr(a, "cu_seqlens_q"):
            for rows in (r for r in results[:3] if r is not None):
                rows.zero_()
        by_name = {name: r for name, r in zip(op.differentiable, results) if r is not None}
        grad_lse = None if grad_lse is None else grad_lse.contiguous()
        run(_contiguous(a), grad_out, grad_lse, last_contiguous(out), lse.contiguous(), by_name)
        return results

    return Backend("triton", forward, backward, why_not, _extra_bytes)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := unavailable(a.query.device)) is not None:
        return reason
    if a.query.dtype == torch.float64:
        return "float32, bfloat16 or float16, got float64; the backend reference has it"
    from pytransformer.kernels.attention.problem import LARGEST_HEAD_DIM, LARGEST_POSITION

    widest = max(a.query.shape[-1], a.value.shape[-1])
    if widest > LARGEST_HEAD_DIM:
        return f"head sizes up to {LARGEST_HEAD_DIM}, got {widest}"
    longest = max(a.query.shape[-2], a.key.shape[-2]) if a.query.dim() == 4 else max(a.max_seqlen_q, a.max_seqlen_k)
    if longest + max(getattr(a, "query_start", 0), getattr(a, "key_start", 0)) >= LARGEST_POSITION:
        return f"positions below {LARGEST_POSITION:,}, got {longest:,} rows"
    return None


def unavailable(device: torch.device, name: str = "query") -> str | None:
    """Why no Triton kernel can run on this device, that of the argument ``name``, or None."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreting and device.type == "cpu"):
        return f"{WRONG_DEVICE}CUDA (or, with TRITON_INTERPRET=1, interpreted on the CPU), and {name} is on {device}"
    if not _installed("triton"):
        return "needs Triton: pip install triton, in the version that this torch was made for"
    if not _installed("pytransformer.kernels"):
        return "needs the kernels installed: pip install -e . in the checkout"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "compute capability 8.0 or higher, got {}.{}".format(*torch.cuda.get_device_capability(device))
    from pytransformer.kernels._lang import INTERPRETED

    if interpreting != INTERPRETED:
        return "TRITON_INTERPRET changed after Triton was imported, by torch perhaps; set it before Python starts"
    return None


def _extra_bytes(a: Any) -> int:
    """What splits of the keys leave in forward, or three float32 numbers for each row in backward: delta, maximum, and with
    a dense term the log of the sum."""
    from pytransformer.kernels.attention.decode import extra_bytes

    return max(extra_bytes(a), 12 * a.query.numel() // a.query.shape[-1])


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _contiguous(a: Any) -> Any:
    return a._replace(query=last_contiguous(a.query), key=last_contiguous(a.key), value=last_contiguous(a.value))
