"""The two functions that ``integrations.transformers.register()`` hands to Hugging Face transformers. Imports it.

transformers asks :func:`attention_mask` once per forward pass for the mask, and hands what it returned, a
:class:`.hugging_face_mask.Mask`, to :func:`attention_forward` in every layer. Key padding, causality and causal sliding windows
stay B x Lk bytes or nothing at all; every pattern that is not one of transformers' own plain functions is built densely.

Causality comes from the mask alone. A module's ``is_causal`` is never asked: modules of ALIGN, CLAP and Splinter have none,
BridgeTower's say True and get bidirectional masks, UMT5's and NLLB-MoE's decoders say False and get causal ones. What arrives
without a mask hides nothing, which is how eager code reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils as masking
from transformers.utils import output_capturing

from ..ops._core.options import Alignment, MaskAndBias
from ..ops.attention import attention
from ..ops.attention_varlen import attention_varlen
from ..ops.attention_weights import attention_weights
from ..ops.masks import RelativePositionBias, buckets_of
from .hugging_face_keywords import gate_of_sinks, refuse_unknown, selected
from .hugging_face_mask import Mask, Packed, dense_mask
from .hugging_face_models import described

# ---- the mask, once per forward pass


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking.causal_mask_function,
    attention_mask: torch.Tensor | Mask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask | None:
    """The mask of one forward pass; None where eager code gets None, a bidirectional mask that hides nothing.

    Args: those of ``transformers.masking_utils.sdpa_mask``. ``attention_mask`` is the (B, seen) padding mask, or what this function
    has returned before (``generate`` asks ahead of the model); key j and query i stand at ``j + kv_offset`` and ``i + q_offset``.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )  # fmt: skip
    bidirectional = mask_function is masking.bidirectional_mask_function
    window = None if bidirectional else causal_window(mask_function)
    recognised = bidirectional or window is not None or mask_function is masking.causal_mask_function
    plain_padding = attention_mask is None or (attention_mask.dim() == 2 and attention_mask.dtype == torch.bool)
    # A tensor offset (static caches) is not read, as that would synchronise and break graphs.
    aligned = not isinstance(q_offset, torch.Tensor) and q_offset - kv_offset == kv_length - q_length
    if not recognised or not plain_padding or not (bidirectional or aligned):
        dense = dense_mask(
            arguments, allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip
        )
        # None is sdpa's word for plain causality from the first key on, where the model allows that; else nothing is hidden.
        left_out = dense is None and allow_is_causal_skip and q_length > 1
        return Mask(arguments, dense=dense, causal="top_left" if left_out else None)
    padding = _key_padding(attention_mask, kv_length, kv_offset)
    padding = None if padding is None else padding.expand(batch_size, 1, 1, kv_length)
    if bidirectional and padding is None and allow_is_bidirectional_skip:
        return None  # as eager code gets it, which takes that for what it is; so does attention_forward
    if bidirectional or (q_length == 1 and (window is None or window >= kv_length)):
        return Mask(arguments, padding)
    return Mask(arguments, padding, "bottom_right", None if window is None or window >= kv_length else window)


def _window_codes() -> tuple[Any, Any]:
    """Code objects of transformers' causal sliding-window mask, or Nones unless W means the last W keys, one's own included."""
    width = 3
    example = masking.sliding_window_causal_mask_function(width)
    queries, keys = torch.arange(9)[:, None], torch.arange(9)[None, :]
    seen = example(torch.tensor(0), torch.tensor(0), queries, keys)
    expected = (keys <= queries) & (queries - keys < width)
    overlay = masking.sliding_window_overlay(width)
    cells = [[type(c.cell_contents) for c in f.__closure__ or ()] for f in (example, overlay)]
    if not torch.equal(seen, expected) or cells != [[tuple], [int]]:
        return None, None
    return example.__code__, overlay.__code__


_AND_CODE, _OVERLAY_CODE = _window_codes()


def causal_window(mask_function: Callable[..., Any]) -> int | None:
    """The W of ``masking_utils.sliding_window_causal_mask_function(W)``, or None if the function is any other.

    Recognised by its code and what that closes over; :func:`_window_codes` has checked what the code computes.
    """
    # A compiler's trace has no closures to look into.
    if torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND_CODE:
        return None
    (cell,) = mask_function.__closure__ or ()  # as _window_codes has seen
    parts = cell.cell_contents
    if len(parts) != 2 or parts[1] is not masking.causal_mask_function:
        return None
    if getattr(parts[0], "__code__", None) is not _OVERLAY_CODE:
        return None
    window = parts[0].__closure__[0].cell_contents
    return window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None


def _key_padding(mask: torch.Tensor | None, kv_length: int, kv_offset: int) -> torch.Tensor | None:
    """The (B, 1, 1, kv_length) part of a (B, seen) padding mask, or None where it hides nothing. Keys past it are hidden."""
    if mask is None:
        return None
    missing = kv_length + kv_offset - mask.shape[-1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    mask = mask[:, kv_offset : kv_offset + kv_length]
    # Looking costs one read in eager mode and pays in every layer; under a trace it would break the graph.
    if not masking.is_tracing(mask) and bool(mask.all()):
        return None
    return mask[:, None, None, :]


# ---- the attention, once per layer


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
    """Attention of one layer, with the meaning of the ``eager_attention_forward`` of transformers' models.

    Args:
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv); a batch of 1 broadcasts.
        attention_mask: what :func:`attention_mask` returned, or a 4-dimensional mask of the user's or the model's own, bool or
            floating. None hides nothing.
        is_causal: True without a mask is refused: eager code would hide nothing, sdpa the upper triangle.
        position_bias: T5's, (1, H, Lq, Lk), added to the scores; gets its gradient. From converted models (see
            :mod:`.convert.t5_rules`) its table, (buckets, H).
        kwargs: ``softcap``, ``output_attentions`` and those of :mod:`.hugging_face_keywords`, which refuses all others.

    Returns:
        The output, (B, Lq, Hq, Dv) contiguous, and None, or the weights where they are asked for: (B, Hq, Lq, Lk), before
        dropout, without gradient, computed from the kernel's log-sum-exp.
    """
    refuse_unknown(module, kwargs)
    if isinstance(attention_mask, Packed):
        return _packed(query, key, value, attention_mask.offsets, dropout, scaling), None
    if attention_mask is None and is_causal and query.shape[2] > 1:
        raise ValueError(
            f"pytransformer: {type(module).__name__} asks for is_causal=True without a mask, which eager code and sdpa read "
            "differently; give the model an attention mask, or use attn_implementation='sdpa'"
        )
    attention_mask = selected(module, attention_mask, query, key, kwargs)
    mask, causal, window = _mask_terms(module, attention_mask, query.shape[2], key.shape[2])
    batch = max(query.shape[0], key.shape[0], key=lambda n: n != 1)
    query, key, value = (t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in (query, key, value))
    bias: torch.Tensor | RelativePositionBias | None = position_bias
    if position_bias is not None and position_bias.dim() == 2:
        bias, causal = _table_bias(module, position_bias, causal, mask, query.shape[2], key.shape[2])
    elif getattr(module, "position_bias_is_zero", False):
        bias = None
    terms: MaskAndBias = {
        "attn_mask": mask, "causal": causal, "window": window, "bias": bias, "softcap": kwargs.get("softcap"), "scale": scaling,
    }  # fmt: skip
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    if sinks is None and not weights_wanted(kwargs):
        return attention(query, key, value, dropout_p=dropout, **terms).transpose(1, 2).contiguous(), None
    out, lse = attention(query, key, value, dropout_p=dropout, return_lse=True, **terms)
    weights = None
    if weights_wanted(kwargs):
        weights = attention_weights(query.detach(), key.detach(), lse.detach(), **terms)
    if sinks is not None:
        gate = gate_of_sinks(lse, sinks)
        out = (out * gate).to(out.dtype)
        weights = weights if weights is None else weights * gate.detach()
    return out.transpose(1, 2).contiguous(), weights if weights is None else weights.to(query.dtype)


def _mask_terms(
    module: Any, mask: torch.Tensor | Mask | None, q_length: int, k_length: int
) -> tuple[torch.Tensor | None, Alignment | None, tuple[int | None, int | None] | None]:
    """attn_mask, causal and window for our op."""
    if not isinstance(mask, Mask):
        return mask, None, None
    lengths = mask.shape[2:]
    if lengths != (q_length, k_length):
        if lengths != (1, k_length):
            raise ValueError(
                f"pytransformer: {type(module).__name__} of {described(mask.arguments.get('config'))} has {q_length} queries and "
                f"{k_length} keys, and its mask is for {lengths[0]} and {lengths[1]}; use attn_implementation='eager' for this model"
            )
        if mask.causal is not None:
            return mask.as_dense(), None, None  # one row for all queries, as BridgeTower's; its diagonal is not theirs
    if mask.padding is None and mask.causal is None:
        return mask.dense, None, None
    return mask.padding, mask.causal, None if mask.window is None else (mask.window - 1, None)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor, dropout: float, scaling: float | None
) -> torch.Tensor:
    """Attention of each sequence to itself, (1, H, total, D) to (1, total, H, Dv)."""
    longest = int(offsets.diff().max())
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return attention_varlen(q, k, v, offsets, offsets, longest, longest, scale=scaling, dropout_p=dropout)[None]


def weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Whether the caller of the model asked for attention weights. Not every model passes that on to its attention (GPT-2 does
    not), so that transformers' list of what it is to collect from this forward pass counts too."""
    return bool(kwargs.get("output_attentions")) or any(name.endswith("attentions") for name in collected())


def collected() -> tuple[str, ...]:
    """What transformers is to collect from its modules in this forward pass."""
    return tuple(output_capturing._active_collector.get() or ())


def _table_bias(
    module: Any, table: torch.Tensor, causal: Alignment | None, mask: torch.Tensor | None, q_length: int, k_length: int
) -> tuple[RelativePositionBias | torch.Tensor, Alignment | None]:
    """T5's bias from its table, and the diagonal that puts the last query at the last key."""
    settings = dict(bidirectional=not module.is_decoder, max_distance=module.relative_attention_max_distance)
    if causal is None and mask is None and q_length == 1:
        causal = "bottom_right"  # a decoding step: hides nothing, but says where the query stands
    if q_length == k_length or causal == "bottom_right":
        return RelativePositionBias(table, **settings), causal
    # A dense mask over cached keys: it need not be causal, so that positions have no other way in than a dense bias.
    i = torch.arange(k_length - q_length, k_length, device=table.device)[:, None]
    j = torch.arange(k_length, device=table.device)[None, :]
    buckets = buckets_of(j - i, table.shape[0], settings["bidirectional"], settings["max_distance"])
    return table[buckets].permute(2, 0, 1)[None], causal
