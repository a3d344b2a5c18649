# SPDX-License-Identifier: Apache-2.0
"""Split KV for few queries on the emulated backend "cuda".

Random problems are in test_attention.py, and test_attention_pages.py compares paged keys.
"""

from __future__ import annotations

import pytest
import split_problems
import torch
from page_problems import BF16, Problem, draw

import pytransformer as pt
from pytransformer.ops.attention import attention_op
from support.attention_check import check_packed

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def planned(query: torch.Tensor, key: torch.Tensor, **keywords: object) -> dict[str, int]:
    from pytransformer.ops._backends.cuda.attention import _plan

    plan = _plan(attention_op.prepare(query, key, key, **keywords)[0])
    assert plan
    return plan


@pytest.mark.parametrize(
    "problem", list(split_problems.problems()), ids=lambda problem: problem.name
)
def test_each_problem_is_right(problem: Problem) -> None:
    assert split_problems.wrong(problem) == []


def test_packed_equals_padded() -> None:
    """Sequences have one, three, no and two new tokens; forward and backward run."""
    queries, keys = torch.tensor([0, 1, 4, 4, 6]), torch.tensor([0, 300, 340, 600, 617])
    args = (
        draw(6, 4, 24).to(BF16),
        draw(617, 2, 24, seed=1).to(BF16),
        draw(617, 2, 24, seed=2).to(BF16),
        queries,
        keys,
        3,
        300,
    )
    check_packed(args, {"causal": "bottom_right"}, "cuda")


def test_split_kv_depends_on_rows_only() -> None:
    """The rows of a key head decide, never the number of keys; block masks do not split."""
    key = torch.zeros(1, 2, 2000, 64)
    assert (
        planned(torch.zeros(1, 16, 4, 64), key)["splits"] == 4
    )  # two tiles of rows, 512 keys per split
    assert planned(torch.zeros(1, 16, 2, 64), key)["splits"] == 8
    few = planned(torch.zeros(1, 2, 1, 64), key[:, :, :256])
    assert (few["splits"], few["workspace"]) == (1, 0)
    assert planned(torch.zeros(1, 2, 1, 64), torch.zeros(1, 2, 100_000, 64))["splits"] == 64
    for lq, heads in ((33, 2), (5, 16)):
        assert planned(torch.zeros(1, heads, lq, 64), key) | {
            "splits": 0,
            "workspace": 0,
        } == planned(torch.zeros(1, heads, lq, 64), key)
    mask = pt.BlockMask.from_function(
        lambda b, h, i, j: j >= i, None, None, 1, 2000, block_size=128
    )
    assert planned(torch.zeros(1, 2, 1, 64), key, attn_mask=mask)["splits"] == 0


def test_explain_reports_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = draw(2, 4, 1, 64).to(BF16), draw(2, 2, 600, 64).to(BF16)
    found = pt.explain("attention", query, key, key, backend="cuda")
    assert any("keys split over up to 3 blocks" in note for note in found.notes)
    many = pt.explain("attention", draw(2, 4, 33, 64).to(BF16), key, key, backend="cuda")
    assert (
        found.extra_bytes["cuda"] == 12 * 8 + 4 * (2 * 4 * 3 * (64 + 2) + 2 * 2 * 2)
        and many.extra_bytes["cuda"] == 12 * 8 * 33
    )
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "sm90")
    (note,) = (
        n
        for n in pt.explain("attention", query, key, key, backend="cuda").notes
        if n.startswith("cuda:")
    )
    assert (
        "forward by the portable kernels: of so few queries the keys are split over blocks" in note
    )


@pytest.mark.usefixtures("sm90")
def test_split_kv_runs_on_sm90() -> None:
    query, key = draw(1, 2, 1, 64).to(BF16), draw(1, 2, 300, 64).to(BF16)
    before = torch.ops.pytransformer_C.emulator_products()
    pt.attention(query, key, key, backend="cuda", strict=True)
    assert torch.ops.pytransformer_C.emulator_products() == before


def test_groups_share_their_reads() -> None:
    """16 query heads of a key head cost the products of one.

    A window at the end of 1,024 keys costs one tile.
    """
    products = {}
    for name, heads, keywords in (
        ("one", 1, {}),
        ("16", 16, {}),
        ("window", 1, {"window": (31, 0), "causal": "bottom_right"}),
    ):
        query, key = draw(1, heads, 1, 64).to(BF16), draw(1, 1, 1024, 64).to(BF16)
        before = torch.ops.pytransformer_C.emulator_products(True)
        pt.attention(query, key, key, **keywords, backend="cuda", strict=True)
        products[name] = torch.ops.pytransformer_C.emulator_products(True) - before
    assert products["16"] == products["one"] == 32 * products["window"] > 0
