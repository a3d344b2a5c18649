# SPDX-License-Identifier: Apache-2.0
"""The registered mask function of transformers: it lowers the mask of one forward pass.

Key padding, causality, causal sliding windows and static caches need at most B x Lk bytes. Any
pattern that is not one of transformers' plain mask functions is built densely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils as masking

from .mask import Mask, dense_mask
from .packing import unpack_mask_function

# Model types whose code extends the mask only if it is a tensor. DeepSeek V4 adds a column per
# compressed key.
EXTENDED = frozenset({"deepseek_v4"})


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
) -> Mask | torch.Tensor | None:
    """Return the mask of one forward pass, or None for a bidirectional mask that hides nothing.

    Models of :data:`EXTENDED` get eager code's tensor.

    Args: as in ``transformers.masking_utils.sdpa_mask``. ``attention_mask`` is the (B, seen)
    padding mask or an earlier result of this function (``generate`` calls it before the model). Key
    j and query i have the positions ``j + kv_offset`` and ``i + q_offset``.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if isinstance(q_offset, torch.Tensor):
        # A static cache increments it in place before the mask may become dense.
        q_offset = q_offset.clone()
    arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )  # fmt: skip
    if getattr(arguments.get("config"), "model_type", None) in EXTENDED:
        additive: torch.Tensor = masking.eager_mask(**arguments)
        return additive
    mask_function, segments = unpack_mask_function(mask_function)
    if segments is not None and (
        attention_mask is not None or segments.shape != (batch_size, kv_length)
    ):
        mask_function, segments = arguments["mask_function"], None
    bidirectional = mask_function is masking.bidirectional_mask_function
    window = None if bidirectional else causal_window(mask_function)
    recognised = (
        bidirectional or window is not None or mask_function is masking.causal_mask_function
    )
    plain_padding = attention_mask is None or (
        attention_mask.dim() == 2 and attention_mask.dtype == torch.bool
    )
    there = kv_length if bidirectional else _keys_there(q_offset, kv_offset, q_length)
    if (
        not recognised
        or not plain_padding
        or (isinstance(there, int) and not 0 <= there <= kv_length)
    ):
        dense = dense_mask(
            arguments,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        )
        # sdpa's None means causal from the first key if the model allows the skip; otherwise it
        # hides nothing.
        left_out = dense is None and allow_is_causal_skip and q_length > 1
        return Mask(arguments, dense=dense, causal="top_left" if left_out else None)
    padding = _key_padding(attention_mask, kv_length, kv_offset, there)
    padding = None if padding is None else padding.expand(batch_size, 1, 1, kv_length)
    if bidirectional and padding is None and segments is None and allow_is_bidirectional_skip:
        return None  # eager code and attention_forward read None the same way
    if isinstance(there, torch.Tensor) or there < kv_length:
        lengths = torch.as_tensor(there, dtype=torch.int64, device=device).repeat(batch_size)
        return Mask(arguments, padding, "bottom_right", window, lengths, segments=segments)
    if bidirectional or (q_length == 1 and (window is None or window >= kv_length)):
        return Mask(arguments, padding, segments=segments)
    window = None if window is None or window >= kv_length else window
    return Mask(arguments, padding, "bottom_right", window, segments=segments)


def _window_codes() -> tuple[Any, Any]:
    """Return the code objects of transformers' sliding-window mask, or Nones.

    They are Nones unless window W means the last W keys, including the query's.
    """
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
    """Return the W of ``sliding_window_causal_mask_function(W)``, or None for any other function.

    The function is identified by its code and closure; :func:`_window_codes` checks the code.
    """
    # A trace has no closures.
    if torch.compiler.is_compiling() or getattr(mask_function, "__code__", None) is not _AND_CODE:
        return None
    (cell,) = mask_function.__closure__ or ()  # checked by _window_codes
    parts = cell.cell_contents
    if len(parts) != 2 or parts[1] is not masking.causal_mask_function:
        return None
    if getattr(parts[0], "__code__", None) is not _OVERLAY_CODE:
        return None
    window = parts[0].__closure__[0].cell_contents
    return (
        window if isinstance(window, int) and not isinstance(window, bool) and window > 0 else None
    )


def _keys_there(q_offset: int | torch.Tensor, kv_offset: int, q_length: int) -> int | torch.Tensor:
    """Return the number of keys up to the last query's; a static cache may have more.

    A static cache's offset is a tensor. A trace does not read it, because that would break the
    graph.
    """
    if isinstance(q_offset, torch.Tensor) and not masking.is_tracing(q_offset):
        q_offset = int(q_offset)
    return q_offset - kv_offset + q_length


def _key_padding(
    mask: torch.Tensor | None, kv_length: int, kv_offset: int, there: int | torch.Tensor
) -> torch.Tensor | None:
    """Return the (B, 1, 1, kv_length) part of a (B, seen) padding mask; None if all visible.

    Keys beyond the mask are hidden.
    """
    if mask is None:
        return None
    missing = kv_length + kv_offset - mask.shape[-1]
    if missing > 0:
        mask = torch.nn.functional.pad(mask, (0, missing))
    mask = mask[:, kv_offset : kv_offset + kv_length]
    # Eager mode reads the mask once, which pays in every layer; in a trace it would break the
    # graph.
    if not masking.is_tracing(mask) and bool(
        (mask if isinstance(there, torch.Tensor) else mask[:, :there]).all()
    ):
        return None
    return mask[:, None, None, :]
