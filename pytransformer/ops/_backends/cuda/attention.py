"""The backend ``cuda`` of attention and attention_varlen: csrc/cuda/attention called with tensors allocated here."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.registry import Backend, Op
from ..._core.tensors import last_contiguous
from ...masks import bucket_row
from ..cpu.attention import ALIGN
from ..gpu.attention import gradients, longest, outputs, why_not_sizes
from . import library as cuda_library

WIDTH = 8  # columns are widened to multiples of it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = ("query_lengths", "key_lengths", "prefix_lengths", "query_segments", "key_segments")


def backend(op: Op, check_values: Callable[[Any], None]) -> Backend:
    """The backend for an op with attention's argument names."""

    def forward(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = outputs(op, a, check_values)
        if _nothing(a):
            return out.zero_(), lse.fill_(-math.inf)
        cuda_library.call("attention_fwd", a.query.device, *_rows(a), out, lse, *_shared(a))
        return out, lse

    def backward(
        a: Any, grads: Sequence[torch.Tensor | None], saved: Any, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        out, lse = saved
        grad_out, grad_lse = grads
        results, by_name = gradients(op, a, wanted)
        if _nothing(a):
            return [None if r is None else r.zero_() for r in results]
        # Sums over sequences are float32 whatever their dtype; dense gradients go where they belong if the kernel can write them.
        sums = {
            n: torch.empty(r.shape, dtype=torch.float32, device=r.device)
            for n, r in by_name.items()
            if n in ("slopes", "table")
        }
        sums |= {n: r if r.dtype in DTYPES else r.float() for n, r in by_name.items() if n in ("mask", "bias")}
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype)
        ranges = None if "table" not in sums else _bucket_ranges(*_buckets(a), a.query.device)
        cuda_library.call(
            "attention_bwd", a.query.device, whole_rows(grad_out), None if grad_lse is None else grad_lse.contiguous(), *_rows(a),
            last_contiguous(out), lse.contiguous(), *_shared(a), *map(by_name.get, ("query", "key", "value")),
            *map(sums.get, ("mask", "bias", "slopes", "table")), ranges, a.deterministic,
        )  # fmt: skip
        for name, total in sums.items():
            if total is not by_name[name]:
                by_name[name].copy_(total)
        return results

    return Backend("cuda", forward, backward, why_not, _extra_bytes, note=_note)


def why_not(a: Any) -> str | None:
    """Why the kernels cannot do the problem, or None."""
    if (reason := cuda_library.why_not("attention_fwd", a.query.device)) is not None:
        return reason
    if a.query.dtype not in DTYPES:
        return f"float32, bfloat16 or float16, got {str(a.query.dtype).removeprefix('torch.')}; the backend reference has it"
    return why_not_sizes(a)


def _note(a: Any) -> str | None:
    """Which kernels run on a GPU that has those for sm_90a, if the tensors are aligned and all have gradients."""
    passes: list[tuple[str, str, dict[str, Any]]] = [("forward", "forward", {})]
    if _sums(a):
        passes += [("bwd_fused", "d_query, added across blocks, d_key and d_value", {})]
    else:
        passes += [("bwd_dq", "d_query", {}), ("bwd_dkdv", "d_key and d_value", {})]
    if not hasattr(a, "cu_seqlens_q"):
        full = torch.Size(longest(a))
        dense = [(n, t) for n, t in (("d_mask", a.mask), ("d_bias", a.bias)) if t is not None and t.is_floating_point()]
        passes += [("bwd_dbias", name, {"summed": t.shape[2:] != full}) for name, t in dense]
    told = []
    for direction, name, other in passes:
        if (plan := _sm90_plan(a, direction, **other)) is None:
            return None
        told.append(f"{name} by the {'portable kernels: ' + plan['why_not'] if plan['why_not'] else 'kernels for sm_90a'}")
    return "cuda: " + "; ".join(told)


def _sums(a: Any) -> int:
    """Float32 numbers of the copy of d_query to which blocks add; 0 where each row of it is one block's."""
    packed = (
        {"sequences": 1, "num_queries": a.query.shape[0] + 128 * a.cu_seqlens_q.numel()} if hasattr(a, "cu_seqlens_q") else {}
    )
    plan = None if a.deterministic else _sm90_plan(a, "bwd_fused", **packed)
    return 0 if plan is None else plan["dq_accum"]


def _sm90_plan(a: Any, direction: str, **other: int) -> dict[str, Any] | None:
    """What the kernels for sm_90a plan for tensors that are aligned; None where they do not run or nobody can be asked."""
    if _nothing(a) or not cuda_library.runs_sm90a(a.query.device) or importlib.util.find_spec("pytransformer._C") is None:
        return None
    from pytransformer._C import cuda_sm90_attention_plan

    score_mod = [a.slopes, a.table, a.softcap or None, a.dropout_p or None]
    bounds = [getattr(a, name, None) for name in ("query_lengths", "key_lengths", "cu_seqlens_q")]
    (num_queries, num_keys), packed = longest(a), hasattr(a, "cu_seqlens_q")
    padded = not packed and _is_padding(a.mask)
    problem = dict(
        dtype=str(a.query.dtype).removeprefix("torch."), sequences=a.cu_seqlens_q.numel() - 1 if packed else a.query.shape[0],
        heads=a.query.shape[1], key_heads=a.key.shape[1], num_queries=num_queries, num_keys=num_keys, head_dim=a.query.shape[-1],
        value_dim=a.value.shape[-1], even=a.causal == "none" and a.left < 0 and a.right < 0 and all(b is None for b in bounds),
        bounds_only=a.scale > 0 and all(t is None for t in score_mod),
        elementwise_mask=not packed and any(t is not None for t in (None if padded else a.mask, a.bias, a.query_segments)),
        padded=padded, left_window=a.left >= 0,
        adds="nothing" if packed else _adds([t for t in (a.mask, a.bias) if t is not None and t.is_floating_point()]),
    )  # fmt: skip
    return cuda_sm90_attention_plan(direction, **problem | other)


def _is_padding(mask: torch.Tensor | None) -> bool:
    """Whether a mask hides keys from all queries and heads alike: kernels get it as bounds and a bit a key."""
    return mask is not None and mask.dtype == torch.bool and all(mask.shape[d] == 1 or mask.stride(d) == 0 for d in (1, 2))


def _adds(biases: Sequence[torch.Tensor]) -> str:
    """How kernels can read floating masks and biases: rows, as `copied` of sm90/plan.h finds, or elements."""
    if len(biases) != 1:
        return "two biases" if biases else "nothing"
    (t,), size = biases, biases[0].element_size()
    rows = t.shape[-1] > 1 and t.stride(-1) == 1 and t.storage_offset() * size % 16 == 0
    return "rows" if size < 8 and rows else "elements"


def whole_rows(t: torch.Tensor) -> torch.Tensor:
    """The tensor with rows that begin at multiples of 16 bytes and are whole multiples of 16 bytes: itself, or a copy with zeros behind
    its columns."""
    per, columns = 16 // t.element_size(), t.shape[-1]
    strided = all(s % per == 0 for n, s in zip(t.shape[:-1], t.stride()) if n > 1)
    if columns % per == 0 and strided and (t.stride(-1) == 1 or columns == 1) and t.data_ptr() % 16 == 0:
        return t
    padded = t.new_zeros((*t.shape[:-1], -(-columns // WIDTH) * WIDTH))
    padded[..., :columns] = t
    return padded


def _nothing(a: Any) -> bool:
    return a.query.numel() == 0 or a.key.numel() == 0 or 0 in longest(a)


def _rows(a: Any) -> list[torch.Tensor]:
    return [whole_rows(t) for t in (a.query, a.key, a.value)]


def _shared(a: Any) -> list[Any]:
    """What forward and backward get alike: ATTENTION_PARAMETERS of csrc/cuda/attention/attention.cpp."""
    packed = hasattr(a, "cu_seqlens_q")
    diagonals, before = None, 0
    if a.table is not None:
        row, before, _ = bucket_row(*_buckets(a), 0, a.query.device)
        diagonals = a.table.float().t()[:, row].contiguous()
    starts = (0, 0) if packed else (a.query_start, a.key_start)
    return [
        None if packed else a.mask, None if packed else a.bias, None if a.slopes is None else a.slopes.float().contiguous(), diagonals,
        *(getattr(a, name, None) for name in LENGTHS), a.cu_seqlens_q if packed else None, a.cu_seqlens_k if packed else None,
        a.dropout_seed, before, ALIGN[a.causal], a.left, a.right, *starts, *longest(a), a.scale, a.softcap, a.dropout_p,
    ]  # fmt: skip


def _buckets(a: Any) -> tuple[int, bool, int]:
    return a.table.shape[0], a.bidirectional, a.max_distance


@functools.lru_cache(maxsize=64)
def _bucket_ranges(buckets: int, bidirectional: bool, max_distance: int, device: torch.device) -> torch.Tensor:
    """(buckets, 2) int32: the diagonals lo … hi - 1 of bucket_row that have each bucket, which follow one another."""
    row, _, _ = bucket_row(buckets, bidirectional, max_distance, 0, torch.device("cpu"))
    places = [(row == u).nonzero().flatten().tolist() for u in range(buckets)]
    return torch.tensor([(p[0], p[-1] + 1) if p else (0, 0) for p in places], dtype=torch.int32, device=device)


def _extra_bytes(a: Any) -> int:
    """Copies of operands whose rows are not aligned, in backward three float32 numbers for each row, and d_query in float32 where blocks
    add to it."""
    copies = sum(
        4 * t.numel() if t.dtype == torch.float32 else 2 * t.numel() for t in (a.query, a.key, a.value) if t.shape[-1] % WIDTH
    )
    return copies + 12 * a.query.numel() // max(1, a.query.shape[-1]) + 4 * _sums(a)
