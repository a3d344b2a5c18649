# SPDX-License-Identifier: Apache-2.0
"""Attention: the public functions, the raw ops, and what their arguments mean to every backend.

``attention`` checks its arguments, lowers them to the flat list ARGUMENTS below and
calls one raw op; see docs/ops/attention.md for the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args, overload

import torch
from typing_extensions import Unpack

from ..reference.attention import attention_forward
from ._backends.cpu import attention as cpu_attention
from ._backends.cuda import attention as cuda_attention
from ._backends.torch import attention as torch_attention
from ._backends.triton import attention as triton_attention
from ._core import lane
from ._core.options import Alignment, AttentionOptions
from ._core.registry import Op, check_backend
from ._core.tensors import (
    alike,
    autocast,
    check_choice,
    check_number,
    check_same,
    check_tensor,
    dropout_arguments,
    empty_in_order,
    shape_of,
)
from ._problem.attention import PaddedAttention
from .block_mask import BlockMask, as_block_mask
from .masks import AlibiBias, RelativePositionBias

# query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv). mask (bool or floating) and bias are 4-dimensional,
# each dimension full or 1. slopes (Hq,), table (buckets, Hq), sinks (Hq,). Lengths (B,), segments (B, L), the seed (): int64.
# Block masks: see _problem/blocks.py; a dense mask and a block mask exclude each other.
# window: -1 = unbounded. softcap 0 = none. The starts are the absolute indices of the first query and key: causality,
# window, lengths, prefix, ALiBi, T5 and dropout go by absolute index; dense tensors and segments by local index.
ARGUMENTS = """Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? table, Tensor? sinks,
Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths, Tensor? query_segments, Tensor? key_segments,
Tensor? dropout_seed, Tensor? block_offsets, Tensor? block_entries, Tensor? key_block_offsets, Tensor? key_block_entries,
Tensor? block_bits, bool bidirectional, int max_distance, str causal, SymInt left, SymInt right, SymInt query_start, SymInt key_start,
float scale, float softcap, float dropout_p, bool deterministic""".replace("\n", " ")
ALIGNMENTS = (None, *get_args(Alignment))
NO_BLOCKS = (None,) * 5
LENGTHS = ("query_lengths", "key_lengths", "prefix_lengths")
# Neither is measured yet. For decoding Triton splits the keys, which CUDA does not.
ORDER = ("triton", "cuda", "cpu", "torch", "reference")


def _empty_outputs(a: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, num_queries, head_dim = a.query.shape
    lse_dtype = torch.float64 if a.query.dtype == torch.float64 else torch.float32
    out = empty_in_order(a.query, None if a.value.shape[3] == head_dim else (batch, heads, num_queries, a.value.shape[3]))
    return out, a.query.new_empty((batch, heads, num_queries), dtype=lse_dtype)


def _flops(a: Any) -> int:
    """4 B H Lq Lk D (2 for each product), half when causal, whatever masks hide besides."""
    batch, heads, num_queries, head_dim = a.query.shape
    flops = 2 * batch * heads * num_queries * a.key.shape[2] * (head_dim + a.value.shape[3])
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
    order=ORDER,
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | BlockMask | None = None,
    causal: Alignment | None = None,
    window: tuple[int | None, int | None] | None = None,
    query_lengths: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    prefix_lengths: torch.Tensor | None = None,
    query_segments: torch.Tensor | None = None,
    key_segments: torch.Tensor | None = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Masked scaled dot-product attention, ``softmax(scale * query @ keyᵀ + bias + mask) @ value``, in linear memory.

    A key j is visible to query i if ``(causal OR j < prefix) AND window AND lengths AND segments AND mask``. Order of the
    score: scale, softcap, biases, masks, softmax, dropout. A query that sees nothing gives 0, no gradient and lse -inf, or its sink.

    Args:
        query: (B, Hq, Lq, D), float32, bfloat16, float16 or float64; any strides, as key and value.
        key: (B, Hkv, Lk, D); Hq must be a multiple of Hkv (grouped-query attention).
        value: (B, Hkv, Lk, Dv).
        attn_mask: broadcastable to (B, Hq, Lq, Lk), never expanded: bool (True = attend) or floating (added; -inf hides;
            has a gradient). Or a :class:`BlockMask`, or FlexAttention's: what it hides by blocks costs nothing.
        causal: ``"top_left"`` (j <= i) or ``"bottom_right"`` (j <= i + Lk - Lq by each sequence's own lengths: decoding
            with a cache).
        window: (left, right), ``i + offset - left <= j <= i + offset + right``; None on a side is unbounded. The offset is
            that of ``causal``, and shifts ALiBi and T5 distances too.
        query_lengths, key_lengths: (B,) integers: what lies at or past them is padding, read as zero.
        prefix_lengths: (B,) integers, needs ``causal``: the keys before it are visible to every query.
        query_segments, key_segments: (B, Lq), (B, Lk) integers, both or neither: attend only where equal.
        bias: a tensor broadcastable to (B, Hq, Lq, Lk), :class:`AlibiBias` or :class:`RelativePositionBias`; with gradient.
        sinks: (Hq,) floating: ``exp(sinks[h])`` is one more term of the softmax's denominator, in lse too; with gradient. Zeros make
            softmax off by one, -inf is no sink. Scale, softcap, biases and dropout do not touch it.
        softcap: ``softcap * tanh(score / softcap)``.
        scale: default ``1 / sqrt(D)``.
        dropout_p: probability of dropping an attention weight. The same seed drops the same weights on every backend.
        dropout_seed: int or int64 tensor; drawn from torch's generator if None.
        return_lse: return (out, lse): the natural log of the softmax's denominator, float32, (B, Hq, Lq), differentiable.
        deterministic: bitwise equal gradients from run to run. False may be faster: on sm_90a the backend cuda adds d_query across
            blocks in any order, in a float32 copy; the last bits of d_query then differ from run to run. Elsewhere it does nothing.
        backend: force ``"cuda"``, ``"triton"``, ``"cpu"``, ``"torch"`` (PyTorch's own fused kernels) or ``"reference"``; raises if that
            cannot do it.
        strict: raise rather than run on the reference.

    Returns:
        (B, Hq, Lq, Dv) in query's dtype and memory order; with return_lse a pair.

    Raises:
        TypeError, ValueError: what is wrong with which argument.
        BackendError: a forced backend cannot do this, or strict and only the reference can.

    Source: Vaswani et al. (2017), section 3.2; tiling by Dao et al., "FlashAttention" (2022).
    """
    if not torch.compiler.is_compiling():
        found = lane.attention(
            query, key, value, attn_mask, causal, window, query_lengths, key_lengths, prefix_lengths, query_segments, key_segments,
            bias, sinks, softcap, scale, dropout_p, dropout_seed, return_lse, deterministic, backend, strict,
        )  # fmt: skip
        if found is not NotImplemented:
            return found
    a, backend, strict = _prepare(
        query, key, value, attn_mask=attn_mask, causal=causal, window=window, query_lengths=query_lengths,
        key_lengths=key_lengths, prefix_lengths=prefix_lengths, query_segments=query_segments, key_segments=key_segments,
        bias=bias, sinks=sinks, softcap=softcap, scale=scale, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic,
        backend=backend, strict=strict,
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
    query_lengths: Any = None,
    key_lengths: Any = None,
    prefix_lengths: Any = None,
    query_segments: Any = None,
    key_segments: Any = None,
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
) -> tuple[Any, str | None, bool]:
    if not (alike(query, key, value) and query.dim() == key.dim() == value.dim() == 4):
        for name, t in (("query", query), ("key", key), ("value", value)):
            check_tensor("attention", name, t, floating=True, ndim=4)
            check_same("attention", "query", query, name, t)
    query, key, value = autocast(query.device, query, key, value)
    batch, heads, num_queries, head_dim = check_shapes(query, key, value)
    full = (batch, heads, num_queries, key.shape[2])
    align, left, right = positions(causal, window)
    if prefix_lengths is not None and align == "none":
        raise ValueError(
            'attention: prefix_lengths needs causal="top_left" or "bottom_right"; without it every key is visible'
        )
    if (query_segments is None) != (key_segments is None):
        raise ValueError("attention: query_segments and key_segments go together; give both or neither")
    dense, slopes, table, bidirectional, max_distance = biases("attention", bias, query, heads)
    blocks, attn_mask = _blocks(attn_mask, full, query)
    p, seed = dropout_arguments("attention", dropout_p, dropout_seed, query.device)
    check_backend("attention", backend)
    arguments = attention_op.Arguments(
        query, key, value, _dense("attn_mask", attn_mask, full, query), _dense("bias", dense, full, query), slopes, table,
        check_sinks("attention", sinks, query, heads),
        _integers("query_lengths", query_lengths, (batch,), query), _integers("key_lengths", key_lengths, (batch,), query),
        _integers("prefix_lengths", prefix_lengths, (batch,), query),
        _integers("query_segments", query_segments, (batch, num_queries), query),
        _integers("key_segments", key_segments, (batch, key.shape[2]), query),
        seed, *blocks, bidirectional, max_distance, align, left, right, 0, 0,
        head_dim**-0.5 if scale is None else check_number("attention", "scale", scale),
        0.0 if softcap is None else check_number("attention", "softcap", softcap, positive=True),
        p, bool(deterministic),
    )  # fmt: skip
    return arguments, backend, bool(strict)


attention_op.prepare = _prepare


def check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Size:
    """What (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv) have to agree on, the dtypes too; returns query's shape."""
    if not query.dtype == key.dtype == value.dtype:
        check_same("attention", "query", query, "key", key, dtype=True)
        check_same("attention", "query", query, "value", value, dtype=True)
    shape = batch, heads, _, head_dim = query.shape
    key_batch, key_heads, num_keys, key_dim = key.shape
    value_batch, value_heads, num_values, value_dim = value.shape
    wrong = None
    if key_batch != batch or value_batch != batch:
        wrong = "query, key and value must have the same batch size"
    elif key_dim != head_dim:
        wrong = "query and key must have the same head size"
    elif head_dim == 0 or value_dim == 0:
        wrong = "the head size must be at least 1"
    elif key_heads != value_heads or num_keys != num_values:
        wrong = "key and value must have the same heads and length"
    elif key_heads == 0 or heads % key_heads:
        wrong = "query's heads must be a multiple of key's heads"
    if wrong:
        raise ValueError(f"attention: {wrong}, got query {shape_of(query)}, key {shape_of(key)}, value {shape_of(value)}")
    return shape


def positions(causal: Any, window: Any) -> tuple[str, int, int]:
    """(alignment, left, right) of the raw op, -1 for unbounded."""
    check_choice("attention", "causal", causal, ALIGNMENTS)
    if window is None:
        return causal or "none", -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"attention: window must be (left, right), each an int >= 0 or None, got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)) or side < 0):
            raise ValueError(f"attention: window must be (left, right), each an int >= 0 or None, got {window!r}")
    left, right = (-1 if side is None else side for side in window)
    return causal or "none", left, right


def biases(
    op: str, bias: Any, query: torch.Tensor, heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, bool, int]:
    """(dense, slopes, table, bidirectional, max_distance) of the raw op."""
    if bias is None or isinstance(bias, torch.Tensor):
        return bias, None, None, False, 0
    if isinstance(bias, AlibiBias):
        check_tensor(op, "bias.slopes", bias.slopes, floating=True, ndim=1)
        check_same(op, "query", query, "bias.slopes", bias.slopes)
        if bias.slopes.shape[0] != heads:
            raise ValueError(f"{op}: bias.slopes must have one slope per query head, {heads}, got {bias.slopes.shape[0]}")
        return None, bias.slopes, None, False, 0
    if isinstance(bias, RelativePositionBias):
        table, distance = bias.table, bias.max_distance
        check_tensor(op, "bias.table", table, floating=True, ndim=2)
        check_same(op, "query", query, "bias.table", table)
        least = 4 if bias.bidirectional else 2
        if table.shape[1] != heads or table.shape[0] < least or (bias.bidirectional and table.shape[0] % 2):
            even = "an even number of, " if bias.bidirectional else ""
            raise ValueError(
                f"{op}: bias.table must be (buckets, Hq) with {even}at least {least} buckets and {heads} heads, got {shape_of(table)}"
            )
        exact = table.shape[0] // (4 if bias.bidirectional else 2)
        if isinstance(distance, bool) or not isinstance(distance, int) or not exact < distance < 2**31:
            raise ValueError(
                f"{op}: bias.max_distance must be an int greater than {exact} for {table.shape[0]} buckets, got {distance!r}"
            )
        return None, None, table, bool(bias.bidirectional), distance
    raise TypeError(f"{op}: bias must be a Tensor, AlibiBias or RelativePositionBias, got {type(bias).__name__}")


def check_sinks(op: str, sinks: Any, query: torch.Tensor, heads: int) -> torch.Tensor | None:
    """The sinks, one for each query head."""
    if sinks is None:
        return None
    check_tensor(op, "sinks", sinks, floating=True, ndim=1)
    check_same(op, "query", query, "sinks", sinks)
    if sinks.shape[0] != heads:
        raise ValueError(f"{op}: sinks must have one logit per query head, {heads}, got {sinks.shape[0]}")
    return sinks


def _blocks(mask: Any, full: tuple[int, ...], query: torch.Tensor) -> tuple[Sequence[torch.Tensor | None], Any]:
    """(the tensors of a block mask, or Nones; the mask if it is another)."""
    blocks = as_block_mask(mask)
    if blocks is None:
        return NO_BLOCKS, mask
    check_same("attention", "query", query, "attn_mask", blocks.blocks.offsets)
    if any(n not in (1, m) for n, m in zip(blocks.shape[:2], full[:2])) or blocks.shape[2:] != full[2:]:
        raise ValueError(
            f"attention: attn_mask is a block mask of {blocks.shape}; wanted (B or 1, Hq or 1, Lq, Lk) of {tuple(full)}"
        )
    return blocks.blocks, None


def _dense(name: str, t: Any, full: tuple[int, ...], query: torch.Tensor) -> torch.Tensor | None:
    """A mask or bias as a view of 4 dimensions, each full or 1."""
    if t is None:
        return None
    check_tensor("attention", name, t)
    check_same("attention", "query", query, name, t)
    if not (t.dtype.is_floating_point or (name == "attn_mask" and t.dtype == torch.bool)):
        allowed = "bool or floating" if name == "attn_mask" else "floating"
        raise TypeError(f"attention: {name} must be {allowed}, got {t.dtype}")
    if t.dtype.is_floating_point:
        check_tensor("attention", name, t, floating=True)
    if t.dim() > 4 or any(n not in (1, m) for n, m in zip(t.shape[::-1], full[::-1])):
        raise ValueError(f"attention: {name} of shape {shape_of(t)} does not broadcast to (B, Hq, Lq, Lk) = {tuple(full)}")
    return t[(None,) * (4 - t.dim())] if t.dim() < 4 else t


def _integers(name: str, t: Any, shape: tuple[int, ...], query: torch.Tensor) -> torch.Tensor | None:
    """Lengths or segments as a contiguous int64 tensor of this shape. Values are checked inside the op."""
    if t is None:
        return None
    check_tensor("attention", name, t)
    check_same("attention", "query", query, name, t)
    if t.dtype.is_floating_point or t.dtype == torch.bool or t.dtype.is_complex:
        raise TypeError(f"attention: {name} must have an integer dtype, got {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"attention: {name} must have shape {shape}, got {shape_of(t)}")
    return t.to(torch.int64).contiguous()


def check_values(a: Any) -> None:
    """ValueError if lengths lie outside the tensors. See looks_at_values."""
    for name, lengths in zip(LENGTHS, (a.query_lengths, a.key_lengths, a.prefix_lengths)):
        if lengths is not None and lengths.numel():
            queries = name == "query_lengths"
            end = a.query_start + a.query.shape[2] if queries else a.key_start + a.key.shape[2]
            low, high = lengths.min().item(), lengths.max().item()
            if low < 0 or high > end:
                raise ValueError(f"attention: {name} must be between 0 and {end}, got {low if low < 0 else high}")


# ---- backends


def _reference_bytes(a: Any) -> int:
    """Scores, weights and their product with value keep three (B, Hq, Lq, Lk) matrices alive, and a boolean one."""
    size = 8 if a.query.dtype == torch.float64 else 4
    return a.query.shape[0] * a.query.shape[1] * a.query.shape[2] * a.key.shape[2] * (3 * size + 1)


attention_op.add_reference(attention_forward, extra_bytes=_reference_bytes, check_values=check_values)
attention_op.backend(cpu_attention.backend(attention_op, check_values))
attention_op.backend(triton_attention.backend(attention_op, check_values))
attention_op.backend(cuda_attention.backend(attention_op, check_values))
attention_op.backend(torch_attention.backend(attention_op, check_values))
