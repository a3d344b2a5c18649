# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention of nested tensors, strided or jagged, as packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ._core.tensors import check_tensor
from .attention_varlen import attention_varlen_op

OP = "scaled_dot_product_attention"


class Packed(NamedTuple):
    """The rows of a nested tensor, one sequence after the other."""

    rows: torch.Tensor  # (total, heads, head size)
    offsets: torch.Tensor  # (B + 1,)
    longest: int
    lengths: list[int] | None  # for the strided layout only


def lower(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return attention_varlen's arguments and a function that nests its output like query.

    Nested tensors are (B, H, L*, D), as ``x.transpose(1, 2)`` of (B, L*, H, D), or (B, L*, D), of
    one layout. A causal diagonal starts at the top left of each sequence.

    Raises:
        TypeError, ValueError: some tensors are dense, layouts or lengths differ, a dimension
            besides the length is ragged, or there is a mask.
    """
    if attn_mask is not None:
        raise ValueError(
            f"{OP}: attn_mask must be None with nested tensors; is_causal goes by sequence"
        )
    operands = (("query", query), ("key", key), ("value", value))
    for name, t in operands:
        if not isinstance(t, torch.Tensor) or not t.is_nested or t.layout != query.layout:
            raise TypeError(
                f"{OP}: query, key and value must be nested tensors of one layout, all three or"
                f" none; {name} is not"
            )
    q, k, v = (pack(name, t) for name, t in operands)
    check_same_lengths(OP, k, v)
    if not enable_gqa and q.rows.shape[1] != k.rows.shape[1]:
        raise ValueError(
            f"{OP}: query has {q.rows.shape[1]} heads and key {k.rows.shape[1]}; enable_gqa=True"
            " groups them"
        )
    a, _, _ = attention_varlen_op.prepare(
        q.rows, k.rows, v.rows, q.offsets, k.offsets, q.longest, k.longest,
        causal="top_left" if is_causal else None,
        scale=scale, dropout_p=dropout_p,
    )  # fmt: skip
    return a, lambda rows: like(query, q, rows)


def check_same_lengths(op: str, key: Packed, value: Packed) -> None:
    """Raise ValueError if the lengths of key and value differ.

    In a compiled call the check raises RuntimeError at run time, because the graph cannot read the
    values of separate offset tensors.
    """
    message = f"{op}: key and value must have the same length in every sequence"
    if key.offsets is value.offsets:
        return
    alike = key.offsets.shape == value.offsets.shape
    if alike and torch.compiler.is_compiling():
        torch._assert_async((key.offsets == value.offsets).all(), message)
    elif not (alike and torch.equal(key.offsets, value.offsets)):
        raise ValueError(message)


def pack(name: str, t: torch.Tensor) -> Packed:
    """Return (B, H, L*, D) or (B, L*, D) as rows (total, H, D), with gradients."""
    if t.dim() not in (3, 4):
        raise ValueError(
            f"{OP}: nested {name} must be (B, H, L*, D) or (B, L*, D), got {t.dim()} dimensions"
        )
    if t.layout == torch.jagged:
        return _pack_jagged(name, t)
    parts = [part.unsqueeze(0) if t.dim() == 3 else part for part in t.unbind()]
    if not parts or len({(part.shape[0], part.shape[2]) for part in parts}) > 1:
        raise ValueError(
            f"{OP}: nested {name} must have sequences, and only their lengths may differ"
        )
    lengths = [part.shape[1] for part in parts]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(t.device)
    return Packed(
        torch.cat([part.transpose(0, 1) for part in parts]), offsets, max(lengths), lengths
    )


def _pack_jagged(name: str, t: Any) -> Packed:
    if t._ragged_idx != t.dim() - 2 or t.lengths() is not None:
        raise ValueError(
            f"{OP}: nested {name} must be ragged in its next to last dimension, the length, and"
            " without holes"
        )
    check_tensor(OP, name, t.values(), floating=True)
    rows = t.values().unsqueeze(1) if t.dim() == 3 else t.transpose(1, 2).values()
    return Packed(rows, t.offsets(), t._get_max_seqlen(), None)


def like(query: Any, packed: Packed, rows: torch.Tensor) -> torch.Tensor:
    """Return rows (total, H, Dv) as a nested tensor with query's layout and sequences."""
    flat = query.dim() == 3
    if packed.lengths is not None:
        parts = [part.transpose(0, 1) for part in rows.split(packed.lengths)]
        return torch.nested.as_nested_tensor([part[0] if flat else part for part in parts])
    # torch.compile cannot trace the public nested_tensor_from_jagged in calls from activate().
    # loaded on first use, as torch does
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

    out = nested_view_from_values_offsets(
        rows.squeeze(1) if flat else rows,
        query.offsets(),
        min_seqlen=query._maybe_min_seqlen,
        max_seqlen=query._maybe_max_seqlen,
    )
    return out if flat else out.transpose(1, 2)


def scaled_dot_product_attention(*arguments: Any) -> torch.Tensor:
    """Compute the public function of this name for nested tensors; arguments are positional."""
    a, finish = lower(*arguments)
    return finish(attention_varlen_op(a)[0])
