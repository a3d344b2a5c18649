"""The two functions that ``integrations.transformers.register()`` hands to Hugging Face transformers. Imports it.

transformers asks :func:`attention_mask` once per forward pass for the mask, and hands what it
returned, untouched, to :func:`attention_forward` in every layer. The mask keeps to forms that cannot be misread:

=================================  ===================================================================================
None                               as with ``sdpa``: nothing hidden but what the module's ``is_causal`` hides
bool (B, 1, Lq, Lk)                a mask like any other; where its query stride is 0 (key padding, a view of (B, Lk))
                                   one row of it goes to the kernel
uint8 (B, 1, 1, Lk)                key padding *and* causality, last query on last key, (Lq, Lk) never built
int8 (B, 1, 1, Lk)                 the same, and the causal sliding window of the model's config
int64 (B + 1,)                     the batch is one row of B sequences that start there: encoders converted to leave padding out
=================================  ===================================================================================

Why not take causality from the module when the mask is mere key padding: some models give ``is_causal=True`` modules
bidirectional masks (BridgeTower) or leave ``is_causal`` out (ALIGN, LayoutLM), which only shows once there is a mask.
A dtype outlives detaching, moving and indexing, which a Python attribute would not, and no model hands these dtypes in.

Only masks that transformers' own plain functions describe are lowered so; every other one is built densely.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils as masking
from transformers.utils import output_capturing

from ..ops._options import Alignment, MaskAndBias
from ..ops.attention import attention
from ..ops.attention_varlen import attention_varlen
from ..ops.attention_weights import attention_weights
from ..ops.masks import RelativePositionBias, buckets_of

CAUSAL, CAUSAL_WINDOW, PACKED = torch.uint8, torch.int8, torch.int64  # dtypes of lowered masks, see above


# ---- the mask, once per forward pass


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass, in one of the forms of the module's docstring.

    Args: those of ``transformers.masking_utils.sdpa_mask``. ``attention_mask`` is the (B, seen) padding mask; key j and query
    i stand at ``j + kv_offset`` and ``i + q_offset``. The two ``allow`` flags are the model's word that it only passes the
    mask on; without them it may look inside, and gets a dense one.
    """
    dense = functools.partial(
        masking.sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
        allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip, device=device, **kwargs,
    )  # fmt: skip
    bidirectional = mask_function is masking.bidirectional_mask_function
    window = None if bidirectional else causal_window(mask_function)
    recognised = bidirectional or window is not None or mask_function is masking.causal_mask_function
    plain_padding = attention_mask is None or (attention_mask.dim() == 2 and attention_mask.dtype == torch.bool)
    if not recognised or not plain_padding or not (allow_is_bidirectional_skip if bidirectional else allow_is_causal_skip):
        return dense()

    padding = _key_padding(attention_mask, kv_length, kv_offset)
    if bidirectional:
        return None if padding is None else padding.expand(batch_size, 1, q_length, kv_length)
    # A tensor offset (static caches) is not read, as that would synchronise and break graphs.
    if isinstance(q_offset, torch.Tensor) or q_offset - kv_offset != kv_length - q_length:
        return dense()
    if window is not None and window >= kv_length:
        window = None
    if padding is None and window is None and q_length in (1, kv_length):
        return None
    if padding is None:
        padding = torch.ones((1, 1, 1, kv_length), dtype=torch.bool, device=device)
    return padding.expand(batch_size, 1, 1, kv_length).to(CAUSAL if window is None else CAUSAL_WINDOW)


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
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one layer, with the meaning of ``transformers.integrations.sdpa_attention.sdpa_attention_forward``.

    Args:
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv); a batch of 1 broadcasts.
        attention_mask: what :func:`attention_mask` returned, or a 4-dimensional mask of the user's, bool or floating.
        is_causal: overrides ``module.is_causal`` (True if it has none); both count only where there is no mask and more
            than one query, and mean the top-left diagonal.
        position_bias: T5's, (1, H, Lq, Lk), added to the scores; gets its gradient. From converted models (see
            :mod:`.convert.t5_rules`) its table, (buckets, H).
        kwargs: ``softcap`` and ``output_attentions`` are honoured. ``s_aux`` (attention sinks) and a paged ``cache`` are refused;
            others do not concern attention.

    Returns:
        The output, (B, Lq, Hq, Dv) contiguous, and None, or the weights where they are asked for: (B, Hq, Lq, Lk), before
        dropout, without gradient, computed from the kernel's log-sum-exp.
    """
    _refuse_unsupported(kwargs)
    if attention_mask is not None and attention_mask.dtype == PACKED and attention_mask.dim() == 1:
        return _packed(query, key, value, attention_mask, dropout, scaling), None
    causal: Alignment | None = None
    window: tuple[int | None, int | None] | None = None
    mask = attention_mask
    if mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = "top_left" if is_causal and query.shape[2] > 1 else None
    elif mask.dtype in (CAUSAL, CAUSAL_WINDOW):
        if mask.dim() != 4 or mask.shape[2] != 1:
            raise ValueError(
                f"pytransformer: the model changed its causal mask on the way to attention, to shape {tuple(mask.shape)}"
            )
        causal = "bottom_right"
        window = (_window(module, kwargs) - 1, None) if mask.dtype == CAUSAL_WINDOW else None
        mask = mask.bool()
    elif mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
        mask = mask[:, :, :1]  # every query has the same row: key padding
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
    if not weights_wanted(kwargs):
        return attention(query, key, value, dropout_p=dropout, **terms).transpose(1, 2).contiguous(), None
    out, lse = attention(query, key, value, dropout_p=dropout, return_lse=True, **terms)
    weights = attention_weights(query.detach(), key.detach(), lse.detach(), **terms)
    return out.transpose(1, 2).contiguous(), weights.to(query.dtype)


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


def _window(module: torch.nn.Module, kwargs: dict[str, Any]) -> int:
    """The sliding window that the mask was built with: it is always the config's, and the module must not name another."""
    of_config = getattr(getattr(module, "config", None), "sliding_window", None)
    of_module = kwargs.get("sliding_window")
    if not isinstance(of_config, int) or of_module not in (None, of_config):
        raise ValueError(
            f"pytransformer: {type(module).__name__} was given a sliding-window mask, but its config says {of_config!r} and "
            f"its call {of_module!r}; use another attn_implementation for this model"
        )
    return of_config


def _refuse_unsupported(kwargs: dict[str, Any]) -> None:
    if kwargs.get("s_aux") is not None:
        raise ValueError("pytransformer: attention sinks (s_aux) are not supported; use attn_implementation='eager'")
    if kwargs.get("cache") is not None:
        raise ValueError("pytransformer: paged caches (continuous batching) are not supported; use attn_implementation='sdpa'")
