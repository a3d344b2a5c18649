# SPDX-License-Identifier: Apache-2.0
"""The fuzzers' problems give the same bits and gradients from the C++ fast path and from Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import fast_path
from pytransformer.testing.cases import Case, cases, leaves
from support import (
    draw_attention,
    fuzz_attention,
    fuzz_cross_entropy,
    fuzz_feed_forward,
    fuzz_layer_norm,
    fuzz_rotary,
)
from support.paths import counting, needs_fast_path, same, same_in_both, taken_by

pytestmark = [needs_fast_path, pytest.mark.usefixtures("one_thread")]

BLOCK = 50  # problems per test
Results = dict[str, Tensor | None]


def attention(seed: int, case: int) -> Callable[[], Results]:
    drawn = replace(
        draw_attention.draw(seed, case), block_size=None
    )  # block masks use the Python path: pass their dense masks
    return lambda: fuzz_attention.run(drawn, "cpu").results


def rowwise(module: Any) -> Callable[[int, int], Callable[[], Results]]:
    def problem(seed: int, case: int) -> Callable[[], Results]:
        drawn = module.draw(seed, case)
        return lambda: module.run(drawn, "cpu")[0]

    return problem


FUZZERS = {
    "attention": attention,
    "layer_norm": rowwise(fuzz_layer_norm),
    "feed_forward": rowwise(fuzz_feed_forward),
    "cross_entropy": rowwise(fuzz_cross_entropy),
    "rotary": rowwise(fuzz_rotary),
}
# Minimum share of the calls that the fast path must compute. The rest have no elements, odd seeds,
# strides (norms), frequencies that are given or follow from the sequence's length (rotary), or
# softcap, z-loss, class weights or accuracy (cross entropy).
LEAST = {
    "attention": 0.9,
    "attention_varlen": 0.9,
    "layer_norm": 0.3,
    "rms_norm": 0.3,
    "add_norm": 0.2,
    "feed_forward": 0.9,
    "linear_cross_entropy": 0.45,
    "rotary": 0.5,
    "append_kv": 0.5,
}


def both_paths(run: Callable[[], Results]) -> Counter[tuple[str, bool]]:
    """Run a call on both paths; return who ran with the fast path on."""
    with counting() as counts:
        mine = run()
    with fast_path.off():
        pythons = run()
    assert mine.keys() == pythons.keys()
    given = [name for name in mine if mine[name] is not None]
    assert given == [name for name in pythons if pythons[name] is not None]
    same([mine[n] for n in given], [pythons[n] for n in given])
    return counts


@pytest.mark.unpoisoned  # the fuzzers do it themselves
@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("family", FUZZERS)
def test_random_problems_give_equal_bits(
    family: str, block: int, request: pytest.FixtureRequest
) -> None:
    seed, counts = request.config.getoption("--fuzz-seed"), Counter[tuple[str, bool]]()
    for case in range(block * BLOCK, (block + 1) * BLOCK):
        try:
            counts += both_paths(FUZZERS[family](seed, case))
        except AssertionError as error:
            raise AssertionError(f"{family} seed {seed} case {case}: {error}") from error
    for op in {name for name, _ in counts}:
        done, asked = counts[op, True], counts[op, True] + counts[op, False]
        assert done >= LEAST[op] * asked, f"{op}: the fast path did {done} of {asked} calls"


IN_PYTHON = ("linear_cross_entropy_softcap",)
NAMED = [c for c in cases(size="small") if c.op in LEAST and c.name not in IN_PYTHON]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", NAMED, ids=lambda case: f"{case.op}-{case.name}")
def test_named_problems_use_the_fast_path(case: Case, dtype: torch.dtype) -> None:
    args, kwargs = case.make("cpu", dtype, seed=0, requires_grad=True)
    expected = [t for t in leaves(case.op, args, kwargs).values() if t.requires_grad]
    assert taken_by(case.op, *args, **kwargs)
    same_in_both(getattr(pt, case.op), args, expected, **kwargs)
