# SPDX-License-Identifier: Apache-2.0
"""Experts split over ranks: results of one process, bytes of the formula, errors, faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models import CURVE
from support.ranks import Pool
from support.split_experts import D_MODEL, FAULTS, mixed, mixture, refusal, results, trained
from support.split_models import make, train

OPTIONS: dict[str, dict[str, Any]] = {
    "all find room": {"num_experts": 4},
    "switch": {"num_experts": 4, "choices": 1, "capacity_factor": 1.0},
    "little room": {"num_experts": 4, "capacity_factor": 0.5},
    "three choices, gated": {
        "num_experts": 8,
        "choices": 3,
        "capacity_factor": 1.0,
        "gated": True,
        "activation": "silu",
        "bias": False,
    },
}
TOKENS = {2: (9, 4), 4: (7, 0, 5, 3)}


def problem(ranks: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return tokens and upstream gradients of each rank.

    One large feature makes some experts more frequent.
    """
    torch.manual_seed(1)
    tokens = [torch.randn(n, D_MODEL, dtype=dtype) for n in TOKENS[ranks]]
    for t in tokens:
        t[:, 0] += 2
    return tokens, [torch.randn_like(t) for t in tokens]


def wrong(
    pool: Pool, ranks: int, name: str, dtype: torch.dtype, fault: str | None = None
) -> tuple[list[str], int]:
    """Return (differences from one process, sent bytes)."""
    tokens, grads = problem(ranks, dtype)
    want = results(mixture(OPTIONS[name], dtype), torch.cat(tokens), torch.cat(grads), 1.0)
    found = pool.run(ranks, mixed, OPTIONS[name], tokens, grads, fault)
    joined = {n: torch.cat([f[n] for f in found]) for n in ("out", "x")}
    joined |= {n: sum(f[n] for f in found) for n in ("balance", "router.weight")}
    joined |= {n: found[0][n] for n in want if n not in joined}
    tight = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {}
    differ = [
        n
        for n, t in want.items()
        if not torch.allclose(joined[n], t, **(tight or {"rtol": 1.3e-6, "atol": 1e-5}))
    ]
    return differ, sum(f["bytes"] for f in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_equal_one_process(pool: Pool, name: str, ranks: int, dtype: torch.dtype) -> None:
    """Compare out, balance loss and gradients for any number of tokens per rank, zero included."""
    assert wrong(pool, ranks, name, dtype)[0] == []


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_equal_the_formula(pool: Pool, name: str) -> None:
    """A slot with an expert on another rank sends a row there and back, and in backward."""
    tokens, _ = problem(2, torch.float32)
    m = mixture(OPTIONS[name], torch.float32)
    x = torch.cat(tokens)
    best, expert = torch.softmax(m.router(x), -1).topk(m.choices, -1)
    order, starts = m._sent(expert, best)
    taken = order[: int(starts[-1])]
    of_expert = torch.bucketize(torch.arange(len(taken)), starts[1:], right=True)
    elsewhere = (taken % len(x) >= len(tokens[0])) != (of_expert >= len(m.experts) // 2)
    assert wrong(pool, 2, name, torch.float32)[1] == 4 * int(elsewhere.sum()) * D_MODEL * 4 > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_detected(pool: Pool, fault: str) -> None:
    assert wrong(pool, 2, "little room", torch.float64, fault)[0]


def test_every_rank_refuses(pool: Pool) -> None:
    cases = [
        ({"num_experts": 3}, None, "2 ranks must divide the 3 experts"),
        ({"num_experts": 4}, 7, "group must be a ProcessGroup"),
    ]
    for options, given, why in cases:
        assert all(why in output for output in pool.run(2, refusal, options, given))


def test_training_with_fsdp_equals_one_process(pool: Pool) -> None:
    config = {
        "d_model": 16, "num_heads": 4, "hidden": 24, "num_layers": 2, "vocab_size": 61,
        "max_length": 16, "attention_dropout": 0.0,
        "dropout": 0.0, "experts": {"num_experts": 4, "capacity_factor": 1.0},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    batches = [
        {n: torch.randint(2, 61, (4, 9), generator=generator) for n in ("input_ids", "labels")}
        for _ in range(4)
    ]
    want = torch.stack(train(make("GPT", config, torch.float64), batches, clip=None))
    for losses in pool.run(2, trained, ("GPT", config, torch.float64), batches):
        torch.testing.assert_close(torch.stack(losses), want, rtol=CURVE, atol=0)
