# SPDX-License-Identifier: Apache-2.0
"""Checks and lowering of attention's keywords to raw-op arguments, padded and packed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import torch

from ..reference.eight_bit import LIMITS
from ._core.tensors import (
    as_integer,
    check_choice,
    check_integer,
    check_same,
    check_tensor,
    shape_of,
)
from .block_mask import as_block_mask
from .masks import MAX_BUCKETS, AlibiBias, RelativePositionBias
from .options import Alignment

EIGHT_BITS = tuple(LIMITS)
ALIGNMENTS = (None, *get_args(Alignment))
NO_BLOCKS = (None,) * 5


def check_rows(op: str, query: Any, key: Any, value: Any, ndim: int = 4, key_ndim: int = 4) -> None:
    """Raise unless the tensors have these dimensions, one device and supported dtypes.

    Keys and values of four dimensions may be in eight bits.
    """
    for name, t, dims in (
        ("query", query, ndim),
        ("key", key, key_ndim),
        ("value", value, key_ndim),
    ):
        eight = name != "query" and isinstance(t, torch.Tensor) and t.dtype in EIGHT_BITS
        check_tensor(op, name, t, floating=not (eight and dims == 4), ndim=dims)
        check_same(op, "query", query, name, t)


def check_scales(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_scale: Any,
    value_scale: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scales of 8-bit keys and values as views of key.shape[:3].

    Other dtypes have no scales and give (None, None).
    """
    both = (("key_scale", key_scale), ("value_scale", value_scale))
    if key.dtype not in EIGHT_BITS:
        for name, t in both:
            if t is not None:
                of = name.removesuffix("_scale")
                raise ValueError(
                    f"{op}: {name} belongs to a {of} in float8_e4m3fn or int8, and {of} is"
                    f" {key.dtype}; leave it out"
                )
        return None, None
    full, views = tuple(key.shape[:3]), []
    for name, t in both:
        if t is None:
            raise ValueError(
                f"{op}: {name.removesuffix('_scale')} is {key.dtype} and needs {name};"
                " quantize_kv makes rows and scales, and torch.ones(()) means that the numbers"
                " stand for themselves"
            )
        check_tensor(op, name, t)
        check_same(op, "query", query, name, t)
        if t.dtype != torch.float32:
            raise TypeError(f"{op}: {name} must be float32, got {t.dtype}")
        if t.dim() > 3 or any(n not in (m, 1) for n, m in zip(t.shape[::-1], full[::-1])):
            raise ValueError(
                f"{op}: {name} of shape {shape_of(t)} does not broadcast to key's first three,"
                f" {full}"
            )
        views.append(t.expand(full))
    return views[0], views[1]


def refuse_gradients(op: Any, arguments: Any) -> None:
    """Raise ValueError if a call needs a gradient through pages or 8-bit keys and values."""
    paged, scales = (
        arguments.page_table is not None,
        [t for t in (arguments.key_scale, arguments.value_scale) if t is not None],
    )
    learned = torch.is_grad_enabled() and any(t.requires_grad for t in scales)
    if not (paged or scales) or not (learned or op._needs_gradient(arguments)):
        return
    if paged:
        raise ValueError(
            f"{op.name}: page_table has no gradients; call it under torch.no_grad(), or gather the"
            " pages and leave page_table out"
        )
    raise ValueError(
        f"{op.name}: keys and values in eight bits have no gradients; call it under"
        " torch.no_grad(), or give them as key.float() * key_scale[..., None], without the scales"
    )


# How arguments of PyTorch, FlexAttention and flash-attn are expressed here.
PACKED_ELSEWHERE = {
    "is_causal": 'use causal="top_left"',
    "dropout": "use dropout_p",
    "enable_gqa": "leave it out: shapes decide, Hq is a multiple of Hkv",
    "score_mod": "use softcap, or bias=AlibiBias(...) or RelativePositionBias(...)",
    "window_size": "use window=(left, right), None for an unbounded side",
    "softmax_scale": "use scale",
    "alibi_slopes": "use bias=AlibiBias(slopes)",
    "block_table": "use page_table",
}
ELSEWHERE = PACKED_ELSEWHERE | {
    "mask": "use attn_mask",
    "key_padding_mask": "use key_lengths, or attn_mask of shape (B, 1, 1, Lk), True to attend",
    "score_mod": "add a tensor by bias=, or use softcap, AlibiBias or RelativePositionBias",
    "mask_mod": "use attn_mask=BlockMask.from_function(...)",
    "block_mask": "use attn_mask",
    "cu_seqlens_q": "use attention_varlen",
}


def refuse_unknown(op: str, unknown: Collection[str]) -> None:
    """Raise TypeError for keywords that the op does not have, with the name that it uses."""
    if not unknown:
        return
    hints = ELSEWHERE if op == "attention" else PACKED_ELSEWHERE
    name = min(unknown, key=lambda name: name not in hints)
    hint = hints.get(name, f"help(pytransformer.{op}) lists the arguments")
    raise TypeError(f"{op}: unexpected argument {name!r}; {hint}")


def check_dtypes(op: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise unless query, key and value share a dtype, or key and value one of eight bits."""
    if key.dtype in EIGHT_BITS or value.dtype in EIGHT_BITS:
        check_same(op, "key", key, "value", value, dtype=True)
        if query.dtype == torch.float64:
            raise TypeError(
                f"{op}: with a key in {key.dtype} query must be float32, bfloat16 or float16,"
                f" got {query.dtype}"
            )
    elif not query.dtype == key.dtype == value.dtype:
        check_same(op, "query", query, "key", key, dtype=True)
        check_same(op, "query", query, "value", value, dtype=True)


def check_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, paged: bool = False
) -> torch.Size:
    """Check that query, key and value agree in shape and dtype; return query's shape.

    The shapes are (B, Hq, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv). With ``paged`` key and
    value are pools, (num_pages, Hkv, page_size, D).
    """
    check_dtypes("attention", query, key, value)
    shape = batch, heads, _, head_dim = query.shape
    key_batch, key_heads, num_keys, key_dim = key.shape
    value_batch, value_heads, num_values, value_dim = value.shape
    wrong = None
    if key_batch != (value_batch if paged else batch) or value_batch != key_batch:
        wrong = (
            "key and value must have as many pages"
            if paged
            else "query, key and value must have the same batch size"
        )
    elif key_dim != head_dim:
        wrong = "query and key must have the same head size"
    elif head_dim == 0 or value_dim == 0:
        wrong = "the head size must be at least 1"
    elif key_heads != value_heads or num_keys != num_values:
        wrong = f"key and value must have the same heads and {'page size' if paged else 'length'}"
    elif key_heads == 0 or heads % key_heads:
        wrong = "query's heads must be a multiple of key's heads"
    if wrong:
        raise ValueError(
            f"attention: {wrong}, got query {shape_of(query)}, key {shape_of(key)}, value"
            f" {shape_of(value)}"
        )
    return shape


def check_pages(
    op: str, table: Any, key_lengths: Any, batch: int, query: torch.Tensor, pool: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return the contiguous page table and the number of keys that a row of it addresses.

    The op checks the table's values.
    """
    check_tensor(op, "page_table", table)
    check_same(op, "query", query, "page_table", table)
    if table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: page_table must be int32 or int64, got {table.dtype}")
    if table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(
            f"{op}: page_table must have shape (B, pages), B = {batch}, got {shape_of(table)}"
        )
    if key_lengths is None:
        raise ValueError(
            f"{op}: page_table needs key_lengths; they select the pages of the table that are a"
            " sequence's"
        )
    if pool.shape[2] == 0:
        raise ValueError(
            f"{op}: with page_table key and value are pools (num_pages, Hkv, page_size, D),"
            f" page_size at least 1, got key {shape_of(pool)}"
        )
    return table.contiguous(), table.shape[1] * pool.shape[2]


def check_lengths(op: str, name: str, lengths: torch.Tensor | None, end: int) -> None:
    """Raise ValueError unless all lengths are between 0 and ``end``."""
    if lengths is None or not lengths.numel():
        return
    low, high = lengths.min().item(), lengths.max().item()
    if low < 0 or high > end:
        raise ValueError(
            f"{op}: {name} must be between 0 and {end}, got {low if low < 0 else high}"
        )


def check_entries(op: str, a: Any) -> None:
    """Raise ValueError if the table names a page outside the pool for a key in use."""
    wrong = a.pages_used & ((a.page_table < 0) | (a.page_table >= a.key.shape[0]))
    if wrong.any():
        b, n = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: page_table[{b}, {n}] must be a page from 0 to {a.key.shape[0] - 1},"
            f" got {a.page_table[b, n].item()}"
        )


def positions(causal: Any, window: Any, global_keys: Any) -> tuple[str, int, int, int]:
    """Return (alignment, left, right, global keys) of the raw op; -1 means unbounded.

    Global keys need a window.
    """
    hint = "; use 'top_left' for as many queries as keys" if causal is True else ""
    check_choice("attention", "causal", causal, ALIGNMENTS, hint)
    global_keys = check_integer("attention", "global_keys", global_keys)
    sides = (None, None) if window is None else window
    found = (
        [None if side is None else as_integer(side) for side in sides]
        if isinstance(sides, (tuple, list))
        else []
    )
    if len(found) != 2 or any(
        number is None or number < 0 for side, number in zip(sides, found) if side is not None
    ):
        raise ValueError(
            f"attention: window must be (left, right), each an int >= 0 or None, got {window!r};"
            " None leaves a side unbounded"
        )
    if found == [None, None] and global_keys != 0:
        raise ValueError(
            "attention: global_keys must be left out without a window, which alone hides keys, got"
            f" {global_keys!r}"
        )
    left, right = (-1 if side is None else side for side in found)  # a side may be a SymInt
    return causal or "none", left, right, global_keys


def biases(
    op: str, bias: Any, query: torch.Tensor, heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, bool, int]:
    """Return (dense, slopes, table, bidirectional, max_distance) of the raw op."""
    if bias is None or isinstance(bias, torch.Tensor):
        return bias, None, None, False, 0
    if isinstance(bias, AlibiBias):
        check_tensor(op, "bias.slopes", bias.slopes, floating=True, ndim=1)
        check_same(op, "query", query, "bias.slopes", bias.slopes)
        if bias.slopes.shape[0] != heads:
            raise ValueError(
                f"{op}: bias.slopes must have one slope per query head, {heads}, got"
                f" {bias.slopes.shape[0]}"
            )
        return None, bias.slopes, None, False, 0
    if isinstance(bias, RelativePositionBias):
        table, distance = bias.table, bias.max_distance
        check_tensor(op, "bias.table", table, floating=True, ndim=2)
        check_same(op, "query", query, "bias.table", table)
        least = 4 if bias.bidirectional else 2
        if table.shape[0] > MAX_BUCKETS:
            raise ValueError(
                f"{op}: bias.table must have at most {MAX_BUCKETS:,} buckets, got"
                f" {table.shape[0]:,}"
            )
        if (
            table.shape[1] != heads
            or table.shape[0] < least
            or (bias.bidirectional and table.shape[0] % 2)
        ):
            even = "an even number of, " if bias.bidirectional else ""
            raise ValueError(
                f"{op}: bias.table must be (buckets, Hq) with {even}at least {least} buckets and"
                f" {heads} heads, got {shape_of(table)}"
            )
        exact = table.shape[0] // (4 if bias.bidirectional else 2)
        found = as_integer(distance)
        if found is None or not exact < found < 2**31:
            raise ValueError(
                f"{op}: bias.max_distance must be an int greater than {exact} for "
                f"{table.shape[0]} buckets, and below 2**31, got {distance!r}"
            )
        return None, None, table, bool(bias.bidirectional), found
    raise TypeError(
        f"{op}: bias must be a Tensor, AlibiBias or RelativePositionBias, got {type(bias).__name__}"
    )


def check_sinks(op: str, sinks: Any, query: torch.Tensor, heads: int) -> torch.Tensor | None:
    """Return the sinks, one logit per query head."""
    if sinks is None:
        return None
    check_tensor(op, "sinks", sinks, floating=True, ndim=1)
    check_same(op, "query", query, "sinks", sinks)
    if sinks.shape[0] != heads:
        raise ValueError(
            f"{op}: sinks must have one logit per query head, {heads}, got {sinks.shape[0]}"
        )
    return sinks


def as_causal_bias(mask: Any) -> Any:
    """Return the mask if it is a CausalBias of torch.nn.attention, else None.

    No CausalBias exists before its module is loaded.
    """
    module = sys.modules.get("torch.nn.attention.bias")
    return mask if module is not None and isinstance(mask, module.CausalBias) else None


def causal_terms(
    mask: Any, full: tuple[int, ...], query: torch.Tensor, causal: Any, others: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return (attn_mask, causal) with a CausalBias of torch.nn.attention lowered to ``causal``.

    ``causal`` also aligns windows, lengths and position biases, and a prefix overrides it. If one
    of the arguments in ``others`` would change the result, the bias becomes a boolean (Lq, Lk)
    mask:

        upper left, Lq = 2, Lk = 4      lower right
            1 0 0 0                         1 1 1 0
            1 1 0 0                         1 1 1 1
    """
    bias = as_causal_bias(mask)
    if bias is None:
        return mask, causal
    num_queries, num_keys = full[2:]
    if (bias.seq_len_q, bias.seq_len_kv) != (num_queries, num_keys):
        raise ValueError(
            f"attention: attn_mask must be a CausalBias of (Lq, Lk) = ({num_queries}, {num_keys}), "
            f"got one of ({bias.seq_len_q}, {bias.seq_len_kv})"
        )
    offset = 0 if bias.variant.name == "UPPER_LEFT" else num_keys - num_queries
    align = "bottom_right" if offset else "top_left"
    aligned = [name for name, value in others.items() if value is not None]
    differs = bool(aligned) if offset else "prefix_lengths" in aligned
    if causal in (None, align) and not differs:
        return None, align
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    return visible.tril(offset), causal


def block_tensors(
    mask: Any, full: tuple[int, ...], query: torch.Tensor
) -> tuple[Sequence[torch.Tensor | None], Any]:
    """Return (tensors of a block mask or Nones, the mask if it is not a block mask)."""
    blocks = as_block_mask(mask)
    if blocks is None:
        return NO_BLOCKS, mask
    check_same("attention", "query", query, "attn_mask", blocks.blocks.offsets)
    if (
        any(n not in (m, 1) for n, m in zip(blocks.shape[:2], full[:2]))
        or blocks.shape[2:] != full[2:]
    ):
        raise ValueError(
            "attention: attn_mask must be a block mask of (B or 1, Hq or 1, Lq, Lk) of"
            f" {tuple(full)}, got {blocks.shape}"
        )
    return blocks.blocks, None


def dense_term(
    name: str, t: Any, full: tuple[int, ...], query: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask or bias as a 4-dimensional view whose dimensions are full or 1."""
    if t is None:
        return None
    if name == "attn_mask" and callable(t) and not isinstance(t, torch.Tensor):
        raise TypeError(
            f"attention: attn_mask must be a Tensor, got {type(t).__name__}; build a mask from a"
            " function with BlockMask.from_function"
        )
    check_tensor("attention", name, t)
    check_same("attention", "query", query, name, t)
    if not (t.dtype.is_floating_point or (name == "attn_mask" and t.dtype == torch.bool)):
        allowed = "bool or floating" if name == "attn_mask" else "floating"
        hint = "; use .bool(), or key_lengths for padding" if name == "attn_mask" else ""
        raise TypeError(f"attention: {name} must be {allowed}, got {t.dtype}{hint}")
    if t.dtype.is_floating_point:
        check_tensor("attention", name, t, floating=True)
    if t.dim() > 4 or any(n not in (m, 1) for n, m in zip(t.shape[::-1], full[::-1])):
        raise ValueError(
            f"attention: {name} of shape {shape_of(t)} does not broadcast to (B, Hq, Lq, Lk) ="
            f" {tuple(full)}"
        )
    return t[(None,) * (4 - t.dim())] if t.dim() < 4 else t


def integers(
    name: str, t: Any, shape: tuple[int, ...], query: torch.Tensor, op: str = "attention"
) -> torch.Tensor | None:
    """Return lengths or segments as a contiguous int64 tensor; the op checks the values."""
    if t is None:
        return None
    check_tensor(op, name, t)
    check_same(op, "query", query, name, t)
    if t.dtype.is_floating_point or t.dtype == torch.bool or t.dtype.is_complex:
        raise TypeError(f"{op}: {name} must have an integer dtype, got {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {shape_of(t)}")
    return t.to(torch.int64).contiguous()
