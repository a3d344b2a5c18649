# SPDX-License-Identifier: Apache-2.0
"""The attention of one layer, with the semantics of transformers' ``eager_attention_forward``.

Causality comes from the mask only, and a module's ``is_causal`` is ignored: modules of ALIGN, CLAP
and Splinter lack it, BridgeTower's is True with bidirectional masks, and UMT5's and NLLB-MoE's
decoders have False with causal masks. A call without a mask hides nothing, as in eager code.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import output_capturing
from typing_extensions import Unpack

from ...ops.attention import attention
from ...ops.attention_varlen import attention_varlen
from ...ops.attention_weights import attention_weights
from ...ops.masks import RelativePositionBias, buckets_of
from ...ops.options import Alignment, MaskAndBias, PackedOptions
from .keywords import gate_of_sinks, refuse_unknown, selected, sinks_of
from .mask import Mask, Packed
from .models import described
from .packing import given_bounds, numbers_of


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Mask | Packed | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the attention of one layer, as transformers' ``eager_attention_forward`` defines it.

    Args:
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv); a batch of 1
            broadcasts.
        attention_mask: the result of :func:`attention_mask`, or a 4-dimensional mask of the user or
            the model, bool or floating. None hides nothing.
        is_causal: True without a mask raises, because eager code would hide nothing and sdpa the
            upper triangle.
        position_bias: T5's, (1, H, Lq, Lk), added to the scores, with gradient. Converted models
            (see :mod:`.convert.t5_rules`) pass the table (buckets, H).
        kwargs: ``softcap``, ``output_attentions`` and the keywords of :mod:`.keywords`; others
            raise.

    Returns:
        The output, (B, Lq, Hq, Dv) contiguous, and the weights if requested, otherwise None. The
            weights, (B, Hq, Lq, Lk), are before dropout and without gradient; the kernel's lse
            gives them.
    """
    refuse_unknown(module, kwargs)
    if isinstance(attention_mask, Packed):
        return _packed(query, key, value, attention_mask.offsets, dropout, scaling), None
    if attention_mask is None and is_causal and query.shape[2] > 1:
        raise ValueError(
            f"pytransformer: {type(module).__name__} asks for is_causal=True without a mask, which"
            " eager code and sdpa read differently; give the model an attention mask, or use"
            " attn_implementation='sdpa'"
        )
    attention_mask = selected(module, attention_mask, query, key, kwargs)
    mask, causal, window, lengths = _mask_terms(
        module, attention_mask, query.shape[2], key.shape[2]
    )
    batch = max(query.shape[0], key.shape[0], key=lambda n: n != 1)
    bounds = given_bounds(type(module).__name__, kwargs, batch, query.shape[2], key.shape[2])
    if bounds is None and isinstance(attention_mask, Mask) and mask is None:
        bounds = attention_mask.sequence_bounds()
    query, key, value = (
        t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in (query, key, value)
    )
    bias: torch.Tensor | RelativePositionBias | None = position_bias
    if position_bias is not None and position_bias.dim() == 2:
        bias, causal = _table_bias(
            module, position_bias, causal, mask, query.shape[2], key.shape[2]
        )
    elif getattr(module, "position_bias_is_zero", False):
        bias = None
    sinks, sinks_by_query = sinks_of(kwargs)
    if lengths is not None and len(lengths) != batch:
        lengths = lengths.expand(batch)
    terms: MaskAndBias = {
        "attn_mask": mask, "causal": causal, "window": window, "bias": bias, "sinks": sinks,
        "softcap": kwargs.get("softcap"), "scale": scaling, "key_lengths": lengths,
    }  # fmt: skip
    only_output = sinks_by_query is None and not weights_wanted(kwargs)
    if bounds is not None:
        if only_output and bias is None and mask is None and lengths is None:
            scores: PackedOptions = {
                "causal": causal, "window": window, "sinks": sinks,
                "softcap": kwargs.get("softcap"), "scale": scaling, "dropout_p": dropout,
            }  # fmt: skip
            return _flattened(query, key, value, bounds, **scores), None
        terms["query_segments"] = terms["key_segments"] = numbers_of(bounds[0], batch)
    if only_output:
        return (
            attention(query, key, value, dropout_p=dropout, **terms).transpose(1, 2).contiguous(),
            None,
        )
    out, lse = attention(query, key, value, dropout_p=dropout, return_lse=True, **terms)
    weights = None
    if weights_wanted(kwargs):
        weights = attention_weights(query.detach(), key.detach(), lse.detach(), **terms)
    if sinks_by_query is not None:
        gate = gate_of_sinks(lse, sinks_by_query)
        out = (out * gate).to(out.dtype)
        weights = weights if weights is None else weights * gate.detach()
    return out.transpose(1, 2).contiguous(), weights if weights is None else weights.to(query.dtype)


def _mask_terms(
    module: Any, mask: torch.Tensor | Mask | None, q_length: int, k_length: int
) -> tuple[
    torch.Tensor | None, Alignment | None, tuple[int | None, int | None] | None, torch.Tensor | None
]:
    """Return attn_mask, causal, window and key_lengths of our op."""
    if not isinstance(mask, Mask):
        return mask, None, None, None
    lengths = mask.shape[2:]
    if lengths != (q_length, k_length):
        if lengths != (1, k_length):
            raise ValueError(
                f"pytransformer: {type(module).__name__} of"
                f" {described(mask.arguments.get('config'))} has {q_length} queries and {k_length}"
                f" keys, and its mask is for {lengths[0]} and {lengths[1]}; use"
                " attn_implementation='eager' for this model"
            )
        if mask.causal is not None:
            # One row for all queries (BridgeTower); causality does not apply.
            return mask.as_dense(), None, None, None
    if mask.padding is None and mask.causal is None:
        return mask.dense, None, None, None
    return (
        mask.padding,
        mask.causal,
        None if mask.window is None else (mask.window - 1, None),
        mask.lengths,
    )


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Return self-attention of each sequence, (1, H, total, D) to (1, total, H, Dv)."""
    longest = int(offsets.diff().max())
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return attention_varlen(
        q, k, v, offsets, offsets, longest, longest, scale=scaling, dropout_p=dropout
    )[None]


def _flattened(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[torch.Tensor, int],
    **options: Unpack[PackedOptions],
) -> torch.Tensor:
    """Return the attention of a (B, L) batch of packed sequences, (B, L, Hq, Dv)."""
    offsets, longest = bounds
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = attention_varlen(q, k, v, offsets, offsets, longest, longest, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Return whether the model's caller requested attention weights.

    Some models (GPT-2) do not pass the request to attention, so transformers' list of outputs to
    collect counts too.
    """
    return bool(kwargs.get("output_attentions")) or any(
        name.endswith("attentions") for name in collected()
    )


def collected() -> tuple[str, ...]:
    """Return the outputs that transformers collects in this forward pass."""
    return tuple(output_capturing._active_collector.get() or ())


def _table_bias(
    module: Any,
    table: torch.Tensor,
    causal: Alignment | None,
    mask: torch.Tensor | None,
    q_length: int,
    k_length: int,
) -> tuple[RelativePositionBias | torch.Tensor, Alignment | None]:
    """Return T5's bias from its table, and the diagonal that aligns the last query and key."""
    settings = dict(
        bidirectional=not module.is_decoder, max_distance=module.relative_attention_max_distance
    )
    if causal is None and mask is None and q_length == 1:
        causal = "bottom_right"  # a decoding step: hides nothing, but sets the query's position
    if q_length == k_length or causal == "bottom_right":
        return RelativePositionBias(table, **settings), causal
    # A dense mask over cached keys may be non-causal, so positions require a dense bias.
    i = torch.arange(k_length - q_length, k_length, device=table.device)[:, None]
    j = torch.arange(k_length, device=table.device)[None, :]
    buckets = buckets_of(j - i, table.shape[0], settings["bidirectional"], settings["max_distance"])
    return table[buckets].permute(2, 0, 1)[None], causal
