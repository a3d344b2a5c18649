# SPDX-License-Identifier: Apache-2.0
"""Wrong attentions; see `faults`."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pytransformer.ops._problem.blocks import FULL

from .faults import BACKWARD_FAULTS as FAULTS_OF_ANY_BACKWARD
from .faults import (
    FAITHFUL,
    BackwardFault,
    Fault,
    Forward,
    Outputs,
    as_contiguous,
    patching,
    replacing,
    value_of,
)

source = importlib.import_module("pytransformer.reference._attention")
_patching = partial(patching, source)

FAULTS: dict[str, Fault] = {}


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__.strip("_")] = function
    return function


def _torch_with(**names: Callable[..., Any]) -> Fault:
    """Return a fault that replaces functions of torch within the reference."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return names.get(name) or getattr(torch, name)

    def fault(a: Any, attend: Forward) -> Outputs:
        with mock.patch.object(source, "torch", Torch()):
            return attend(a)

    return fault


def _both(outer: Fault, inner: Fault) -> Fault:
    return lambda a, attend: outer(a, lambda b: inner(b, attend))


def _floating(t: Tensor | None) -> bool:
    return t is not None and t.is_floating_point()


def _if_floating(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda a: change(a.mask) if _floating(a.mask) else a.mask


def _if_bool(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda a: a.mask if _floating(a.mask) else change(a.mask)


# ---- scores

FAULTS |= {
    "faithful": FAITHFUL,
    "scale_off_by_0.4_percent": replacing(scale=lambda a: a.scale * 1.004),
    "scale_always_default": replacing(scale=lambda a: a.query.shape[-1] ** -0.5),
    "scale_into_rounded_query": replacing(query=lambda a: a.query * a.scale, scale=lambda a: 1.0),
    "softcap_ignored": replacing(softcap=lambda a: 0.0),
    "softcap_without_derivative": _torch_with(tanh=lambda x: value_of(torch.tanh(x), x)),
    "float_mask_rounded_to_half": replacing(
        mask=_if_floating(lambda m: value_of(m.half().to(m.dtype), m))
    ),
    "bias_of_first_head": replacing(bias=lambda a: a.bias[:, :1]),
    "bias_detached": replacing(bias=lambda a: a.bias.detach()),
    "mask_detached": replacing(mask=lambda a: a.mask.detach()),
    "alibi_sign": replacing(slopes=lambda a: -a.slopes),
    "alibi_gradient_of_next_head": replacing(slopes=lambda a: value_of(a.slopes, a.slopes.roll(1))),
    "t5_direction": _patching(buckets_of=lambda f, relative, *x: f(-relative, *x)),
    "t5_bucket_off_by_one": _patching(
        buckets_of=lambda f, relative, n, *x: (f(relative, n, *x) + 1).clamp(max=n - 1)
    ),
    "t5_max_distance_off": _patching(
        buckets_of=lambda f, relative, n, both, far: f(relative, n, both, far + far // 8)
    ),
    "t5_detached": replacing(table=lambda a: a.table.detach()),
    "t5_gradient_of_next_head": replacing(table=lambda a: value_of(a.table, a.table.roll(1, 1))),
    "distances_without_offset": _patching(
        additive_terms=lambda f, a, *x: f(
            a._replace(causal="top_left" if a.causal == "bottom_right" else a.causal), *x
        )
    ),
}


# ---- sinks


@_fault
def lse_without_its_sink(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    if a.sinks is None:
        return out, lse
    alone = attend(a._replace(sinks=None))[1]
    return out, torch.where(lse == -math.inf, lse, alone)


FAULTS |= {
    "sinks_ignored": replacing(
        sinks=lambda a: torch.full_like(a.sinks, -math.inf) + 0 * a.sinks.nan_to_num(neginf=0.0)
    ),
    "sinks_detached": replacing(sinks=lambda a: a.sinks.detach()),
    "sinks_scaled": replacing(
        sinks=lambda a: torch.where(a.sinks.isinf(), a.sinks, a.sinks * a.scale)
    ),
    "sinks_once_a_split": replacing(sinks=lambda a: a.sinks + math.log(2)),
    "sinks_of_next_head": replacing(sinks=lambda a: a.sinks.roll(1)),
    "sinks_gradient_sign": replacing(sinks=lambda a: value_of(a.sinks, -a.sinks)),
    "sinks_dropped_too": replacing(
        sinks=lambda a: a.sinks - math.log1p(-a.dropout_p) if a.dropout_p < 1 else a.sinks
    ),
    "minus_infinite_sinks_as_lowest": replacing(sinks=lambda a: a.sinks.clamp(min=-30.0)),
}


# ---- visibility


def _tables(change: Callable[[Any], Tensor]) -> Fault:
    """Return a fault that changes the page table, with every entry clamped to a valid page."""
    return replacing(page_table=lambda a: change(a).clamp(0, max(a.key.shape[0] - 1, 0)))


SOME_PAGES = _tables(lambda a: a.page_table)


def _hiding(extra: Callable[[Any, Tensor], Tensor]) -> Fault:
    return _patching(visible_pairs=lambda f, a, *rows: extra(a, f(a, *rows)))


def _diagonal(a: Any) -> Tensor:
    i, j, offset = source.indices(a)
    return j - i - offset == 0


def _add_to_hide(visible: Tensor, x: Any, y: Any) -> Tensor:
    if isinstance(y, float) and y == -math.inf:
        return x + torch.where(visible, 0.0, y)
    return torch.where(visible, x, y)


def _select_rows_only(select: Callable[..., Tensor], where: Tensor, x: Tensor) -> Tensor:
    return select(where, x) if where.shape[-1] == 1 else x


def _without_last_block(offsets: Tensor) -> Tensor:
    """Remove the last block of the last nonempty list."""
    filled = (offsets.diff(dim=-1) > 0).flatten()
    if not filled.any():
        return offsets
    batch, heads, lists = offsets.shape
    last = int(filled.nonzero()[-1])
    offsets = offsets.clone().view(-1, lists)
    offsets[last // (lists - 1), last % (lists - 1) + 1 :] -= 1
    return offsets.view(batch, heads, lists)


def _round_up(lengths: Tensor, limit: int) -> Tensor:
    return ((lengths + 7) // 8 * 8).clamp(max=limit)


FAULTS |= {
    "window_ignored": replacing(left=lambda a: -1, right=lambda a: -1),
    "window_left_off_by_one": replacing(left=lambda a: a.left + (a.left >= 0)),
    "window_right_ignored": replacing(right=lambda a: -1),
    "global_keys_ignored": replacing(global_keys=lambda a: 0),
    "global_keys_off_by_one": replacing(global_keys=lambda a: a.global_keys + (a.global_keys > 0)),
    "global_keys_despite_causality": _hiding(
        lambda a, v: v | (torch.arange(v.shape[-1]) < a.global_keys)
    ),
    "alignments_swapped": replacing(
        causal=lambda a: {"none": "none", "top_left": "bottom_right", "bottom_right": "top_left"}[
            a.causal
        ]
    ),
    "causal_without_diagonal": _hiding(lambda a, v: v & ~_diagonal(a) if a.causal != "none" else v),
    "causal_ignored": replacing(causal=lambda a: "none"),
    "offset_by_full_lengths": _patching(
        indices=lambda f, a, *rows: (
            *f(a, *rows)[:2],
            a.key.shape[2] - a.query.shape[2] if a.causal == "bottom_right" else 0,
        )
    ),
    "prefix_ignored": replacing(prefix_lengths=lambda a: torch.zeros_like(a.prefix_lengths)),
    "segments_at_most": _patching(
        visible_pairs=lambda f, a: (
            f(a)
            if a.query_segments is None
            else (
                f(a._replace(query_segments=None, key_segments=None))
                & (a.query_segments[:, None, :, None] <= a.key_segments[:, None, None, :])
            )
        )
    ),
    "segments_of_first_sequence": replacing(
        key_segments=lambda a: a.key_segments[:1].expand_as(a.key_segments)
    ),
    "key_lengths_rounded_up": _both(
        SOME_PAGES, replacing(key_lengths=lambda a: _round_up(a.key_lengths, a.num_keys))
    ),
    "key_lengths_ignored": _both(
        SOME_PAGES, replacing(key_lengths=lambda a: torch.full_like(a.key_lengths, a.num_keys))
    ),
    "query_lengths_ignored": replacing(
        query_lengths=lambda a: torch.full_like(a.query_lengths, a.query.shape[2])
    ),
    "last_key_of_a_tail_ignored": _hiding(
        lambda a, v: v & (torch.arange(v.shape[-1]) < v.shape[-1] - (v.shape[-1] % 64 == 1))
    ),
    "mask_bit_at_tile_end": replacing(
        mask=_if_bool(lambda m: m ^ (torch.arange(m.shape[-1]) % 64 == 63))
    ),
    "mask_of_first_head": replacing(mask=lambda a: a.mask[:, :1]),
    "mask_of_first_sequence": replacing(mask=lambda a: a.mask[:1]),
    "minus_infinity_as_lowest": replacing(
        mask=_if_floating(lambda m: torch.where(m == -math.inf, torch.finfo(m.dtype).min, m))
    ),
    "lowest_as_minus_infinity": replacing(
        mask=_if_floating(lambda m: torch.where(m == torch.finfo(m.dtype).min, -math.inf, m))
    ),
    "hidden_by_addition": _both(
        _torch_with(where=_add_to_hide), _patching(_select=_select_rows_only)
    ),
    "visible_block_skipped": replacing(
        block_offsets=lambda a: _without_last_block(a.block_offsets)
    ),
    "partial_block_lost": replacing(
        block_bits=lambda a: a.block_bits * (torch.arange(len(a.block_bits)) > 0)[:, None, None]
    ),
    "partial_blocks_taken_whole": replacing(
        block_entries=lambda a: a.block_entries.index_fill(1, torch.tensor([1]), FULL)
    ),
    "bits_of_the_next_block": replacing(block_bits=lambda a: a.block_bits.roll(1, 0)),
    "blocks_of_first_head": replacing(block_offsets=lambda a: a.block_offsets[:, :1]),
    "hidden_rows_not_cleared": _patching(_select=lambda f, where, x: x),
}


# ---- pages


def _last_page_stale(a: Any) -> Tensor:
    """Return a table whose sequences' last page is the previous one."""
    last = a.pages_used & ~torch.cat(
        [a.pages_used[:, 1:], torch.zeros_like(a.pages_used[:, :1])], 1
    )
    return torch.where(last, a.page_table.roll(1, 1), a.page_table)


def _with_pages_of(lengths: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes lengths of paged problems, with only valid table entries."""

    def faulty(a: Any, attend: Any) -> Any:
        if a.page_table is None:
            return attend(a)
        return attend(a._replace(key_lengths=lengths(a.key_lengths).clamp(max=a.num_keys)))

    return _both(SOME_PAGES, faulty)


FAULTS |= {
    "page_off_by_one": _tables(lambda a: a.page_table + 1),
    "last_page_stale": _tables(_last_page_stale),
    "pages_of_the_neighbour": _tables(lambda a: a.page_table.roll(1, 0)),
    "pages_with_the_length_of_the_neighbour": _with_pages_of(lambda n: n.roll(1, 0)),
    "pages_read_to_the_row_behind_the_last": _with_pages_of(lambda n: n + 1),
    "rows_of_pages_shifted": replacing(
        key=lambda a: a.key if a.page_table is None else a.key.roll(1, 2),
        value=lambda a: a.value if a.page_table is None else a.value.roll(1, 2),
    ),
}


# ---- eight bits


def _numbers(change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault that changes the decoding of eight-bit values."""
    return _patching(dequantize_kv=lambda f, rows, scale: f(change(rows), scale))


def _as_unsigned(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8) if rows.dtype == torch.int8 else rows


def _without_subnormals(rows: Tensor) -> Tensor:
    return (
        rows
        if rows.dtype == torch.int8
        else torch.where(rows.float().abs() < 2**-6, 0.0, rows.float())
    )


FAULTS |= {
    "key_scale_forgotten": replacing(key_scale=lambda a: torch.ones_like(a.key_scale)),
    "value_scale_forgotten": replacing(value_scale=lambda a: torch.ones_like(a.value_scale)),
    "key_scale_of_the_next_key": replacing(key_scale=lambda a: a.key_scale.roll(-1, 2)),
    "value_scale_of_the_next_head": replacing(value_scale=lambda a: a.value_scale.roll(1, 1)),
    "scales_exchanged": replacing(
        key_scale=lambda a: a.value_scale, value_scale=lambda a: a.key_scale
    ),
    "int8_read_as_unsigned": _numbers(_as_unsigned),
    "e4m3_subnormals_as_zero": _numbers(_without_subnormals),
}


# ---- dropout

FAULTS |= {
    "dropout_mask_shifted": _patching(keep_mask=lambda f, *x: f(*x).roll(1, -1)),
    "dropout_scale_missing": _patching(keep_scale=lambda f, p: 1.0),
    "dropout_same_in_all_sequences": _patching(
        keep_mask=lambda f, seed, p, batch, *x: f(seed, p, 1, *x).expand(batch, -1, -1, -1)
    ),
    "dropout_same_in_all_heads": _patching(
        keep_mask=lambda f, seed, p, batch, heads, *x: f(seed, p, batch, 1, *x).expand(
            -1, heads, -1, -1
        )
    ),
    "dropout_seed_in_32_bits": replacing(dropout_seed=lambda a: a.dropout_seed & 0xFFFFFFFF),
    "dropout_probability_inverted": replacing(dropout_p=lambda a: a.dropout_p and 1 - a.dropout_p),
}


# ---- heads, results


@_fault
def heads_interleaved(a: Any, attend: Forward) -> Outputs:
    """Let query head h read key head h % Hkv instead of h // group."""
    group = a.query.shape[1] // a.key.shape[1]
    scales = {
        n: None if t is None else t.repeat(1, group, 1)
        for n in ("key_scale", "value_scale")
        for t in [getattr(a, n, None)]
    }
    return attend(
        a._replace(key=a.key.repeat(1, group, 1, 1), value=a.value.repeat(1, group, 1, 1), **scales)
    )


@_fault
def lse_in_base_2(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    return out, lse / math.log(2)


@_fault
def lse_in_the_inputs_precision(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    return out, lse + (lse.bfloat16().to(lse.dtype) - lse).detach().nan_to_num(0.0)


@_fault
def lse_gradient_ignored(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    return out, lse.detach() + 0.0 * out.float().sum(-1)


@_fault
def dead_rows_mean_of_value(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    if a.page_table is not None or a.key_scale is not None:
        return out, lse
    mean = (
        a.value.detach()
        .nan_to_num(0.0)
        .mean(2, keepdim=True)
        .repeat_interleave(a.query.shape[1] // a.key.shape[1], 1)
    )
    return torch.where((lse == -math.inf)[..., None], mean.to(out.dtype), out), lse


@_fault
def dead_rows_lse_zero(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    return out, torch.where(lse == -math.inf, 0.0, lse)


@_fault
def different_every_time(a: Any, attend: Forward) -> Outputs:
    out, lse = attend(a)
    return out, lse * (1 + 1e-7 * torch.rand(()).to(lse.dtype))


@_fault
def value_readas_contiguous(a: Any, attend: Forward) -> Outputs:
    return attend(a._replace(value=value_of(as_contiguous(a.value), a.value)))


BACKWARD_FAULTS: dict[str, BackwardFault] = {
    **FAULTS_OF_ANY_BACKWARD,
    "backward_not_causal": lambda a, grads: (a._replace(causal="none", prefix_lengths=None), grads),
    "backward_without_scale": lambda a, grads: (
        a._replace(query=value_of(a.query, a.query / a.scale if a.scale else a.query)),
        grads,
    ),
    "key_gradient_misses_half_of_the_group": lambda a, grads: (
        a._replace(key=value_of(a.key, a.key * (1 if a.query.shape[1] == a.key.shape[1] else 0.5))),
        grads,
    ),
}
