# SPDX-License-Identifier: Apache-2.0
"""The fuzzer's problems, split over ranks and joined again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pytransformer.distributed import ring_attention, ulysses_attention
from pytransformer.testing import bounds

from .attention_problem import Problem, in_blocks
from .poison import poisoned

SCHEMES: dict[str, Any] = {"ring": ring_attention, "ulysses": ulysses_attention}
BY_ROW = {"query": 2, "key": 2, "value": 2, "query_segments": 1, "key_segments": 1}


def rows_of(length: int, ranks: int, rank: int, layout: str) -> Tensor:
    """Return a rank's rows, computed independently of the package."""
    if layout == "contiguous":
        return torch.arange(length).view(ranks, -1)[rank]
    chunks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def padded(problem: Problem, multiple: int) -> Problem:
    """Return the problem padded to multiples, with lengths if there is padding."""
    tensors, keywords = dict(problem.tensors), dict(problem.keywords)
    lengths = {name: tensors[name].shape[2] for name in ("query", "key")}
    more = {name: -n % multiple for name, n in lengths.items()}
    for name, of in (("query_lengths", "query"), ("key_lengths", "key")):
        if more[of] and name not in keywords:
            keywords[name] = torch.full((tensors["query"].shape[0],), lengths[of])
    grow_query, grow_key = more["query"], more["key"]
    for held in (tensors, keywords):
        for name, t in held.items():
            if name in ("query", "key", "value"):
                held[name] = _grown(t, 2, more["query" if name == "query" else "key"])
            elif name in ("attn_mask", "bias"):
                for dim, length, n in (
                    (-2, lengths["query"], grow_query),
                    (-1, lengths["key"], grow_key),
                ):
                    t = _grown(t, dim, n) if t.dim() >= -dim and t.shape[dim] == length != 1 else t
                held[name] = t
            elif name in ("query_segments", "key_segments"):
                held[name] = _grown(t, 1, more[name.split("_")[0]])
    grad_lse = None if problem.grad_lse is None else _grown(problem.grad_lse, 2, grow_query)
    grad_out = _grown(problem.grad_out, 2, grow_query)
    return dataclasses.replace(
        problem, tensors=tensors, keywords=keywords, grad_out=grad_out, grad_lse=grad_lse
    )


def _grown(t: Tensor, dim: int, n: int) -> Tensor:
    if not n:
        return t
    shape = list(t.shape)
    shape[dim] = n
    return torch.cat([t, t.new_zeros(shape)], dim)


def split_by_rows(name: str, t: Tensor, num_queries: int) -> int | None:
    """Return the dimension that is split over the ranks, or None."""
    if name in ("attn_mask", "bias"):
        return -2 if t.dim() >= 2 and t.shape[-2] == num_queries != 1 else None
    return BY_ROW.get(name)


def attend(
    rank: int, group: dist.ProcessGroup, problem: Problem, scheme: str, layout: str, **options: Any
) -> dict[str, Any]:
    """Return a rank's out, lse and gradients by name."""
    ranks, num_queries = dist.get_world_size(group), problem.tensors["query"].shape[2]

    def mine(name: str, t: Any) -> Any:
        dim = split_by_rows(name, t, num_queries) if isinstance(t, Tensor) else None
        return t if dim is None else t.index_select(dim, rows_of(t.shape[dim], ranks, rank, layout))

    with poisoned():
        leaves = {
            n: mine(n, t).detach().requires_grad_(n in problem.wanted)
            for n, t in problem.tensors.items()
        }
        keywords = {n: mine(n, t) for n, t in problem.keywords.items()}
        keywords = (
            dataclasses.replace(problem, keywords=keywords).public_keywords(leaves)
            | options
            | {"return_lse": True}
        )
        if problem.block_size:
            lengths = num_queries, problem.tensors["key"].shape[2]
            keywords["attn_mask"] = in_blocks(
                problem.keywords["attn_mask"], lengths, problem.block_size
            )
        args = leaves["query"], leaves["key"], leaves["value"]
        out, lse = SCHEMES[scheme](*args, group=group, layout=layout, **keywords)
        results = {"out": out, "lse": lse}
        if problem.wanted:
            outputs, grads = [out], [mine("query", problem.grad_out)]
            if problem.grad_lse is not None:
                outputs, grads = [out, lse], [*grads, mine("query", problem.grad_lse)]
            found = torch.autograd.grad(
                outputs, [leaves[n] for n in problem.wanted], grads, allow_unused=True
            )
            results |= dict(zip(problem.wanted, found))
    return {n: None if t is None else t.detach().clone() for n, t in results.items()}


def attend_or_refuse(
    rank: int, group: dist.ProcessGroup, *args: Any, **options: Any
) -> dict[str, Any] | str:
    """Return :func:`attend`'s results, or why the scheme refuses the problem."""
    try:
        return attend(rank, group, *args, **options)
    except ValueError as error:
        return str(error)


def joined(problem: Problem, shards: list[dict[str, Any]], layout: str) -> dict[str, Tensor | None]:
    """Join every rank's results; results that are not split must have equal bits on all ranks."""
    ranks, num_queries = len(shards), problem.tensors["query"].shape[2]
    whole: dict[str, Tensor | None] = {}
    for name, first in shards[0].items():
        pieces = [shard[name] for shard in shards]
        tensor = problem.tensors.get(name)
        dim = 2 if tensor is None else split_by_rows(name, tensor, num_queries)
        if first is None:
            whole[name] = None
        elif dim is None:
            assert not any(bounds.other_bits({name: first}, {name: p}) for p in pieces), (
                f"{name} differs between ranks"
            )
            whole[name] = first
        else:
            together = torch.cat(pieces, dim)
            order = torch.cat(
                [rows_of(together.shape[dim], ranks, r, layout) for r in range(ranks)]
            )
            whole[name] = together.index_select(dim, order.argsort())
    return whole


def cut(results: dict[str, Tensor | None], problem: Problem) -> dict[str, Tensor | None]:
    """Return the results without padding."""
    shapes = {n: t.shape for n, t in problem.tensors.items()}
    shapes["out"], shapes["lse"] = problem.grad_out.shape, problem.grad_out.shape[:3]
    return {
        n: None if t is None else t[tuple(slice(0, size) for size in shapes[n])]
        for n, t in results.items()
    }


def within(check: bounds.Check, dtype: torch.dtype, scheme: str) -> bool:
    """Return True if a result is within its bound.

    A ring rounds each tile's output to 16-bit inputs' dtype, and merging rounds again, so it may
    exceed the bound of one call by half a unit.
    """
    twice = scheme == "ring" and check.name == "out" and dtype in (torch.bfloat16, torch.float16)
    return check.reached <= check.allowed + 0.5 * twice
