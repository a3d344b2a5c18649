# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous batching (``generate_batch``) on our kernels: packed queries, pages of keys, lengths, no mask.

transformers puts the new tokens of all requests into one row and their keys into pages that it manages. To an attention whose name has
``flash`` in it, it hands where each request's queries and keys begin; to any other a dense mask of all queries by all keys. So ours has
such a name, :data:`NAME`, which only :func:`.integrations.transformers.continuous_batching` sets.
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
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "read_index", "write_index", "logits_indices"}
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
    """Attention of one layer to the keys of each token's request, which are written first.

    A step of one token a request reads the keys where they lie, by a table of pages; pieces of prompts, and layers with a sliding window,
    whose pages are a ring, read what the cache has gathered, as transformers' own attention does.

    Args:
        query, key, value: (1, H, tokens, D), request after request.
        cache: transformers', with ``read_index``, ``write_index`` and ``cu_seq_lens_*`` in kwargs.

    Returns:
        (1, tokens, Hq, Dv), and None.

    Raises:
        ValueError: no cache, a mask, or a table made for flash attention's own kernels.
    """
    name = type(module).__name__
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(
            f"pytransformer: {name} was called without continuous batching's cache, under the name {NAME!r}, which is for generate_batch "
            "alone; use attn_implementation='pytransformer'"
        )
    if attention_mask is not None or kwargs.get("block_table") is not None:
        what = "a mask" if attention_mask is not None else "a block table"
        raise ValueError(
            f"pytransformer: {name} got {what} in continuous batching, where lengths say it all; use 'paged|eager'"
        )
    refuse_unknown(module, {name: what for name, what in kwargs.items() if name not in OF_THE_BATCH})
    sinks, by_query = sinks_of(kwargs)
    if by_query is not None or dropout:
        raise ValueError(
            f"pytransformer: {name} has sinks of each query, or dropout, in continuous batching; use 'paged|eager'"
        )
    terms: dict[str, Any] = {"causal": "bottom_right", "sinks": sinks, "softcap": softcap, "scale": scaling}
    if sliding_window is not None:
        terms["window"] = (sliding_window - 1, None)
    layer: int = module.layer_idx  # type: ignore[assignment]
    allocator = cache.layer_to_allocator[layer]
    read = kwargs["read_index"][allocator.index]
    single = kwargs["max_length_q"] == 1 and query.shape[2] == len(kwargs["cu_seq_lens_q"]) - 1
    if single and len(read) and allocator.supports_block_table:
        kwargs["read_index"] = [index[:0] for index in kwargs["read_index"]]  # it writes, and gathers nothing
        cache.update(key, value, layer, kwargs)
        pools = [pages.transpose(1, 2) for pages in allocator.get_cache_for_block_table(layer)]
        table, lengths = table_of(read, kwargs["cu_seq_lens_k"], pools[0].shape[2])
        out = attention(query[0].transpose(0, 1)[:, :, None], *pools, page_table=table, key_lengths=lengths, **terms)
        return out.transpose(1, 2).transpose(0, 1).contiguous(), None
    key, value = cache.update(key, value, layer, kwargs)
    queries, keys = kwargs["cu_seq_lens_q"].to(torch.int32), kwargs["cu_seq_lens_k"]
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return attention_varlen(q, k, v, queries, keys, kwargs["max_length_q"], kwargs["max_length_k"], **terms)[None], None


def table_of(read: torch.Tensor, offsets: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(pages (B, width) int64, lengths (B,)) from where each key lies: request b's are ``read[offsets[b] : offsets[b + 1]]``, page after
    page, each from its beginning on. What stands behind a request's last page is not read."""
    lengths = offsets.diff()
    width = -(-int(lengths.max()) // page_size) if len(lengths) else 0
    first = offsets[:-1, None] + page_size * torch.arange(width, device=read.device)
    return read[first.clamp_max(len(read) - 1)] // page_size, lengths
