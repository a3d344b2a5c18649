# SPDX-License-Identifier: Apache-2.0
"""The functions of ``flash_attn``: (B, L, H, D), all masks aligned at the bottom right.

They run on any device, in float32 and float64 too, and differ from flash-attn in three points:
``softmax_lse`` has a gradient and is -inf for a query that sees no key, and ``S_dmask`` is None.
"""

from __future__ import annotations

import torch

from ...ops.append_kv import KeyValues, append_kv
from ...ops.rotary import rotary
from .._aligned import OutLse, attend, attend_packed, lower_scores
from .._refuse import refuse

Window = tuple[int, int]
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
UNBOUNDED = (-1, -1)


def _result(result: OutLse, return_attn_probs: bool) -> Result:
    return (*result, None) if return_attn_probs else result[0]


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = UNBOUNDED,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """Attention of q (B, Lq, H, D) to k and v (B, Lk, Hkv, D).

    Args:
        causal: query i sees key j if ``j <= i + Lk - Lq``.
        window_size: (left, right) around ``i + Lk - Lq``; -1 is unbounded.
        alibi_slopes: (H,) or (B, H), without gradient: adds ``-slope * |i + Lk - Lq - j|``.
        return_attn_probs: return (out, softmax_lse (B, H, Lq), None).
    """
    name = "flash_attn_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return _result(attend(name, q, k, v, scores), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = UNBOUNDED, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` of qkv (B, L, 3, H, D)."""
    name = "flash_attn_qkvpacked_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    q, k, v = qkv.unbind(2)
    return _result(attend(name, q, k, v, scores), return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = UNBOUNDED, softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` of q (B, Lq, H, D) and kv (B, Lk, 2, Hkv, D)."""
    name = "flash_attn_kvpacked_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    k, v = kv.unbind(2)
    return _result(attend(name, q, k, v, scores), return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = UNBOUNDED,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None,
) -> Result:  # fmt: skip
    """:func:`flash_attn_func` of packed sequences, q (total_q, H, D), k and v (total_k, Hkv, D).

    Args:
        cu_seqlens_q, cu_seqlens_k: (B + 1,) offsets of the sequences.
        return_attn_probs: return (out, softmax_lse (H, total_q), None).
        block_table: (B, pages): k and v are pools (num_pages, page_size, Hkv, D). No gradients.
    """
    name = "flash_attn_varlen_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return _result(
        attend_packed(name, q, k, v, offsets, longest, scores, block_table), return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = UNBOUNDED,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` of qkv (total, 3, H, D)."""
    name = "flash_attn_varlen_qkvpacked_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    offsets, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    q, k, v = qkv.unbind(1)
    return _result(attend_packed(name, q, k, v, offsets, longest, scores), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = UNBOUNDED,
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """:func:`flash_attn_varlen_func` of q (total_q, H, D) and kv (total_k, 2, Hkv, D)."""
    name = "flash_attn_varlen_kvpacked_func"
    scores = lower_scores(
        name, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    k, v = kv.unbind(1)
    return _result(attend_packed(name, q, k, v, offsets, longest, scores), return_attn_probs)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = UNBOUNDED, softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0, return_softmax_lse: bool = False,
) -> torch.Tensor | OutLse:  # fmt: skip
    """Append k and v to a cache in place, then attend q to the cache. Without gradients.

    Args:
        q: (B, Lq, H, D).
        k_cache, v_cache: (B, capacity, Hkv, D), or pools (num_pages, page_size, Hkv, D).
        k, v: (B, L_new, Hkv, D), written from ``cache_seqlens`` on; or both None.
        rotary_cos, rotary_sin: (positions, turned / 2): turn k, and q by row if causal or windowed,
            else all rows of q by ``cache_seqlens``.
        cache_seqlens: keys in the cache before the call, an int or (B,). None: all.
        cache_batch_idx: (B,) rows of the cache that hold the sequences.
        cache_leftpad: (B,) hides the keys before it.
        block_table: (B, pages) of the pools.
        num_splits: 0 or 1; the backend splits by the length of the sequence alone.
    """
    name = "flash_attn_with_kvcache"
    scores = lower_scores(
        name, 0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, True
    )
    if num_splits != 1:  # 1 asks for results that do not depend on the batch, which ours never do
        refuse(name, "the backend chooses the splits", num_splits=(num_splits, 0))
    _check_cache_arguments(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table
    )
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, k_cache, v_cache)
    ):
        raise ValueError(
            f"{name}: q, k, v and the cache have no gradients here; call it under torch.no_grad()"
        )
    table = (
        cache_batch_idx[:, None] if cache_batch_idx is not None else block_table
    )  # a page per sequence
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    used = capacity if cache_seqlens is None else cache_seqlens
    lengths = torch.full((q.shape[0],), used, device=q.device) if isinstance(used, int) else used
    if k is not None and v is not None:
        cache = KeyValues(k_cache.transpose(1, 2), v_cache.transpose(1, 2), table)
        turns_by_row = scores.causal or scores.window is not None
        q = _append(
            q, k, v, cache, lengths, rotary_cos, rotary_sin, rotary_interleaved, turns_by_row
        )
        lengths = lengths + k.shape[1]
    mask = None
    if cache_leftpad is not None:
        mask = (torch.arange(capacity, device=q.device) >= cache_leftpad[:, None])[:, None, None]
    out, lse = attend(
        name, q, k_cache, v_cache, scores, key_lengths=lengths, page_table=table, attn_mask=mask
    )
    return (out, lse) if return_softmax_lse else out


def _check_cache_arguments(
    k: torch.Tensor | None, v: torch.Tensor | None, cos: torch.Tensor | None,
    sin: torch.Tensor | None, cache_seqlens: int | torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None, block_table: torch.Tensor | None,
) -> None:  # fmt: skip
    name = "flash_attn_with_kvcache"
    for names, pair in (("k and v", (k, v)), ("rotary_cos and rotary_sin", (cos, sin))):
        if (pair[0] is None) != (pair[1] is None):
            raise ValueError(
                f"{name}: {names} must both be tensors or both None, got one; give the other too"
            )
    if k is None:
        refuse(name, "only a call with k and v turns the query", rotary_cos=(cos, None))
    elif cache_seqlens is None:
        raise ValueError(
            f"{name}: cache_seqlens must be an int or a tensor beside k and v, got None; pass 0 to"
            " begin"
        )
    if block_table is not None:
        refuse(name, "choose rows of block_table instead", cache_batch_idx=(cache_batch_idx, None))


def _append(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: KeyValues, lengths: torch.Tensor,
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, turns_by_row: bool,
) -> torch.Tensor:  # fmt: skip
    """Write k and v behind the first ``lengths`` keys; return the turned query."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def rows(x: torch.Tensor) -> torch.Tensor:
        return lengths[:, None] + torch.arange(x.shape[2], device=x.device)

    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # One column per pair -> one per number: c0 c0 c1 c1 if interleaved, else c0 c1 c0 c1.
        pair = (cos[positions], sin[positions])  # type: ignore[index]
        return tuple(
            t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1) for t in pair
        )

    if cos is None:
        append_kv(k, k, v, cache, rows(k))
        return q.transpose(1, 2)
    dims = 2 * cos.shape[-1]
    turn_k = tables(rows(k))
    append_kv(
        k, k, v, cache, rows(k), rotary=(turn_k[0], turn_k[1]), dims=dims, interleaved=interleaved
    )
    turn_q = tables(rows(q) if turns_by_row else lengths[:, None].expand(-1, q.shape[2]))
    return rotary(q, cos=turn_q[0], sin=turn_q[1], dims=dims, interleaved=interleaved).transpose(
        1, 2
    )
