# SPDX-License-Identifier: Apache-2.0
"""Ring attention on processes: dropout mask, bytes, bits, errors and planted faults."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.distributed import ring_attention, shard_sequence
from pytransformer.reference.philox import keep_mask
from pytransformer.testing import bounds
from support.attention_problem import Problem
from support.ranks import Pool
from support.ring_faults import FAULTS
from support.split_attention import attend, joined, rows_of
from support.split_checks import (
    attend_with,
    bytes_sent,
    first_collectives,
    outputs,
    peak_bytes,
    refusal,
    seed_drawn,
    there_and_back,
)

LAYOUTS = ("contiguous", "zigzag")


def problem_of(
    heads: int = 4,
    key_heads: int = 2,
    length: int = 48,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> Problem:
    """Return a problem of normal data.

    Query, key, value and floating tensors of ``given`` require gradients.
    """
    shapes = {"query": heads, "key": key_heads, "value": key_heads}
    tensors = {name: torch.randn(2, h, length, dim).to(dtype) for name, h in shapes.items()}
    tensors |= {
        n: t for n, t in given.items() if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    keywords = {n: t for n, t in given.items() if n not in tensors}
    grads = (
        torch.randn(2, heads, length, dim).to(dtype),
        torch.randn(2, heads, length).to(torch.float64),
    )
    return Problem(tensors, keywords, tuple(tensors), *grads, dtype, "normal", packed=False)


def in_blocks(problem: Problem, seen: torch.Tensor) -> Problem:
    """Return the problem with a block mask that shows ``seen``."""
    return dataclasses.replace(
        problem, keywords=problem.keywords | {"attn_mask": seen}, block_size=(32, 32)
    )


def stripes(length: int) -> torch.Tensor:
    """Return a mask of near keys and every 16th key, with another set for each of four heads."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return torch.stack([((i - j).abs() < 5) | ((i - j) % 16 == h) for h in range(4)])[None]


def wrong(problem: Problem, shards: list[Any], layout: str) -> list[str]:
    found = bounds.check(
        problem.solve(), joined(problem, shards, layout), problem.dtype, problem.limits
    )
    return [str(c) for c in found if not c.ok]


@pytest.mark.parametrize(
    "scheme, layout", [("ring", "contiguous"), ("ring", "zigzag"), ("ulysses", "contiguous")]
)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dropout_mask_equals_one_process(pool: Pool, ranks: int, scheme: str, layout: str) -> None:
    """Value as the identity and equal scores expose the mask in out."""
    length, seed, p, heads = 48, 7, 0.4, 12 if scheme == "ulysses" else 2
    q, eye = torch.zeros(2, heads, length, 8), torch.eye(length).expand(2, heads, length, length)
    shards = pool.run(ranks, outputs, scheme, layout, q, q, eye, dropout_p=p, dropout_seed=seed)
    order = torch.cat([rows_of(length, ranks, r, layout) for r in range(ranks)])
    whole = torch.cat(shards, 2).index_select(2, order.argsort())
    keep = keep_mask(torch.tensor(seed), p, 2, heads, length, length)
    assert torch.equal(whole != 0, keep)
    assert torch.allclose(whole, pt.attention(q, q, eye, dropout_p=p, dropout_seed=seed))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_backend_is_right_in_float64(pool: Pool, backend: str, layout: str) -> None:
    """Tiles are differentiated by the row's lse and through their own softmax."""
    problem = problem_of(
        causal="top_left", window=(20, None), table=torch.randn(8, 4).double(), t5=(False, 20),
        sinks=torch.randn(4).double(),
        attn_mask=torch.randn(2, 1, 48, 48).double(), dropout_p=0.2, dropout_seed=3, softcap=4.0,
        key_lengths=torch.tensor([48, 29]), query_lengths=torch.tensor([40, 29]),
    )  # fmt: skip
    assert not wrong(
        problem, pool.run(3, attend, problem, "ring", layout, backend=backend, strict=True), layout
    )


@pytest.mark.parametrize(
    "scheme, layout", [("ring", "contiguous"), ("ring", "zigzag"), ("ulysses", "contiguous")]
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_block_masks_within_the_bound(pool: Pool, backend: str, scheme: str, layout: str) -> None:
    """Each head has another mask; tiles with rows of finfo.min use a shift."""
    lowest = torch.zeros(1, 1, 48, 48).double()
    lowest[..., 5::3, :] = torch.finfo(torch.float32).min
    problem = in_blocks(
        problem_of(bias=lowest, key_lengths=torch.tensor([48, 29]), key_heads=4), stripes(48)
    )
    assert not wrong(
        problem, pool.run(4, attend, problem, scheme, layout, backend=backend, strict=True), layout
    )


def test_ring_skips_blocks_hidden_by_a_block_mask(pool: Pool) -> None:
    """Documents of 64 rows on four ranks of 32: each rank gets only its neighbor's keys."""
    length, dim = 128, 8
    seen = torch.block_diag(*[torch.ones(64, 64)] * 2).bool()[None, None]
    problem = in_blocks(problem_of(length=length, dtype=torch.float32), seen)
    found = pool.run(4, bytes_sent, problem, "ring", "contiguous")
    chunk = 2 * 2 * (length // 4) * dim * 4 * 2
    assert [sent["isend"] for sent in found] == [3 * chunk] * 4


def test_all_ranks_synchronize_before_sends(pool: Pool) -> None:
    """NCCL needs every rank in a group's first call.

    Two ranks see only their own rows and never send.
    """
    seen = torch.block_diag(torch.ones(64, 64), torch.ones(32, 32), torch.ones(32, 32)).bool()[
        None, None
    ]
    problem = in_blocks(problem_of(length=128, dtype=torch.float32), seen)
    *others, last = pool.run(4, first_collectives, problem)
    assert last == ["all_reduce"], "once for both calls"
    assert others[0][0] == others[1][0] == "all_reduce" and others[0].count("all_reduce") == 1
    assert others[0].count("batch_isend_irecv") >= 4


def test_repeated_runs_give_equal_bits(pool: Pool) -> None:
    problem = problem_of(
        dtype=torch.float32, causal="top_left", table=torch.randn(8, 4), t5=(False, 20)
    )
    first, second = (pool.run(4, attend, problem, "ring", "zigzag") for _ in range(2))
    assert [bounds.other_bits(a, b) for a, b in zip(first, second)] == [[]] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_decreases_with_the_ranks(pool: Pool, layout: str) -> None:
    """Four ranks need more than half the memory of two, which pass no gradient on."""
    problem = problem_of(length=1024, dim=32, dtype=torch.float32, causal="top_left")
    two, four = (max(pool.run(ranks, peak_bytes, problem, layout)) for ranks in (2, 4))
    print(f"{layout}: {two:,} bytes on two ranks, {four:,} on four")
    assert 0.5 <= four / two < 0.65, (two, four)


def ulysses_bytes(ranks: int, batch: int, rows: int, heads: list[tuple[int, int]]) -> int:
    """Return the bytes that one rank sends in one direction.

    Each (heads, head dim) sends all but the local part.
    """
    return sum(batch * rows * h * d for h, d in heads) * 4 * (ranks - 1) // ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ulysses_bytes_equal_the_formula(pool: Pool, layout: str) -> None:
    """Forward sends query, key, value, out and a requested lse; backward sends their gradients.

    There is one more key head than ranks.
    """
    ranks, length, dim = 2, 48, 8
    problem = problem_of(dtype=torch.float32, causal="top_left")
    one_way = ulysses_bytes(
        ranks, 2, length // ranks, [(4, dim), (2, dim), (2, dim), (4, dim), (4, 1)]
    )
    for sent in pool.run(ranks, bytes_sent, problem, "ulysses", layout):
        assert sent == {"all_to_all": 2 * one_way}


@pytest.mark.parametrize("scheme, ranks", [("ulysses", 2), ("ulysses", 4)])
def test_ulysses_is_right_in_float64(pool: Pool, scheme: str, ranks: int) -> None:
    """Four ranks share two key heads: each is sent to two."""
    problem = problem_of(
        causal="top_left", window=(20, None), table=torch.randn(8, 4).double(), t5=(False, 20),
        sinks=torch.randn(4).double(),
        attn_mask=torch.randn(2, 4, 48, 48).double(), key_lengths=torch.tensor([48, 29]),
        dropout_p=0.2, dropout_seed=3,
    )  # fmt: skip
    assert not wrong(
        problem,
        pool.run(ranks, attend, problem, scheme, "zigzag", backend="cpu", strict=True),
        "zigzag",
    )


def test_ulysses_refuses_unsupported_calls(pool: Pool) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ((1, 3, 4, 8), {}, "2 ranks must divide query's heads"),
    ]
    for shape, options, why in cases:
        assert all(
            why in output for output in pool.run(2, refusal, "ulysses", [shape] * 3, [options] * 2)
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "keywords", [{}, {"causal": "top_left"}, {"causal": "top_left", "window": (11, None)}], ids=str
)
def test_ring_bytes_equal_the_formulas(pool: Pool, layout: str, keywords: dict[str, Any]) -> None:
    """docs/distributed.md: K and V in forward; again in backward, with float32 gradients."""
    ranks, batch, key_heads, length, dim = 4, 2, 2, 48, 8
    problem = problem_of(dtype=torch.float32, **keywords)
    found = pool.run(ranks, bytes_sent, problem, "ring", layout)
    chunk = batch * key_heads * (length // ranks // (2 if layout == "zigzag" else 1)) * dim * 4 * 2
    chunks = {
        ("contiguous", 0): ranks * (ranks - 1),
        ("contiguous", 1): ranks * (ranks - 1) // 2,
        ("contiguous", 2): ranks - 1,  # the window extends into the previous shard
        ("zigzag", 0): 2 * ranks * (ranks - 1),
        ("zigzag", 1): 3 * ranks * (ranks - 1) // 2,
        # 8 chunks of 6 rows, each visible to the next two: 2 + 2 + 1 + 1 + 2 + 2 + 1 + 0 on other
        # ranks
        ("zigzag", 2): 11,
    }[layout, len(keywords)]
    assert sum(sent.get("isend", 0) for sent in found) == 3 * chunks * chunk
    assert not any(sent.get("all_gather") for sent in found)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_detected(pool: Pool, fault: str | None) -> None:
    """Rows of finfo.min are mixed with others; a sink would get all their weight."""
    lowest = torch.zeros(1, 1, 48, 48)
    lowest[..., 5::3, :] = torch.finfo(torch.float32).min
    sinks = {"sinks": torch.randn(4)} if fault and "sink" in fault else {}
    blocks = fault is not None and "block" in fault
    problem = problem_of(
        causal="top_left", dtype=torch.float32, table=torch.randn(8, 4), t5=(False, 20),
        attn_mask=lowest, dropout_p=0.2,
        dropout_seed=3, key_lengths=torch.tensor([48, 29]), **sinks,
    ) if not blocks else in_blocks(problem_of(dtype=torch.float32), stripes(48))  # fmt: skip
    shards = pool.run(2, attend_with, fault, problem, "ring", "contiguous")
    try:
        found = wrong(problem, shards, "contiguous")
    except AssertionError as error:  # arguments that must be equal on all ranks differ
        found = [str(error)]
    assert bool(found) == (fault is not None), found


def test_gradient_shares_sum_to_the_full_gradient(pool: Pool) -> None:
    """sum_gradients=False leaves a share on each rank."""
    problem = problem_of(causal="top_left", table=torch.randn(8, 4).double(), t5=(False, 20))
    whole, shares = (
        pool.run(2, attend, problem, "ring", "zigzag", sum_gradients=both) for both in (True, False)
    )
    assert torch.equal(whole[0]["table"], whole[1]["table"])
    assert not torch.equal(shares[0]["table"], shares[1]["table"])
    assert torch.equal(
        shares[0]["table"] + shares[1]["table"], whole[0]["table"]
    )  # one sum of two terms, so bits are equal


@pytest.mark.parametrize("scheme", ["ring", "ulysses"])
def test_first_rank_draws_the_seed(pool: Pool, scheme: str) -> None:
    assert len(set(pool.run(3, seed_drawn, scheme))) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [1, 2])
def test_shard_and_gather_are_inverse(pool: Pool, dim: int, layout: str) -> None:
    x, ranks = torch.randn(2, 12, 12), 3
    for rank, (shard, whole, grad) in enumerate(pool.run(ranks, there_and_back, x, dim, layout)):
        rows = rows_of(12, ranks, rank, layout)
        assert torch.equal(shard, x.index_select(dim, rows)) and torch.equal(whole, x)
        assert torch.equal(grad, torch.zeros_like(x).index_fill(dim, rows, 1.0 + 2.0 + 3.0))


SHAPES = [(1, 2, 4, 8)] * 3
BLOCKS = [
    pt.BlockMask.from_dense(torch.ones(n, n).tril(diagonal).bool(), block_size=32)
    for n, diagonal in ((8, 0), (8, 1), (4, 0))
]
REFUSED: dict[str, tuple[list[Any], list[dict[str, Any]], str]] = {
    "layouts": (SHAPES, [{"layout": "zigzag"}, {"layout": "contiguous"}],
        "same layout, got 'zigzag' on rank 0, 'contiguous' on rank 1"),
    "lengths": (SHAPES, [{}, {"shape": (1, 2, 6, 8)}],
        "every rank of the group must call with the same query"),
    "seeds": (SHAPES, [{"dropout_p": 0.5, "dropout_seed": i} for i in range(2)],
        "the same dropout_seed, got 0 on rank 0, 1"),
    "a layout": (SHAPES, [{"layout": "striped"}] * 2,
        "layout must be one of 'contiguous', 'zigzag', got 'striped'"),
    "an odd length": ([(1, 2, 5, 8)] * 3, [{}] * 2,
        "must be a multiple of 2, got 5: pad the sequence"),
    "a group": (SHAPES, [{"group": 3}] * 2, "group must be a ProcessGroup or None, got int"),
    "a part of a block mask": (SHAPES, [{"attn_mask": BLOCKS[2]}] * 2,
        "must be a block mask of the full sequence"),
    "block masks": (SHAPES, [{"attn_mask": mask} for mask in BLOCKS[:2]],
        "the same attn_mask, got block mask of (1, 1, 8, 8)"),
    "pages": (SHAPES, [{"page_table": torch.zeros(1, 1, dtype=torch.int32)}] * 2,
        "page_table is for one process"),
    "a mask": (SHAPES, [{"attn_mask": torch.ones(4, 4, dtype=torch.bool)}] * 2,
        "does not broadcast to (B, Hq, Lq, Lk)"),
    "segments": (SHAPES, [{"query_segments": torch.zeros(1, 4, dtype=torch.long)}] * 2,
        "go together"),
    "key lengths": (SHAPES, [{"key_lengths": torch.tensor([9])}] * 2,
        "key_lengths must be between 0 and 8, got 9"),
    "dropout and an offset": (
        [(1, 2, 4, 8), (1, 2, 8, 8), (1, 2, 8, 8)],
        [{"causal": "bottom_right", "dropout_p": 0.5, "dropout_seed": 1}] * 2,
        "dropout goes by the index of the query",
    ),
    "offsets": (
        [(2, 2, 4, 8)] * 3,
        [{"causal": "bottom_right", "key_lengths": torch.tensor([8, 5])}] * 2,
        "the same for every sequence, got [-3, 0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(pool: Pool, name: str) -> None:
    shapes, by_rank, why = REFUSED[name]
    for output in pool.run(2, refusal, "ring", shapes, by_rank):
        assert output.startswith(
            "ValueError: ring_attention" if name.split()[-1] != "mask" else "ValueError"
        ), output
        assert why in output


def test_single_process_error_has_a_start_hint() -> None:
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="start the processes with torchrun"):
        ring_attention(x, x, x)
    with pytest.raises(ValueError, match="start the processes with torchrun"):
        shard_sequence(x)


GROUP_ENDS = """
import gc, sys, weakref
import torch
import torch.distributed as dist
import pytransformer as pt

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
x = torch.randn(1, 2, 8, 8, requires_grad=True)
for attend in (pt.distributed.ring_attention, pt.distributed.ulysses_attention):
    attend(x, x, x).sum().backward()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
assert group() is None, "something holds the group"
"""


def test_group_ends_with_destroy_process_group(tmp_path: Path) -> None:
    """Otherwise gloo's threads remain, and the process may abort at exit."""
    command = [sys.executable, "-c", GROUP_ENDS, str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
