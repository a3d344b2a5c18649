# SPDX-License-Identifier: Apache-2.0
"""The keywords that transformers' models pass to their attention: supported, ignored or refused.

Models pass on all keywords of their caller, so attention receives columns of the batch too. sdpa
ignores every unknown keyword. This module ignores one only if eager code cannot read it: neither
the attention class nor the ``eager_attention_forward`` of its file contains the name, and it is not
in :data:`REFUSED`, the keywords that change attention in other libraries' functions.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any, Generic, Protocol

import torch
from transformers import GenerationConfig

from . import packing
from .mask import Mask

HONOURED = frozenset(
    {
        "softcap",
        "output_attentions",
        "s_aux",
        "sinks",
        "indices",
        "block_indices",
        *packing.KEYWORDS,
    }
)

HARMLESS = {
    "sliding_window": "the mask already has it",
    "position_ids": "rotary embeddings and the mask have read them",
    "cache_position": "the cache has read it",
    "use_cache": "the model reads it",
    "output_hidden_states": "the model reads it",
    "output_router_logits": "the model reads it",
    "return_dict": "the model reads it",
    "num_items_in_batch": "the loss reads it",
    "input_ids": "the embedding reads it (GLM-5-Next hands it on)",
    "logits_to_keep": "the head reads it (LLaVA-OneVision hands it on)",
    "vision_feature_layer": (
        "the model that gathers hidden states reads it (Molmo2's adapter hands it on)"
    ),
    "grid_thw": (
        "the convolutions of LFM3-VL's vision model read it; its attention gets one frame a call"
    ),
    **dict.fromkeys(
        vars(GenerationConfig()),
        "generate reads it (CTC models hand all its options on: Parakeet, LASR, Granite Speech 5)",
    ),
    "deterministic": ("affects flash attention's backward pass; ours is deterministic by default"),
}

REFUSED = {
    "cache": "a paged cache (run generate_batch within "
        "pytransformer.integrations.transformers.continuous_batching(model))",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"),
        "offsets, which transformers names cu_seq_lens_q and cu_seq_lens_k"),
    **dict.fromkeys(
        ("block_table", "block_mask", "score_mod", "mask_mod", "head_mask", "attention_bias",
            "attn_bias", "attn_mask", "alibi",
         "alibi_slopes", "window_size", "learnable_sink", "logit_softcapping"),
        "which changes attention elsewhere",
    ),
}  # fmt: skip


def refuse_unknown(module: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an unsupported keyword that may change attention.

    None and False are accepted.
    """
    cls: Any = type(module)
    for name, value in kwargs.items():
        if name in HARMLESS or name in HONOURED or value is None or value is False:
            continue
        if name not in REFUSED and not eager_code_reads(cls, name):
            continue
        what = f": {REFUSED[name]}" if name in REFUSED else ", which our attention does not support"
        raise ValueError(
            f"pytransformer: {type(module).__name__} hands its attention the keyword"
            f" {name!r}{what}; use attn_implementation='eager'"
        )


@functools.cache
def eager_code_reads(cls: type, name: str) -> bool:
    """Return True if eager attention may read the keyword, or has no source to check.

    The check covers the class, its bases, and ``eager_attention_forward`` in their files.
    """
    classes = [
        base for base in cls.__mro__ if base not in (*torch.nn.Module.__mro__, Generic, Protocol)
    ]
    functions = [
        getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        for base in classes
    ]
    try:
        sources = [inspect.getsource(part) for part in (*classes, *functions) if part is not None]
    except (OSError, TypeError):
        return True
    return not sources or any(re.search(rf"\b{re.escape(name)}\b", source) for source in sources)


def selected(
    module: Any,
    mask: torch.Tensor | Mask | None,
    query: torch.Tensor,
    key: torch.Tensor,
    kwargs: dict[str, Any],
) -> torch.Tensor | Mask | None:
    """Return the mask restricted to the keys that an indexer selects.

    ``indices`` is (B, Lq, k), the visible keys that each query keeps (DeepSeek V3.2, GLM-MoE-DSA,
    AXK2). ``block_indices`` is MiniMax-M3's, whose indexer builds the mask.
    """
    indices, blocks = kwargs.get("indices"), kwargs.get("block_indices")
    if indices is None and blocks is None:
        return mask
    dense = mask.as_dense() if isinstance(mask, Mask) else mask
    q_length, k_length = query.shape[2], key.shape[2]
    if indices is not None:
        kept = torch.zeros(
            (indices.shape[0], q_length, k_length), dtype=torch.bool, device=query.device
        )
        kept = kept.scatter(-1, indices.long(), True)[:, None]
        if dense is None or dense.dtype == torch.bool:
            return kept if dense is None else dense & kept
        return dense.masked_fill(~kept, torch.finfo(dense.dtype).min)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(k_length - q_length, k_length, device=query.device)
    positions = positions.expand(query.shape[0], -1)
    block_mask: torch.Tensor = module.indexer.build_block_mask(
        blocks, dense, k_length, query.dtype, query.device, positions
    )
    return block_mask


def sinks_of(kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return sinks (H,) and per-query sinks (B, H, Lq, 1), one of them None.

    Either keyword name is accepted; our attention supports sinks (H,).
    """
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    return (sinks, None) if sinks is None or sinks.dim() == 1 else (None, sinks)


def gate_of_sinks(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    r"""Return the factor by which a per-query sink scales the output.

    A sink adds a logit s with value zero to the softmax's denominator, so the factor is
    :math:`e^{lse} / (e^{lse} + e^s) = \sigma(lse - s)`.

    Args:
        lse: (B, H, Lq).
        sinks: (B, H, Lq, 1), broadcast.

    Returns:
        (B, H, Lq, 1), a factor of the output before or after dropout.
    """
    return torch.sigmoid(lse[..., None] - sinks.to(lse.dtype))
