# SPDX-License-Identifier: Apache-2.0
"""The ops on DTensors: every case split in every supported way against float64; errors; faults."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import pytransformer as pt
from pytransformer.distributed.sharding import RULES, Way
from pytransformer.testing import bounds
from pytransformer.testing.cases import case, cases
from pytransformer.testing.kits import kit_of
from pytransformer.testing.oracle import Solution, exact
from support import fuzz_cross_entropy
from support.judge import data_of
from support.models import CURVE
from support.ranks import Pool
from support.sharding_faults import FAULTS
from support.split_calls import (
    SEED,
    compute,
    loss_of,
    mask_drawn,
    other_mesh,
    plain_only,
    refusal,
    results_of,
    second_derivative,
    solution,
    sums_meet_norms,
    ways_of,
    wrong_target,
)

solve = functools.cache(solution)
CASES = [c.name for op in RULES for c in cases(op=op)]
OP = {c.name: c.op for op in RULES for c in cases(op=op)}


def wrong(name: str, dtype: torch.dtype, ranks: list[Any]) -> list[str]:
    """Return the errors beyond the bounds of one process; all ranks must agree."""
    exact: Solution = solve(name, dtype)
    assert all(bounds.other_bits(ranks[0], other) == [] for other in ranks[1:])
    return [
        str(c)
        for c in bounds.check(exact, ranks[0], dtype, limits=kit_of(OP[name]).limits)
        if not c.ok
    ]


def even(name: str, way: Way, ranks: int) -> bool:
    shape = case(name).shape
    return way.name != "heads" or not (shape["Hq"] % ranks or shape["Hkv"] % ranks)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_one_process(pool: Pool, name: str) -> None:
    """Every split runs in float64, the first in float32 too.

    Dropout needs the full tensors on every rank.
    """
    dtypes = {torch.float64: ways_of(name), torch.float32: ways_of(name)[1:2]}
    for dtype, way in ((dtype, way) for dtype, ways in dtypes.items() for way in ways):
        found = pool.run(2, compute, name, dtype, [way.name], (2,))
        if way.refused is not None:
            assert all(way.refused in output for output in found)
        elif not even(name, way, 2):
            assert all("which 2 ranks do not divide: use fewer ranks" in output for output in found)
        else:
            assert not wrong(name, dtype, found), (way.name, dtype)


@pytest.mark.parametrize(
    "name, split",
    [
        ("t5_bias", ["batch", "heads"]),
        ("sinks", ["heads", "heads"]),
        ("varlen_alibi", ["heads", "heads"]),
        ("feed_forward_swiglu", ["dimension 0 of x", "hidden"]),
        ("feed_forward_gelu", ["hidden", "hidden"]),
        ("add_rms_norm", ["dimension 0 of x", "dimension 0 of x"]),
        ("dropout", ["batch", "heads"]),
        ("dropout", ["heads", "heads"]),
        ("add_norm_dropout", ["dimension 0 of x", "dimension 0 of x"]),
        ("feed_forward_dropout", ["dimension 0 of x", "hidden"]),
        ("feed_forward_dropout", ["hidden", "hidden"]),
    ],
    ids=str,
)
def test_two_dimensional_meshes_equal_one_process(pool: Pool, name: str, split: list[str]) -> None:
    assert not wrong(name, torch.float32, pool.run(4, compute, name, torch.float32, split, (2, 2)))
    assert not wrong(name, torch.float64, pool.run(4, compute, name, torch.float64, split, (2, 2)))


LOSSES = {
    "two ranks": (2, (2,), {"weight": [Shard(0)]}),  # x, target and bias are plain tensors
    "four ranks": (4, (4,), {"x": [Replicate()], "weight": [Shard(0)], "bias": [Shard(0)]}),
    "rows and classes": (4, (2, 2),
        {"x": [Shard(0), Replicate()], "target": [Shard(0), Replicate()],
            "weight": [Replicate(), Shard(0)]}),
    "classes twice": (4, (2, 2), {"weight": [Shard(0), Shard(0)]}),
}  # fmt: skip


@pytest.mark.parametrize("how", LOSSES)
def test_random_losses_within_the_bounds(pool: Pool, how: str) -> None:
    """Cover dtypes, reductions, smoothing, ignored NaN rows, and fewer classes than ranks.

    Each CPU backend runs in turn.
    """
    ranks, shape, places = LOSSES[how]
    computed = set()
    for number in range(18):
        backend = ("cpu", "reference")[number % 2]
        problem = fuzz_cross_entropy.draw(SEED, number)
        if "rows" in how and not problem.tensors["target"].dim():
            continue
        results = exact(fuzz_cross_entropy.solve(problem))
        found = pool.run(ranks, loss_of, number, shape, places, None, backend=backend, strict=True)
        if refused := {"softcap", "class_weight"} & problem.features:
            assert "split by" in found[0] and any(name in found[0] for name in refused), found[0]
            continue
        assert all(bounds.other_bits(found[0], other) == [] for other in found[1:]), problem
        if results.results["loss"].value.isnan().any():  # the mean over no target
            assert found[0].pop("loss").isnan()
        checks = bounds.check(
            results, found[0], problem.dtype, data_of(problem), fuzz_cross_entropy.LIMITS
        )
        assert not [str(c) for c in checks if not c.ok], (number, str(problem))
        computed |= problem.features
    assert {
        "label_smoothing",
        "ignore_index",
        "ignored_nan",
        "bias",
        "mean",
        "sum",
        "none",
    } <= computed


SEEN_BY = {
    "lse of the rank's own classes": ("linear_cross_entropy", "classes"),
    "targets of the first rank's classes": ("linear_cross_entropy", "classes"),
    "the target's logit from every rank": ("linear_cross_entropy", "classes"),
    "gradients of what is whole are not added up": ("layer_norm", "dimension 0 of x"),
    "results are not added up": ("feed_forward_gelu", "hidden"),
    "b2 on every rank": ("feed_forward_gelu", "hidden"),
    "dropout counts from the rank's own start": ("dropout", "heads"),
    "slopes of other heads": ("alibi", "heads"),
    "columns of the table of other heads": ("t5_bias", "heads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(pool: Pool, fault: str) -> None:
    name, way = SEEN_BY[fault]
    assert not wrong(name, torch.float32, pool.run(2, compute, name, torch.float32, [way], (2,)))
    assert wrong(
        name,
        torch.float32,
        [pool.run(2, compute, name, torch.float32, [way], (2,), fault=fault)[0]],
    )


def shown(op: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a call whose first output exposes its dropout mask.

    Scores are equal, or the weights the identity.
    """
    ones, eye = torch.ones(5, 3, 64), torch.eye(64)
    if op == "add_norm":
        return {"x": ones, "residual": 0 * ones, "weight": torch.ones(64)}, {}
    if op == "feed_forward":
        return {"x": torch.ones(5, 3, 128), "w1": torch.eye(128), "w2": torch.eye(128)}, {
            "b1": None,
            "b2": None,
        }
    if op == "attention_varlen":
        offsets = torch.arange(4) * 64
        q, k = torch.zeros(192, 12, 64), eye.repeat(3, 1)[:, None].expand(-1, 12, -1).contiguous()
        return {"query": q, "key": k, "value": k}, {
            "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 64, "max_seqlen_k": 64
        }  # fmt: skip
    k = eye.expand(5, 12, 64, 64).contiguous()
    return {"query": torch.zeros(5, 12, 7, 64), "key": k, "value": k}, {}


MASKS = [
    ("attention", {"query": 0, "key": 0, "value": 0}),
    ("attention", {"query": 1, "key": 1, "value": 1}),
    ("attention_varlen", {"query": 1, "key": 1, "value": 1}),
    ("add_norm", {"x": 0, "residual": 0}),
    ("feed_forward", {"x": 0}),
    ("feed_forward", {"w1": 0, "w2": 1}),
]


@pytest.mark.parametrize("op, split", MASKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_dropout_mask_equals_one_process(
    pool: Pool, ranks: int, op: str, split: dict[str, int]
) -> None:
    """Bits are equal, also for parts of different sizes."""
    tensors, keywords = shown(op)
    keywords |= {"dropout_p": 0.4, "dropout_seed": 7}
    want = getattr(pt, op)(**tensors, **keywords)
    want = (want[1] if op == "add_norm" else want) != 0
    placed = {
        n: (t, [Shard(split[n])] if n in split else [Replicate()]) for n, t in tensors.items()
    }
    assert 0.5 < want.double().mean() < 0.7
    for found in pool.run(ranks, results_of, (ranks,), op, placed, **keywords):
        assert torch.equal(found[-1] != 0, want)


R, QKV = [Replicate()], (1, 4, 6, 8)
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "the sequence": (
        "attention", {n: (QKV, [Shard(2)]) for n in ("query", "key", "value")}, {},
        "cannot compute with query by dimension 2",
    ),
    "one key head": (
        "attention",
        {"query": (QKV, [Shard(1)]), "key": ((1, 1, 6, 8), R), "value": ((1, 1, 6, 8), R)}, {},
        "key has 1, which 2 ranks do not divide: use fewer ranks, or redistribute to Replicate()",
    ),
    "dropout of rows that do not follow each other": (
        "add_norm", {n: ((2, 6, 8), [Shard(1)]) for n in ("x", "residual")} | {"weight": ((8,), R)},
        {"dropout_p": 0.1},
        "dropout goes by the number of the row, and the rows of a rank do not follow each other: "
        "redistribute to Shard(0)",
    ),
    "a normalized dimension": ("layer_norm", {"x": ((4, 8), [Shard(1)])}, {"normalized_shape": 8},
        "cannot compute with x by dimension 1"),
    "two ways at once": (
        "feed_forward", {"x": ((4, 8), [Shard(0)]), "w1": ((6, 8), [Shard(0)]),
            "w2": ((8, 6), [Shard(1)])}, {"b1": None, "b2": None},
        "x by dimension 0, w1 by dimension 0, w2 by dimension 1 split. It can be split by "
        "dimension 0 of x (x 0); hidden (w1 0, w2 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(pool: Pool, name: str) -> None:
    op, tensors, keywords, why = REFUSED[name]
    for output in pool.run(2, refusal, (2,), op, tensors, **keywords):
        assert output.startswith(f"ValueError: {op}: ") and why in output, output


def test_second_derivatives_are_refused(pool: Pool) -> None:
    assert all("without create_graph=True" in output for output in pool.run(2, second_derivative))


def test_two_meshes_are_refused(pool: Pool) -> None:
    assert all("distribute both over the same mesh" in output for output in pool.run(4, other_mesh))


def test_ops_without_dtensor_support_give_a_hint(pool: Pool) -> None:
    for weights, ring in pool.run(2, plain_only):
        assert (
            "attention_weights: query, key and lse must be plain tensors" in weights
            and "give to_local()" in ring
        )


def test_bad_target_of_one_rank_raises_on_all(pool: Pool) -> None:
    first, last = pool.run(2, wrong_target)
    assert (
        "another rank's target is out of range" in first
        and "target must be between 0 and 2" in last
    )


def test_mesh_dimensions_of_one_rank_split_nothing(pool: Pool) -> None:
    """They cause no error: rows of dimension 1 on a mesh (4, 1)."""
    _, tensors, keywords, _ = REFUSED["dropout of rows that do not follow each other"]
    split = {n: (shape, [Replicate(), *where]) for n, (shape, where) in tensors.items()}
    assert pool.run(4, refusal, (4, 1), "add_norm", split, **keywords) == [""] * 4


@pytest.mark.parametrize("place", [None, 0])
def test_partial_placements_are_reduced(pool: Pool, place: int | None) -> None:
    shapes = {"x": (5, 8), "w1": (12, 8), "w2": (8, 12), "b2": (8,), "weight": (8,), "grad": (5, 8)}
    t = {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    leaves = [t[n].clone().requires_grad_() for n in ("x", "w1", "w2", "b2", "weight")]
    x, w1, w2, b2, weight = leaves
    both = pt.add_norm(pt.feed_forward(x, w1, None, w2, b2), x, weight)
    expected = dict(
        zip(
            ["normed", "stream", "x", "w1", "w2", "b2", "weight"],
            [*both, *torch.autograd.grad(both, leaves, [t["grad"]] * 2)],
        )
    )
    for found in pool.run(2, sums_meet_norms, t, place):
        for name, want in expected.items():
            torch.testing.assert_close(found[name], want.detach(), rtol=CURVE, atol=CURVE, msg=name)


def test_first_rank_draws_the_seed(pool: Pool) -> None:
    first, second = pool.run(2, mask_drawn)
    assert 0 < int((first == 0).sum()) < first.numel() and torch.equal(first, second)
