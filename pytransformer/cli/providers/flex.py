# SPDX-License-Identifier: Apache-2.0
"""Peer of `attention`: compiled FlexAttention.

The case's masks and biases become its mask_mod and score_mod.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pytransformer.cli.providers import Prepared, Problem, Provider, Unsupported
from pytransformer.ops.block_mask import BlockMask
from pytransformer.testing.patterns import PATTERNS

Mod = Callable[..., torch.Tensor]


def prepare(problem: Problem) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from pytransformer.ops._core.registry import OPS

    if problem.case.op != "attention":
        raise Unsupported("FlexAttention has no packed form")
    if problem.dropout:
        raise Unsupported("FlexAttention has no dropout")
    if problem.device == "cpu" and problem.grad:
        raise Unsupported("FlexAttention has no backward on the CPU")
    query, key, value = problem.args
    if problem.device == "cuda" and (query.shape[-1] & (query.shape[-1] - 1)):
        raise Unsupported(
            f"FlexAttention requires a power of two as head size, got {query.shape[-1]}"
        )
    if "page_table" in problem.kwargs:
        raise Unsupported("FlexAttention reads pages by another formula")
    with torch.no_grad():
        a = OPS["attention"].prepare(
            *problem.args, **{k: v for k, v in problem.kwargs.items() if k != "return_lse"}
        )[0]
    mask_mod, score_mod = _mask_mod(a, _pattern_mod(problem)), _score_mod(a)
    block_mask = None
    if mask_mod is not None:
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        block_mask = create_block_mask(mask_mod, *shape, device=problem.device)
    torch._dynamo.reset()
    run = torch.compile(functools.partial(
        flex_attention, score_mod=score_mod, block_mask=block_mask, scale=a.scale,
        enable_gqa=query.shape[1] != key.shape[1]
    ))  # fmt: skip
    return Prepared("compiled FlexAttention", lambda: (run(query, key, value),))


def _pattern_mod(problem: Problem) -> Mod | None:
    """Return the mask_mod of the case's block mask: a pattern's formula."""
    mask = problem.named.get("attn_mask")
    if not isinstance(mask, BlockMask):
        return None
    if problem.case.name not in PATTERNS:
        raise Unsupported("a block mask without a formula: FlexAttention has its own")
    return PATTERNS[problem.case.name].mask_mod(mask)


def _mask_mod(a: Any, pattern: Mod | None) -> Mod | None:
    """Return visibility by the same rules as ours, one term per mask of the case."""
    lengths_q, lengths_k = a.query_lengths, a.key_lengths
    device = a.query.device
    full_q = torch.full((a.query.shape[0],), a.query.shape[2], device=device)
    full_k = torch.full((a.query.shape[0],), a.key.shape[2], device=device)
    valid_q, valid_k = (
        full_q if lengths_q is None else lengths_q,
        full_k if lengths_k is None else lengths_k,
    )
    offset = valid_k - valid_q if a.causal == "bottom_right" else torch.zeros_like(full_q)
    terms: list[Mod] = [] if pattern is None else [pattern]
    if a.causal != "none":
        prefix = torch.zeros_like(full_q) if a.prefix_lengths is None else a.prefix_lengths
        terms.append(lambda b, h, i, j: (j <= i + offset[b]) | (j < prefix[b]))
    if a.left >= 0:
        terms.append(lambda b, h, i, j: (j >= i + offset[b] - a.left) | (j < a.global_keys))
    if a.right >= 0:
        terms.append(lambda b, h, i, j: (j <= i + offset[b] + a.right) | (j < a.global_keys))
    if lengths_q is not None or lengths_k is not None:
        terms.append(lambda b, h, i, j: (i < valid_q[b]) & (j < valid_k[b]))
    if a.query_segments is not None:
        terms.append(lambda b, h, i, j: a.query_segments[b, i] == a.key_segments[b, j])
    if a.mask is not None and a.mask.dtype == torch.bool:
        mask = a.mask.expand(a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
        terms.append(lambda b, h, i, j: mask[b, h, i, j])
    if not terms:
        return None

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        seen = terms[0](b, h, i, j)
        for term in terms[1:]:
            seen = seen & term(b, h, i, j)
        return seen

    return mask_mod


def _score_mod(a: Any) -> Mod | None:
    """Return a score_mod with the softcap, then the additive terms."""
    if a.sinks is not None:
        raise Unsupported("flex_attention has no sinks but by its lse")
    if a.causal == "bottom_right" and (a.slopes is not None or a.table is not None):
        raise Unsupported(
            "this score_mod is written for biases by distance from the same index only"
        )
    added: list[Mod] = []
    for term in (a.mask if a.mask is not None and a.mask.dtype != torch.bool else None, a.bias):
        if term is not None:
            full = term.expand(a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
            added.append(lambda b, h, i, j, full=full: full[b, h, i, j])
    if a.slopes is not None:
        added.append(lambda b, h, i, j: -a.slopes[h] * (j - i).abs())
    if a.table is not None:
        from pytransformer.ops.masks import buckets_of

        longest = max(a.query.shape[2], a.key.shape[2])
        distances = torch.arange(-longest + 1, longest, device=a.query.device)
        bucket = buckets_of(distances, a.table.shape[0], a.bidirectional, a.max_distance)
        added.append(lambda b, h, i, j: a.table[bucket[j - i + longest - 1], h])
    if not added and not a.softcap:
        return None

    def score_mod(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        if a.softcap:
            score = a.softcap * torch.tanh(score / a.softcap)
        for term in added:
            score = score + term(b, h, i, j)
        return score

    return score_mod


FLEX = Provider("flex", prepare)
