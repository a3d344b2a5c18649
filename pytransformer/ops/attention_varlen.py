# SPDX-License-Identifier: Apache-2.0
"""Attention over packed sequences: one sequence after the other, without padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, overload

import torch
from typing_extensions import Never, Unpack

from ..reference._attention import attention_varlen_forward
from ._attention_arguments import (
    biases,
    check_dtypes,
    check_entries,
    check_lengths,
    check_pages,
    check_rows,
    check_scales,
    check_sinks,
    integers,
    positions,
    refuse_gradients,
    refuse_unknown,
)
from ._backends.cpu import attention as cpu_attention
from ._backends.cuda import attention as cuda_attention
from ._backends.torch import attention as torch_attention
from ._backends.triton import attention as triton_attention
from ._core import fast_path
from ._core.op import Op
from ._core.registry import check_backend
from ._core.tensors import (
    autocast,
    check_integer,
    check_number,
    check_same,
    check_tensor,
    dropout_arguments,
    empty_in_order,
    shape_of,
)
from ._problem.attention import PackedAttention
from .masks import AlibiBias, RelativePositionBias
from .options import Alignment, PackedOptions

# Shapes: query (total_q, Hq, D), key (total_k, Hkv, D), value (total_k, Hkv, Dv), cu_seqlens (B +
# 1,) int64. The rest is as in attention. A batch element is a sequence, and batch_start is the
# index of the first.
#
# Pages, as in attention: key_lengths then stand in for cu_seqlens_k, which is None.
ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k,
Tensor? slopes, Tensor? table, Tensor? sinks, Tensor? dropout_seed,
Tensor? key_lengths, Tensor? page_table, Tensor? key_scale, Tensor? value_scale,
SymInt max_seqlen_q, SymInt max_seqlen_k, bool bidirectional, int max_distance, str causal,
SymInt left, SymInt right, SymInt global_keys, SymInt batch_start, SymInt head_start,
float scale, float softcap, float dropout_p, bool deterministic""".replace("\n", " ")


def _empty_outputs(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    total, heads, _ = a.query.shape
    lse_dtype = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    out = empty_in_order(a.query, (total, heads, a.value_dim))
    return out, torch.empty((heads, total), dtype=lse_dtype, device=a.query.device)


def _flops(a: Any) -> int:
    """Return attention's FLOPs summed over the sequences.

    Meta tensors have no lengths; every sequence then counts as the longest.
    """
    pairs = a.query.shape[0] * a.max_seqlen_k
    if a.cu_seqlens_q.device.type != "meta":
        lengths = a.key_lengths if a.cu_seqlens_k is None else a.cu_seqlens_k.diff()
        pairs = int((a.cu_seqlens_q.diff() * lengths).sum())
    flops = 2 * a.heads * pairs * (a.head_dim + a.value_dim)
    return flops // 2 if a.causal != "none" else flops


attention_varlen_op = Op(
    "attention_varlen",
    arguments=ARGUMENTS,
    outputs=("out", "lse"),
    differentiable_outputs=2,
    differentiable=("query", "key", "value", "slopes", "table", "sinks"),
    saved=("out", "lse"),
    empty_outputs=_empty_outputs,
    flops=_flops,
    problem=PackedAttention,
    family="attention",
)


@overload
def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PackedOptions],
) -> torch.Tensor: ...
@overload
def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    *,
    return_lse: bool,
    **options: Unpack[PackedOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int | None,
    *,
    causal: Alignment | None = None,
    window: tuple[int | None, int | None] | None = None,
    global_keys: int = 0,
    key_lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    bias: AlibiBias | RelativePositionBias | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    strict: bool = False,
    **unknown: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of packed sequences, bitwise equal to the padded call.

    Sequence b is rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of query and likewise of key
    and value. The op never reads rows outside every sequence; their output is 0 and their lse -inf.

    Args:
        query: (total_q, Hq, D).
        key: (total_k, Hkv, D).
        value: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) integers that start at 0 and never decrease.
            cu_seqlens_k is None with a page_table.
        max_seqlen_q, max_seqlen_k: at least the longest sequence. With a page_table max_seqlen_k
            may be None: the keys of a row of the table.
        page_table: (B, pages) int32 or int64, for chunked prefill and speculative steps. key and
            value are pools (num_pages, Hkv, page_size, D), as in :func:`pytransformer.attention`.
            No gradients.
        key_lengths: (B,) integers, the keys of each sequence; only with a page_table.
        key_scale, value_scale: the scales of pools in eight bits.
        The other arguments: as in :func:`pytransformer.attention`. Dropout counts sequences as
            batch elements.

    Returns:
        (total_q, Hq, Dv), with return_lse also lse (Hq, total_q).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.
    """
    if not (unknown or torch.compiler.is_compiling()):
        found = fast_path.entries.attention_varlen(
            query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
            window, global_keys, key_lengths, page_table, key_scale, value_scale, bias, sinks,
            softcap, scale, dropout_p, dropout_seed, return_lse, deterministic, backend, strict,
        )  # fmt: skip
        if found is not NotImplemented:
            return found
    a, backend, strict = _prepare(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        window=window, global_keys=global_keys, key_lengths=key_lengths, page_table=page_table,
        key_scale=key_scale, value_scale=value_scale, bias=bias, sinks=sinks, softcap=softcap,
        scale=scale, dropout_p=dropout_p, dropout_seed=dropout_seed,
        deterministic=deterministic, backend=backend, strict=strict, **unknown,
    )  # fmt: skip
    out, lse = attention_varlen_op(a, backend, strict)
    return (out, lse) if return_lse else out


def _prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    *,
    causal: Any = None,
    window: Any = None,
    global_keys: Any = 0,
    key_lengths: Any = None,
    page_table: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    bias: Any = None,
    sinks: Any = None,
    softcap: Any = None,
    scale: Any = None,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    strict: bool = False,
    **unknown: Any,
) -> tuple[Any, str | None, bool]:
    op, paged = "attention_varlen", page_table is not None
    refuse_unknown(op, unknown)
    check_rows(op, query, key, value, 3, 4 if paged else 3)
    query, key, value = autocast(query.device, query, key, value)
    _check_shapes(op, query, key, value, paged)
    cu_q = _offsets(op, "cu_seqlens_q", cu_seqlens_q, query)
    max_seqlen_q = check_integer(op, "max_seqlen_q", max_seqlen_q)
    if paged:
        cu_k, key_lengths, page_table, max_seqlen_k = _pages(
            op, query, key, cu_q, cu_seqlens_k, max_seqlen_k, key_lengths, page_table
        )
        key_scale, value_scale = check_scales(op, query, key, value, key_scale, value_scale)
    else:
        _refuse_without_pages(op, key_lengths, key_scale, value_scale)
        cu_k = _offsets(op, "cu_seqlens_k", cu_seqlens_k, query)
        if cu_q.shape != cu_k.shape:
            raise ValueError(
                f"{op}: cu_seqlens_q and cu_seqlens_k must have the same length, got"
                f" {shape_of(cu_q)} and {shape_of(cu_k)}"
            )
        max_seqlen_k = check_integer(op, "max_seqlen_k", max_seqlen_k)
    if isinstance(bias, torch.Tensor):
        raise TypeError(
            f"{op}: bias must be AlibiBias or RelativePositionBias; a dense bias has no packed form"
        )
    align, left, right, global_keys = positions(causal, window, global_keys)
    _, slopes, table, bidirectional, max_distance = biases(op, bias, query, query.shape[1])
    p, seed = dropout_arguments(op, dropout_p, dropout_seed, query.device)
    check_backend(op, backend)
    arguments = attention_varlen_op.Arguments(
        query, key, value, cu_q, cu_k, slopes, table, check_sinks(op, sinks, query, query.shape[1]),
        seed, key_lengths, page_table, key_scale, value_scale,
        max_seqlen_q, max_seqlen_k, bidirectional, max_distance,
        align, left, right, global_keys, 0, 0,
        query.shape[2] ** -0.5 if scale is None else check_number(op, "scale", scale),
        0.0 if softcap is None else check_number(op, "softcap", softcap, positive=True),
        p, bool(deterministic),
    )  # fmt: skip
    refuse_gradients(attention_varlen_op, arguments)
    return arguments, backend, bool(strict)


def _check_shapes(
    op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, paged: bool
) -> None:
    """Raise unless query (total_q, Hq, D), and rows or pools of keys and values, go together."""
    check_dtypes(op, query, key, value)

    def shapes() -> str:  # only for errors: torch.compile cannot print symbolic sizes
        return f"query {shape_of(query)}, key {shape_of(key)}, value {shape_of(value)}"

    if key.shape[-1] != query.shape[2] or 0 in (query.shape[2], value.shape[-1]):
        raise ValueError(
            f"{op}: query and key must have the same head size, at least 1, got {shapes()}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        same = "pages, heads and page size" if paged else "rows and heads"
        raise ValueError(f"{op}: key and value must have the same {same}, got {shapes()}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(f"{op}: query's heads must be a multiple of key's heads, got {shapes()}")


def _pages(
    op: str,
    query: torch.Tensor,
    pool: torch.Tensor,
    cu_q: torch.Tensor,
    cu_seqlens_k: Any,
    max_seqlen_k: Any,
    key_lengths: Any,
    page_table: Any,
) -> tuple[None, torch.Tensor | None, torch.Tensor, Any]:
    """Return cu_seqlens_k, key_lengths, page_table and max_seqlen_k of a call with pages."""
    if cu_seqlens_k is not None:
        raise ValueError(
            f"{op}: cu_seqlens_k must be None with page_table, got a"
            f" {type(cu_seqlens_k).__name__}; key_lengths has the length of each sequence"
        )
    batch = cu_q.shape[0] - 1
    page_table, num_keys = check_pages(op, page_table, key_lengths, batch, query, pool)
    if max_seqlen_k is not None:
        num_keys = torch.sym_min(check_integer(op, "max_seqlen_k", max_seqlen_k), num_keys)
    return None, integers("key_lengths", key_lengths, (batch,), query, op), page_table, num_keys


def _refuse_without_pages(op: str, key_lengths: Any, key_scale: Any, value_scale: Any) -> None:
    if key_lengths is not None:
        raise ValueError(
            f"{op}: key_lengths must be None without page_table, got a"
            f" {type(key_lengths).__name__}; cu_seqlens_k has the rows of each sequence"
        )
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            raise ValueError(
                f"{op}: {name} must be None without page_table, got a {type(scale).__name__};"
                " packed rows in eight bits are not supported, pools are"
            )


def _offsets(op: str, name: str, t: Any, query: torch.Tensor) -> torch.Tensor:
    """Return offsets as a contiguous int64 tensor; the op checks the values."""
    check_tensor(op, name, t, ndim=1)
    check_same(op, "query", query, name, t)
    if t.dtype.is_floating_point or t.dtype == torch.bool:
        raise TypeError(f"{op}: {name} must have an integer dtype, got {t.dtype}")
    if t.shape[0] == 0:
        raise ValueError(f"{op}: {name} must have B + 1 entries, at least one, got none")
    return t.to(torch.int64).contiguous()


def check_values(a: Any) -> None:
    """Raise ValueError if offsets or pages do not describe sequences inside the tensors."""
    if a.page_table is not None:
        check_lengths("attention_varlen", "key_lengths", a.key_lengths, a.max_seqlen_k)
        check_entries("attention_varlen", a)
    for name, cu, total, longest in (
        ("q", a.cu_seqlens_q, a.query.shape[0], a.max_seqlen_q),
        ("k", a.cu_seqlens_k, a.key.shape[0], a.max_seqlen_k),
    ):
        if cu is None:
            continue
        offsets = cu.tolist()
        lengths = [end - start for start, end in pairwise(offsets)]
        if offsets[0] != 0 or offsets[-1] > total or min(lengths, default=0) < 0:
            raise ValueError(
                f"attention_varlen: cu_seqlens_{name} must start at 0, never decrease and end at"
                f" most at {total}, got {offsets}"
            )
        if max(lengths, default=0) > longest:
            raise ValueError(
                f"attention_varlen: max_seqlen_{name} is {longest} but the longest sequence has"
                f" {max(lengths)} rows"
            )


attention_varlen_op.prepare = _prepare
attention_varlen_op.add_reference(attention_varlen_forward, check_values=check_values)
attention_varlen_op.backend(cpu_attention.backend(attention_varlen_op, check_values))
attention_varlen_op.backend(triton_attention.backend(attention_varlen_op, check_values))
attention_varlen_op.backend(cuda_attention.backend(attention_varlen_op, check_values))
attention_varlen_op.backend(torch_attention.backend(attention_varlen_op, check_values))
