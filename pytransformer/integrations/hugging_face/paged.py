# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching (``generate_batch``) on our kernels, without a mask.

transformers concatenates the new tokens of all requests into one row and manages pages of their
keys. It passes the offsets of each request's queries and keys to an attention whose name contains
``flash``, and a dense mask of all queries by all keys to any other. :data:`NAME` is therefore such
a name, and only :func:`.integrations.transformers.continuous_batching` sets it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ...ops.attention import attention
from ...ops.attention_varlen import attention_varlen
from .keywords import refuse_unknown, sinks_of

NAME = "pytransformer_flash_paged"
OF_THE_BATCH = frozenset(
    {
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "read_index",
        "write_index",
        "logits_indices",
    }
    | {"logits_processor_args", "block_table"}
)


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention of each token to the keys of its request.

    transformers 5.23 passes ``cache``, and this function writes the new keys first. A step of one
    token per request then reads the keys in their pages. Prompt chunks, and layers with a sliding
    window, whose pages are a ring, read the keys that the cache gathers. From 5.24 on the model
    updates the cache itself, so key and value arrive gathered and there is no ``cache``.

    Args:
        query: (1, Hq, tokens, D), request after request.
        key, value: (1, Hkv, tokens, D) with ``cache``; else all keys of all requests.
        cache: transformers' cache, with ``read_index`` and ``write_index`` in kwargs.
        kwargs: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``.

    Returns:
        (1, tokens, Hq, Dv), and None.

    Raises:
        ValueError: a call outside continuous batching, a mask, or flash attention's block table.
    """
    name = type(module).__name__
    paged = isinstance(cache, PagedAttentionCache)
    if not paged and not isinstance(kwargs.get("cu_seq_lens_k"), torch.Tensor):
        raise ValueError(
            f"pytransformer: {name} was called without continuous batching's cache, under the name"
            f" {NAME!r}, which is for generate_batch alone; use attn_implementation='pytransformer'"
        )
    if attention_mask is not None or kwargs.get("block_table") is not None:
        what = "a mask" if attention_mask is not None else "a block table"
        raise ValueError(
            f"pytransformer: {name} got {what} in continuous batching, where lengths say it all;"
            " use 'paged|eager'"
        )
    refuse_unknown(
        module, {name: what for name, what in kwargs.items() if name not in OF_THE_BATCH}
    )
    sinks, by_query = sinks_of(kwargs)
    if by_query is not None or dropout:
        raise ValueError(
            f"pytransformer: {name} has sinks of each query, or dropout, in continuous batching;"
            " use 'paged|eager'"
        )
    terms: dict[str, Any] = {
        "causal": "bottom_right",
        "sinks": sinks,
        "softcap": softcap,
        "scale": scaling,
    }
    if sliding_window is not None:
        terms["window"] = (sliding_window - 1, None)
    if cache is not None and paged:
        in_place = _attend_pages(module, query, key, value, cache, kwargs, terms)
        if in_place is not None:
            return in_place, None
        key, value = cache.update(key, value, module.layer_idx, kwargs)
    queries, keys = (kwargs[f"cu_seq_lens_{side}"].to(torch.int32) for side in "qk")
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out = attention_varlen(
        q, k, v, queries, keys, kwargs["max_length_q"], kwargs["max_length_k"], **terms
    )
    return out[None], None


def _attend_pages(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: PagedAttentionCache,
    kwargs: dict[str, Any],
    terms: dict[str, Any],
) -> torch.Tensor | None:
    """Return the attention to keys in their pages, or None unless each request has one token."""
    layer: int = module.layer_idx
    allocator = cache.layer_to_allocator[layer]
    read = kwargs["read_index"][allocator.index]
    single = kwargs["max_length_q"] == 1 and query.shape[2] == len(kwargs["cu_seq_lens_q"]) - 1
    if not (single and len(read) and allocator.supports_block_table):
        return None
    # Write the new keys, gather nothing.
    kwargs["read_index"] = [index[:0] for index in kwargs["read_index"]]
    cache.update(key, value, layer, kwargs)
    pools = [pages.transpose(1, 2) for pages in allocator.get_cache_for_block_table(layer)]
    table, lengths = table_of(read, kwargs["cu_seq_lens_k"], pools[0].shape[2])
    q = query[0].transpose(0, 1)[:, :, None]
    out = attention(q, *pools, page_table=table, key_lengths=lengths, **terms)
    return out.transpose(1, 2).transpose(0, 1).contiguous()


def table_of(
    read: torch.Tensor, offsets: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page table (B, width) int64 and lengths (B,) from key indices.

    Request b's keys are ``read[offsets[b] : offsets[b + 1]]``, in page order, each page from its
    first row. Entries after a request's last page are unused.
    """
    lengths = offsets.diff()
    width = -(-int(lengths.max()) // page_size) if len(lengths) else 0
    first = offsets[:-1, None] + page_size * torch.arange(width, device=read.device)
    return read[first.clamp_max(len(read) - 1)] // page_size, lengths
