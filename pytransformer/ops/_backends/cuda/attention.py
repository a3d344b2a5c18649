# SPDX-License-Identifier: Apache-2.0
"""The backend ``cuda`` of attention and attention_varlen.

It allocates tensors and calls csrc/cuda/attention.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._core.op import Op
from ..._core.registry import Backend
from ..._core.tensors import last_contiguous
from ..._problem.attention import BLOCKS, LISTING, AttentionProblem, Listing, bind
from ...masks import bucket_row
from ..gpu.attention import gradients, no_pairs, no_pairs_gradients, outputs, why_not_sizes
from . import library as cuda_library

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# low limits, so that tests run with and without lists
LISTING_EMULATED = Listing(block=LISTING.block, min_blocks=2, min_pairs=1)
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}
SUMS = ("mask", "bias", "slopes", "table", "sinks")
MADE_BY = {  # pass -> the gradients that it computes
    "bwd_fused": "d_query, added across blocks, d_key and d_value", "bwd_dq": "d_query",
    "bwd_dkdv": "d_key and d_value",
}  # fmt: skip


def backend(op: Op, check_values: Callable[[AttentionProblem], None]) -> Backend:
    """Return the backend for an op with attention's argument names."""

    def forward(a: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = outputs(op, a, check_values)
        if a.empty:
            return no_pairs(op, a, out, lse)
        _call("attention_fwd", a, **_rows(a), out=out, lse=lse)
        return out, lse

    def backward(
        a: AttentionProblem,
        grads: Sequence[torch.Tensor | None],
        saved: Any,
        wanted: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        if a.page_table is not None or a.key_scale is not None:
            raise ValueError(
                "attention:"
                f" {'keys in eight bits have' if a.page_table is None else 'page_table has'} no"
                " gradients"
            )
        out, lse = saved
        grad_out, grad_lse = grads
        results, by_name = gradients(op, a, wanted)
        if a.empty:
            no_pairs_gradients(a, by_name, lse, grad_lse)
            return results
        # Sums over sequences are float32 for any dtype. The kernel writes dense gradients in place
        # if it supports their dtype.
        sums = {
            n: torch.empty(r.shape, dtype=torch.float32, device=r.device)
            for n, r in by_name.items()
            if n in a.by_head
        }
        sums |= {
            n: r if r.dtype in DTYPES else r.float()
            for n, r in by_name.items()
            if n in ("mask", "bias")
        }
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype)
        ranges = None if "table" not in sums else _bucket_ranges(*a.buckets, a.query.device)
        _call(
            "attention_bwd", a, **_rows(a), grad_out=whole_rows(grad_out),
            grad_lse=None if grad_lse is None else grad_lse.contiguous(),
            out=last_contiguous(out), lse=lse.contiguous(), bucket_ranges=ranges,
            **{raw: by_name.get(name) for raw, name in GRADIENTS.items()},
            **{f"d{name}": sums.get(name) for name in SUMS},
        )  # fmt: skip
        for name, total in sums.items():
            if total is not by_name[name]:
                by_name[name].copy_(total)
        return results

    return Backend(
        "cuda", forward, backward, why_not, _extra_bytes, note=_note, recorded=cuda_library.recorded
    )


def why_not(a: AttentionProblem) -> str | None:
    """Return why the kernels do not support the problem, or None."""
    if (reason := cuda_library.why_not("attention_fwd", a.query.device)) is not None:
        return reason
    if a.query.dtype not in DTYPES:
        return (
            f"float32, bfloat16 or float16, got {str(a.query.dtype).removeprefix('torch.')}; the"
            " backend reference has it"
        )
    return why_not_sizes(a) or _why_not_blocks(a)


def _why_not_blocks(a: AttentionProblem) -> str | None:
    """Return why the kernels do not support the block mask, or None.

    A tile of the kernels must lie within one block.
    """
    if a.blocks is None or a.empty:
        return None
    if a.key_start % 32:
        return f"block masks with a key_start that is a multiple of 32, got {a.key_start}"
    plan = _plan(a)
    least, size = plan["least_block"] if plan else (0, 0), a.blocks.block_size
    if size[0] >= least[0] and size[1] >= least[1]:
        return None
    wanted = (
        f"{least[0]} x {least[1]} pairs or more for {str(a.query.dtype).removeprefix('torch.')} of"
        " this head size"
    )
    return (
        f"block masks whose blocks have {wanted}, got {size[0]} x {size[1]}: make the mask with a"
        " block_size of 128"
    )


def _note(a: AttentionProblem) -> str | None:
    """Return the kernels that run on a GPU with sm_90a kernels, and the share of a mask that runs.

    The text assumes that all tensors have gradients.
    """
    plan = _plan(a)
    share = (
        a.blocks.note
        if a.blocks
        else a.lists_note(_listing())
        if plan and plan["lists_mask"]
        else None
    )
    mask = f"attn_mask: {share}" if share else None
    if plan is None or not cuda_library.runs_sm90a(a.query.device):
        split = (
            f"cuda: keys split over up to {plan['splits']} blocks"
            if plan and plan["splits"] > 1
            else None
        )
        return "; ".join(part for part in (split, mask) if part) or None
    told = [
        f"{MADE_BY.get(name, name)} by the"
        f" {f'portable kernels: {reason}' if reason else 'kernels for sm_90a'}"
        for name, reason in plan["passes"].items()
    ]
    return "; ".join(["cuda: " + "; ".join(told), *([mask] if mask else [])])


def _plan(a: AttentionProblem) -> dict[str, Any] | None:
    """Return the plan of a call and its backward from csrc/cuda/attention/plan.h, or None if empty.

    - ``passes``: for each pass, the reason why no sm_90a kernel runs it, or None.
    - ``dq_accum``: number of float32 elements of the copy of d_query that blocks sum into, or 0 if
      a single block computes each row.
    - ``least_block``: minimum queries and keys of a block of a block mask.
    - ``lists_mask``: true if forward supports lists of a dense mask's blocks.
    - ``splits``: maximum number of KV splits of the longest sequence, or 0 without split KV.
    - ``workspace``: number of float32 elements of the splits' partials and counters.
    """
    if a.empty or cuda_library.why_not("attention_plan", a.query.device) is not None:
        return None
    return json.loads(_call("attention_plan", a))


def whole_rows(t: torch.Tensor, multiple: int = 1) -> torch.Tensor:
    """Return the tensor with 16-byte aligned rows whose length is a multiple of 16 bytes.

    The number of columns is also a multiple of ``multiple``, a power of two. The result is t, or a
    copy padded with zeros.
    """
    per, columns = 16 // t.element_size(), t.shape[-1]
    strided = all(s % per == 0 for n, s in zip(t.shape[:-1], t.stride()) if n > 1)
    whole = max(per, multiple)
    if (
        columns % whole == 0
        and strided
        and (t.stride(-1) == 1 or columns == 1)
        and t.data_ptr() % 16 == 0
    ):
        return t
    padded = t.new_zeros((*t.shape[:-1], -(-columns // whole) * whole))
    padded[..., :columns] = t
    return padded


def _rows(a: AttentionProblem) -> dict[str, torch.Tensor]:
    """Return query, key and value as kernels read them.

    8-bit rows are read 16 columns at a time, and query rows have the same length.
    """
    least = _columns_of_a_piece(a)
    return {name: whole_rows(getattr(a, name), least) for name in ("query", "key", "value")}


def _columns_of_a_piece(a: AttentionProblem) -> int:
    return 1 if a.key_scale is None else 16


def _call(name: str, a: AttentionProblem, **given: Any) -> Any:
    diagonals, before = None, 0
    if a.table is not None:
        row, before, _ = bucket_row(*a.buckets, 0, a.query.device)
        diagonals = a.table.float().t()[:, row].contiguous()
    given |= {
        "diagonals": diagonals, "before": before, "list_mask": a.lists_mask(_listing()),
        "device": 0, "stream": 0,
    }  # fmt: skip
    if a.blocks is not None:
        given |= {name: getattr(a, name).contiguous() for name in BLOCKS}
    if a.packed and a.page_table is not None:
        # full rows of the table; key_lengths shorten them, so no kernel needs another case
        given["cu_seqlens_k"] = a.num_keys * torch.arange(a.sequences + 1, device=a.query.device)
    arguments = bind(cuda_library.raw(name), a, given)
    return cuda_library.call(name, a.query.device, *arguments[:-2])


def _listing() -> Listing:
    return LISTING_EMULATED if cuda_library.emulating() else LISTING


@functools.lru_cache(maxsize=64)
def _bucket_ranges(
    buckets: int, bidirectional: bool, max_distance: int, device: torch.device
) -> torch.Tensor:
    """Return (buckets, 2) int32, the half-open range of bucket_row's diagonals of each bucket."""
    row, _, _ = bucket_row(buckets, bidirectional, max_distance, 0, torch.device("cpu"))
    places = [(row == u).nonzero().flatten().tolist() for u in range(buckets)]
    return torch.tensor(
        [(p[0], p[-1] + 1) if p else (0, 0) for p in places], dtype=torch.int32, device=device
    )


def _extra_bytes(a: AttentionProblem) -> int:
    """Return the bytes of all buffers.

    These are copies of unaligned operands, split-KV partials, in backward three float32 numbers per
    row and dq_accum, and the lists of a dense mask's blocks.
    """
    least = _columns_of_a_piece(a)
    copied = (
        t for t in (a.query, a.key, a.value) if t.shape[-1] % max(least, 16 // t.element_size())
    )
    copies = sum(t.numel() * t.element_size() for t in copied)
    plan = _plan(a)
    lists = a.lists_bytes(_listing()) if plan and plan["lists_mask"] else 0
    scratch = plan["dq_accum"] + plan["workspace"] if plan else 0
    return copies + 12 * a.query.numel() // max(1, a.query.shape[-1]) + 4 * scratch + lists
