# SPDX-License-Identifier: Apache-2.0
"""Attention: the public function and the raw op.

``attention`` checks its arguments, lowers them to the flat list ARGUMENTS below and calls one raw
op; docs/ops/attention.md has the mathematics. Source: Vaswani et al. (2017), section 3.2; tiling by
Dao et al., "FlashAttention" (2022).
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from typing_extensions import Never, Unpack

from ..reference._attention import attention_forward
from ._attention_arguments import (
    biases,
    block_tensors,
    causal_terms,
    check_entries,
    check_lengths,
    check_pages,
    check_rows,
    check_scales,
    check_shapes,
    check_sinks,
    dense_term,
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
from ._core.tensors import alike, autocast, check_number, dropout_arguments, empty_in_order
from ._problem.attention import PaddedAttention
from .block_mask import BlockMask
from .masks import AlibiBias, RelativePositionBias
from .options import Alignment, AttentionOptions

# Shapes: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv). mask (bool or floating)
# and bias are 4-dimensional, each dimension full or 1. slopes (Hq,), table (buckets, Hq), sinks
# (Hq,). Lengths (B,), segments (B, L) and the seed () are int64.
#
# Block masks: see _problem/blocks.py. A dense mask and a block mask exclude each other.
#
# Pages: page_table (B, pages) is int32 or int64, and key and value are pools, (pages, Hkv, page
# size, D).
#
# 8-bit key and value: key_scale and value_scale are float32 views of key.shape[:3].
#
# Window: -1 is unbounded, and global_keys is 0 without a window. softcap 0 disables the cap.
#
# Starts: absolute indices of the first batch element, query head, query and key. Causality, window,
# lengths, prefix, ALiBi, T5 and dropout use absolute indices; dense tensors and segments use local
# indices. Only dropout reads the batch and head starts, modulo 2^32: slopes, table and sinks
# contain only the call's heads.
ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias,
Tensor? slopes, Tensor? table, Tensor? sinks,
Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths,
Tensor? query_segments, Tensor? key_segments, Tensor? dropout_seed,
Tensor? block_offsets, Tensor? block_entries, Tensor? key_block_offsets, Tensor? key_block_entries,
Tensor? block_bits, Tensor? page_table, Tensor? key_scale, Tensor? value_scale,
bool bidirectional, int max_distance, str causal, SymInt left, SymInt right, SymInt global_keys,
SymInt batch_start, SymInt head_start, SymInt query_start, SymInt key_start,
float scale, float softcap, float dropout_p, bool deterministic""".replace("\n", " ")
LENGTHS = ("query_lengths", "key_lengths", "prefix_lengths")


def _empty_outputs(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, num_queries, head_dim = a.query.shape
    lse_dtype = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    out = empty_in_order(
        a.query,
        None if a.value.shape[3] == head_dim else (batch, heads, num_queries, a.value.shape[3]),
    )
    return out, a.query.new_empty((batch, heads, num_queries), dtype=lse_dtype)


def _flops(a: Any) -> int:
    """Return 4 B H Lq Lk D (2 per product), halved if causal; other masks are ignored."""
    batch, heads, num_queries, head_dim = a.query.shape
    flops = 2 * batch * heads * num_queries * a.num_keys * (head_dim + a.value.shape[3])
    return flops // 2 if a.causal != "none" else flops


attention_op = Op(
    "attention",
    arguments=ARGUMENTS,
    outputs=("out", "lse"),
    differentiable_outputs=2,
    differentiable=("query", "key", "value", "mask", "bias", "slopes", "table", "sinks"),
    saved=("out", "lse"),
    empty_outputs=_empty_outputs,
    flops=_flops,
    problem=PaddedAttention,
)


# ---- public functions


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | BlockMask | None = None,
    causal: Alignment | None = None,
    window: tuple[int | None, int | None] | None = None,
    global_keys: int = 0,
    query_lengths: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    prefix_lengths: torch.Tensor | None = None,
    query_segments: torch.Tensor | None = None,
    key_segments: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    bias: torch.Tensor | AlibiBias | RelativePositionBias | None = None,
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
    """Compute ``softmax(scale * query @ keyᵀ + bias + mask) @ value`` in linear memory.

    A key j is visible to query i if
    ``(causal OR j < prefix) AND (window OR j < global_keys) AND lengths AND segments AND mask``.
    The steps are, in order: scale, softcap, biases, masks, softmax, dropout. A query without a
    visible key has output 0, no gradient, and its sink or -inf as lse.

    Args:
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv) in one floating dtype,
            with any strides. Hq is a multiple of Hkv.
        attn_mask: broadcastable to (B, Hq, Lq, Lk) without being expanded, bool (True = attend) or
            floating (added; -inf hides; has a gradient). Also a :class:`BlockMask`, FlexAttention's
            block mask, or torch's CausalBias, which becomes ``causal``.
        causal: ``"top_left"`` (j <= i) or ``"bottom_right"`` (j <= i + Lk - Lq with each sequence's
            lengths, for decoding with a cache).
        window: (left, right), ``i + offset - left <= j <= i + offset + right``; None on a side is
            unbounded. ``causal`` sets the offset, which shifts ALiBi and T5 distances too.
        global_keys: number of leading keys inside every query's window; needs ``window``. Other
            masks still hide them.
        query_lengths, key_lengths: (B,) integers. Rows at or past the length are padding and read
            as zero.
        prefix_lengths: (B,) integers, need ``causal``. Keys before the prefix length are visible to
            every query.
        query_segments, key_segments: (B, Lq), (B, Lk) integers, both or neither. A query attends
            only to keys of an equal segment.
        page_table: (B, pages) int32 or int64. key and value are pools (num_pages, Hkv, page_size,
            D), and key j < key_lengths[b] is
            ``key[page_table[b, j // page_size], :, j % page_size]``. The op reads nothing else of
            table and pools. No gradients.
        key_scale, value_scale: float32, broadcastable to key.shape[:3], for float8_e4m3fn or int8
            key and value. The op multiplies each row by its scale; :func:`quantize_kv` returns
            both. No gradients.
        bias: a tensor broadcastable to (B, Hq, Lq, Lk), :class:`AlibiBias` or
            :class:`RelativePositionBias`; with gradient.
        sinks: (Hq,) floating; ``exp(sinks[h])`` is one more term of the softmax's denominator and
            of lse; with gradient. Zeros give off-by-one softmax, -inf disables a sink. Scale,
            softcap, biases and dropout do not change it.
        softcap: ``softcap * tanh(score / softcap)``; None disables it.
        scale: factor of the scores; default ``1 / sqrt(D)``.
        dropout_p: probability of dropping a weight.
        dropout_seed: int or int64 tensor; None draws one. A seed drops the same weights on every
            backend.
        return_lse: return lse too.
        deterministic: gradients are bitwise equal from run to run. False may be faster: on sm_90a
            the backend cuda sums d_query across blocks in any order, in a float32 copy, so its last
            bits vary. It has no effect elsewhere.
        backend: force "cuda", "triton", "cpu", "torch" (PyTorch's kernels) or "reference".
        strict: raise instead of running on the reference.

    Returns:
        (B, Hq, Lq, Dv) in query's dtype and memory order; with return_lse also the log of the
        softmax's denominator, (B, Hq, Lq).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.
    """
    if not (unknown or torch.compiler.is_compiling()):
        found = fast_path.entries.attention(
            query, key, value, attn_mask, causal, window, global_keys, query_lengths, key_lengths,
            prefix_lengths, query_segments, key_segments, page_table, key_scale, value_scale, bias,
            sinks, softcap, scale, dropout_p, dropout_seed, return_lse, deterministic, backend,
            strict,
        )  # fmt: skip
        if found is not NotImplemented:
            return found
    a, backend, strict = _prepare(
        query, key, value, attn_mask=attn_mask, causal=causal, window=window,
        global_keys=global_keys, query_lengths=query_lengths, key_lengths=key_lengths,
        prefix_lengths=prefix_lengths, query_segments=query_segments, key_segments=key_segments,
        page_table=page_table, key_scale=key_scale, value_scale=value_scale, bias=bias, sinks=sinks,
        softcap=softcap, scale=scale, dropout_p=dropout_p, dropout_seed=dropout_seed,
        deterministic=deterministic, backend=backend, strict=strict, **unknown,
    )  # fmt: skip
    out, lse = attention_op(a, backend, strict)
    return (out, lse) if return_lse else out


# ---- checks and lowering


def _prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: Any = None,
    causal: Any = None,
    window: Any = None,
    global_keys: Any = 0,
    query_lengths: Any = None,
    key_lengths: Any = None,
    prefix_lengths: Any = None,
    query_segments: Any = None,
    key_segments: Any = None,
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
    refuse_unknown("attention", unknown)
    if not (alike(query, key, value) and query.dim() == key.dim() == value.dim() == 4):
        check_rows("attention", query, key, value)
    query, key, value = autocast(query.device, query, key, value)
    batch, heads, num_queries, head_dim = check_shapes(
        query, key, value, paged=page_table is not None
    )
    num_keys = key.shape[2]
    if page_table is not None:
        page_table, num_keys = check_pages("attention", page_table, key_lengths, batch, query, key)
    key_scale, value_scale = check_scales("attention", query, key, value, key_scale, value_scale)
    full = (batch, heads, num_queries, num_keys)
    attn_mask, causal = causal_terms(
        attn_mask, full, query, causal,
        {
            "window": window, "query_lengths": query_lengths, "key_lengths": key_lengths,
            "prefix_lengths": prefix_lengths,
            "bias": None if isinstance(bias, torch.Tensor) else bias,
        },
    )  # fmt: skip
    align, left, right, global_keys = positions(causal, window, global_keys)
    if prefix_lengths is not None and align == "none":
        raise ValueError(
            'attention: prefix_lengths needs causal="top_left" or "bottom_right"; without it every'
            " key is visible"
        )
    if (query_segments is None) != (key_segments is None):
        raise ValueError(
            "attention: query_segments and key_segments go together; give both or neither"
        )
    dense, slopes, table, bidirectional, max_distance = biases("attention", bias, query, heads)
    blocks, attn_mask = block_tensors(attn_mask, full, query)
    p, seed = dropout_arguments("attention", dropout_p, dropout_seed, query.device)
    check_backend("attention", backend)
    arguments = attention_op.Arguments(
        query, key, value, dense_term("attn_mask", attn_mask, full, query),
        dense_term("bias", dense, full, query), slopes, table,
        check_sinks("attention", sinks, query, heads),
        integers("query_lengths", query_lengths, (batch,), query),
        integers("key_lengths", key_lengths, (batch,), query),
        integers("prefix_lengths", prefix_lengths, (batch,), query),
        integers("query_segments", query_segments, (batch, num_queries), query),
        integers("key_segments", key_segments, (batch, num_keys), query),
        seed, *blocks, page_table, key_scale, value_scale, bidirectional, max_distance, align, left,
        right, global_keys, 0, 0, 0, 0,
        head_dim**-0.5 if scale is None else check_number("attention", "scale", scale),
        0.0 if softcap is None else check_number("attention", "softcap", softcap, positive=True),
        p, bool(deterministic),
    )  # fmt: skip
    refuse_gradients(attention_op, arguments)
    return arguments, backend, bool(strict)


attention_op.prepare = _prepare


def check_values(a: Any) -> None:
    """Raise ValueError if lengths exceed the tensors or pages exceed the pool.

    See looks_at_values.
    """
    for name, lengths in zip(LENGTHS, (a.query_lengths, a.key_lengths, a.prefix_lengths)):
        queries = name == "query_lengths"
        end = a.query_start + a.query.shape[2] if queries else a.key_start + a.num_keys
        check_lengths("attention", name, lengths, end)
    if a.page_table is not None:
        check_entries("attention", a)


# ---- backends


def _reference_bytes(a: Any) -> int:
    """Return the bytes of scores, weights and their product with value, and of a boolean mask.

    Each is (B, Hq, Lq, Lk).
    """
    size = 8 if a.query.dtype == torch.float64 else 4
    copied = a.page_table is not None or a.key_scale is not None  # gathered, or in float32
    row = (
        0
        if not copied
        else (a.head_dim + a.value_dim) * (a.key.element_size() if a.key_scale is None else 4)
    )
    gathered = a.sequences * a.num_keys * a.key_heads * row
    return (
        a.query.shape[0] * a.query.shape[1] * a.query.shape[2] * a.num_keys * (3 * size + 1)
        + gathered
    )


attention_op.add_reference(
    attention_forward, extra_bytes=_reference_bytes, check_values=check_values
)
attention_op.backend(cpu_attention.backend(attention_op, check_values))
attention_op.backend(triton_attention.backend(attention_op, check_values))
attention_op.backend(cuda_attention.backend(attention_op, check_values))
attention_op.backend(torch_attention.backend(attention_op, check_values))
