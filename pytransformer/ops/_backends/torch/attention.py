# SPDX-License-Identifier: Apache-2.0
"""The backend ``torch`` of attention and attention_varlen: PyTorch's fused kernels.

out and lse are the same as for every backend, so backward may run on another backend.
docs/ops/attention-torch.md lists the supported calls and gives the reasons.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from ....reference._attention import PADDED_ONLY
from ..._core.dispatch import NotLaunched
from ..._core.op import Op
from ..._core.registry import WRONG_DEVICE, Backend
from ..._core.tensors import as_written, last_contiguous
from .lowering import Lowered, equal_widths, lower, why_not_lowered

aten = torch.ops.aten
LSE_ROWS = 32  # the memory-efficient kernel pads lse to a multiple
# columns that an lse gradient adds to a head, so that kernels support the head size
MORE_COLUMNS = {"cpu": 1, "cuda": 8}


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """Return the backend for an op with attention's argument names.

    Packed ops also have cu_seqlens and maximum lengths.
    """

    def forward(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        check_values(a)
        out, lse = op.empty_outputs(a)
        with as_written(a.query.device):
            if not a.packed:
                return _attend(a, out, lse)
            out.zero_()
            lse.fill_(-math.inf)
            for n, rows, _ in _sequences(a):
                views = _padded(out, rows), lse[:, rows][None]
                for view, result in zip(views, _attend(n, *views)):
                    if result is not view:
                        view.copy_(result)
        return out, lse

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Any, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        if any(wanted[3:]):
            raise NotLaunched("PyTorch's kernels give no gradient of masks and biases")
        out, lse = saved
        grad_out, grad_lse = grads
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype)
        results = op.empty_gradients(a, wanted)
        with as_written(a.query.device):
            if not a.packed:
                _differentiate(a, grad_out, grad_lse, out, lse, results[:3])
                return results
            for result in results[:3]:
                if result is not None:
                    result.zero_()
            for n, rows, keys in _sequences(a):
                places = (rows, keys, keys)
                _differentiate(
                    n, _padded(grad_out, rows),
                    None if grad_lse is None else grad_lse[:, rows][None], _padded(out, rows),
                    lse[:, rows][None], [None if r is None else _padded(r, p) for r,
                        p in zip(results, places)],
                )  # fmt: skip
        return results

    return Backend("torch", forward, backward, why_not, _extra_bytes, kernel=_kernel_name)


# ---- supported calls


def why_not(a: Any) -> str | None:
    """Return why PyTorch's kernels cannot compute the problem by our contract, or None."""
    device = a.query.device.type
    if device not in ("cpu", "cuda"):
        return (
            f"{WRONG_DEVICE}the CPU and on GPUs that torch calls cuda: elsewhere PyTorch's kernels"
            " keep no lse that was tested"
        )
    if a.dropout_p:
        return "PyTorch's kernels draw another dropout mask than ours"
    if a.page_table is not None:
        return "PyTorch's kernels read no pages"
    if a.key_scale is not None:
        return "PyTorch's kernels read no keys in eight bits"
    if a.block_offsets is not None:
        return "PyTorch's kernels do not support block masks"
    if a.softcap:
        return "PyTorch's kernels have no softcap"
    if a.sinks is not None:
        return "PyTorch's kernels have no sinks"
    if a.slopes is not None or a.table is not None:
        return "PyTorch's kernels have no ALiBi and no T5 bias"
    if a.scale <= 0.0:
        return "PyTorch's kernels hide by -inf before they scale: the scale must be positive"
    if (reason := _why_not_packed(a) if a.packed else why_not_lowered(a)) is not None:
        return reason
    return None if device == "cpu" or 0 in a.query.shape or 0 in a.key.shape else _why_not_on_gpu(a)


def _why_not_packed(a: Any) -> str | None:
    if a.query.device.type != "cpu":
        return "takes packed sequences on the CPU, where it need not wait for their lengths"
    if a.left >= 0 or a.right >= 0:
        return "PyTorch's kernels have no window"
    if a.causal == "bottom_right" and not torch.equal(a.cu_seqlens_q, a.cu_seqlens_k):
        return "PyTorch's kernels align causality top left"
    return None


def _why_not_on_gpu(a: Any) -> str | None:
    head_dim = a.query.shape[3]
    if head_dim % 8 or a.value.shape[3] != head_dim:
        return (
            f"on a GPU equal head sizes that are multiples of 8, got {head_dim} and"
            f" {a.value.shape[3]}"
        )
    if _kernel(a.query, a.key, a.value, _has_mask(a), a.causal != "none") is None:
        return (
            "PyTorch has no fused kernel for this (torch.backends.cuda.can_use_flash_attention"
            " tells why)"
        )
    return None


def _has_mask(a: Any) -> bool:
    return any(t is not None for t in (a.mask, a.key_lengths))


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masked: bool,
    is_causal: bool,
    backward: bool = False,
) -> SDPBackend | None:
    """Return the kernel on a GPU.

    With a mask it is the memory-efficient kernel, because cuDNN's gradient has been NaN there
    (pytorch#196678). Backward never uses cuDNN, which does not promise equal bits. Forward on
    Hopper with more than one query uses cuDNN, which was 1.6 to 2.3 times as fast as flash on an
    H100. Otherwise PyTorch chooses.
    """
    mask = query.new_empty(()).expand(*query.shape[:3], key.shape[2]) if masked else None
    grouped = query.shape[1] != key.shape[1]
    given = torch.backends.cuda.SDPAParams(
        query, key, value, mask, 0.0, is_causal and not masked, grouped
    )
    if masked or backward:
        if not masked and torch.backends.cuda.can_use_flash_attention(given):
            return SDPBackend.FLASH_ATTENTION
        return (
            SDPBackend.EFFICIENT_ATTENTION
            if torch.backends.cuda.can_use_efficient_attention(given)
            else None
        )
    hopper = torch.cuda.get_device_capability(query.device)[0] == 9
    if hopper and query.shape[2] > 1 and torch.backends.cuda.can_use_cudnn_attention(given):
        return SDPBackend.CUDNN_ATTENTION
    choice = SDPBackend(
        torch._fused_sdp_choice(query, key, value, None, 0.0, is_causal, enable_gqa=grouped)
    )
    fused = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return choice if choice in fused else None


def _kernel_name(a: Any) -> str | None:
    """Return the kernel that forward runs on a GPU: "cudnn", "flash" or "efficient"."""
    if a.packed or a.query.device.type != "cuda":
        return None
    chosen = _kernel(a.query, a.key, a.value, _has_mask(a), a.causal != "none")
    return None if chosen is None else chosen.name.removesuffix("_ATTENTION").lower()


def _extra_bytes(a: Any) -> int:
    """Return the bytes of query, key and value with rows zeroed, and of the floating mask."""
    size = sum(t.numel() * t.element_size() for t in (a.query, a.key, a.value))
    masks = [t for t in (a.mask, a.bias) if t is not None]
    return size + max((13 * t.numel() for t in masks), default=0)


# ---- padded tensors


def _attend(a: Any, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, Hq, Lq, Dv) and (B, Hq, Lq).

    The result is ``out`` and ``lse``, filled, or the kernel's output if its dtype and memory order
    equal out's.
    """
    if not out.numel() or not a.key.shape[2]:
        return out.zero_(), lse.fill_(-math.inf)
    p = lower(a)
    found, sums = _forward(p, a.scale)
    found = found[..., : out.shape[3]]
    lse.copy_(sums if p.dead is None else sums.masked_fill(p.dead, -math.inf))
    if p.dead is None and (found.dtype, found.stride()) == (out.dtype, out.stride()):
        return found, lse  # saves a copy of the output: 7 % of a call on an H100
    return out.copy_(found if p.dead is None else found.masked_fill(p.dead[..., None], 0.0)), lse


def _differentiate(
    a: Any,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    results: Sequence[torch.Tensor | None],
) -> None:
    """Write the needed gradients of query, key and value.

    The kernels do not support a gradient of lse. With delta = rowsum(grad_out * out) the gradient
    of the scores is P * (dP - delta + grad_lse). An additional column of zeros in value, with
    -grad_lse in out and 1 in out's gradient, subtracts grad_lse from delta.
    """
    if not out.numel() or not a.key.shape[2]:
        for result in results:
            if result is not None:
                result.zero_()
        return
    p = lower(a)
    width = p.query.shape[3] - out.shape[3]
    grad_out, out = (last_contiguous(t.to(p.query.dtype)) for t in (grad_out, out))
    grad_out, out = (pad(t, (0, width)) if width else t for t in (grad_out, out))
    if p.dead is not None:  # their weights are exp(-inf - 0), with any saved lse
        grad_out, lse = grad_out.masked_fill(p.dead[..., None], 0.0), lse.masked_fill(p.dead, 0.0)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(p.dead, 0.0)
    if grad_lse is not None:
        more = MORE_COLUMNS[out.device.type]
        query, key, value, grad_out, out = equal_widths(
            p.query, p.key, p.value, grad_out, out, more=more
        )
        out[..., -1], grad_out[..., -1] = -grad_lse, 1.0
        p = replace(p, query=query, key=key, value=value)
    for result, grad in zip(results, _backward(p, a.scale, grad_out, out, lse)):
        if result is not None:
            result.copy_(grad[..., : result.shape[3]])


def _forward(p: Lowered, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = (p.query, p.key, p.value)
    if p.query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, p.is_causal, attn_mask=p.mask, scale=scale
        )
        return out, lse
    kernel = _kernel(*qkv, p.mask is not None, p.is_causal)
    if kernel == SDPBackend.FLASH_ATTENTION:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *qkv, 0.0, p.is_causal, False, scale=scale
        )
    elif kernel == SDPBackend.EFFICIENT_ATTENTION:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *qkv, p.mask, True, 0.0, p.is_causal, scale=scale
        )
    elif kernel == SDPBackend.CUDNN_ATTENTION:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *qkv, p.mask, True, 0.0, p.is_causal, False, scale=scale
        )
    else:
        raise NotLaunched("PyTorch has no fused kernel for this")
    return out, lse.reshape(*lse.shape[:2], -1)[..., : p.query.shape[2]]


def _backward(
    p: Lowered, scale: float, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> Sequence[torch.Tensor]:
    qkv = (p.query, p.key, p.value)
    if p.query.device.type == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(
            grad_out, *qkv, out, lse.contiguous(), 0.0, p.is_causal, attn_mask=p.mask, scale=scale
        )
    kernel = _kernel(*qkv, p.mask is not None, p.is_causal, backward=True)
    seed = torch.empty((), dtype=torch.int64, device=out.device)  # of an unused dropout
    with _equal_bits():
        if kernel == SDPBackend.FLASH_ATTENTION:
            lengths = (None, None, p.query.shape[2], p.key.shape[2])
            return aten._scaled_dot_product_flash_attention_backward(
                grad_out,
                *qkv,
                out,
                lse.contiguous(),
                *lengths,
                0.0,
                p.is_causal,
                seed,
                seed,
                scale=scale,
            )
        if kernel == SDPBackend.EFFICIENT_ATTENTION:
            lse = pad(lse, (0, -lse.shape[2] % LSE_ROWS), value=math.inf)
            wanted = [True, True, True, False]
            return aten._scaled_dot_product_efficient_attention_backward(
                grad_out, *qkv, p.mask, out, lse, seed, seed, 0.0, wanted, p.is_causal, scale=scale
            )[:3]
    raise NotLaunched("PyTorch has no fused kernel for this gradient")


@contextlib.contextmanager
def _equal_bits() -> Iterator[None]:
    """Make PyTorch's backward kernels on a GPU sum in a fixed order."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# ---- packed sequences, one at a time


def _sequences(a: Any) -> Iterator[tuple[Any, slice, slice]]:
    """Yield each sequence as a padded problem of batch 1, with its query rows and key rows."""
    common = (
        a._asdict()
        | dict.fromkeys(PADDED_ONLY)
        | dict(query_lengths=None, key_lengths=None, query_start=0, key_start=0)
    )
    for queries, keys in zip(pairwise(a.cu_seqlens_q.tolist()), pairwise(a.cu_seqlens_k.tolist())):
        rows, places = slice(*queries), slice(*keys)
        if rows.start < rows.stop:
            tensors = dict(
                query=_padded(a.query, rows),
                key=_padded(a.key, places),
                value=_padded(a.value, places),
            )
            yield SimpleNamespace(**common | tensors), rows, places


def _padded(t: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return (1, H, L, D), a view of rows of (total, H, D)."""
    return t[rows].transpose(0, 1)[None]
