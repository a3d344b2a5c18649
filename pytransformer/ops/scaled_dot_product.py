# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention on our kernels, for padded and nested tensors."""

from __future__ import annotations

import math

import torch

from . import nested
from ._attention_arguments import as_causal_bias
from ._core import fast_path
from ._core.tensors import check_tensor, shape_of
from .attention import attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute :func:`torch.nn.functional.scaled_dot_product_attention` on our kernels.

    Arguments, shapes and result are as in that function: query (..., Hq, Lq, D), key (..., H, Lk,
    D), value (..., H, Lk, Dv), any leading dimensions, causal aligned top left. Differences: a mask
    and ``is_causal`` together intersect, and floating masks may have another dtype than query.
    ``attn_mask`` may be a CausalBias of torch.nn.attention. Nested tensors of either layout, (B, H,
    L*, D) or (B, L*, D), run as packed sequences without a mask and give a result of query's
    layout.
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if found is not NotImplemented:
            return found
    if any(isinstance(t, torch.Tensor) and t.is_nested for t in (query, key, value)):
        return nested.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    q, k, v, mask, lead = four_dimensional(query, key, value, attn_mask, enable_gqa)
    out = attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        causal="top_left" if is_causal else None,
        scale=scale,
    )
    return out.reshape(*lead, *out.shape[-2:])


def four_dimensional(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """Return the arguments as :func:`attention` takes them, and the result's leading dimensions."""
    name = "scaled_dot_product_attention"
    for label, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, label, t)
        if t.dim() < 2:
            raise ValueError(
                f"{name}: {label} must have at least 2 dimensions (..., L, D), got shape"
                f" {shape_of(t)}"
            )
    keep = 3 if enable_gqa else 2  # dimensions that do not broadcast
    try:
        lead = torch.broadcast_shapes(
            *(t.shape[:-keep] if t.dim() >= keep else () for t in (query, key, value))
        )
    except RuntimeError:
        raise ValueError(
            f"{name}: leading dimensions of query {shape_of(query)}, key {shape_of(key)} and value"
            f" {shape_of(value)} do not broadcast"
        ) from None

    def four(t: torch.Tensor) -> torch.Tensor:
        t = t.expand(*lead, *t.shape[-keep:])
        if keep == 3:
            return t.reshape(math.prod(lead), *t.shape[-3:])
        return (
            t
            if t.dim() == 4
            else t.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *t.shape[-2:])
        )

    q, k, v = four(query), four(key), four(value)
    mask = attn_mask
    if mask is not None and as_causal_bias(mask) is None:
        check_tensor(name, "attn_mask", mask)
    if mask is not None and mask.dim() > 2 and query.dim() != 4:
        heads = (*lead, q.shape[1]) if keep == 3 else lead
        try:
            mask = mask.expand(*heads, *mask.shape[-2:]).reshape(*q.shape[:2], *mask.shape[-2:])
        except RuntimeError:
            raise ValueError(
                f"{name}: attn_mask of shape {shape_of(mask)} does not broadcast to"
                f" {(*heads, q.shape[2], k.shape[2])}"
            ) from None
    return q, k, v, mask, ((*lead, q.shape[1]) if keep == 3 else tuple(lead))
