# SPDX-License-Identifier: Apache-2.0
"""Random problems on every backend against float64, and the fuzzer's coverage."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.attention_problem import Problem
from support.draw_attention import CHANCES, PACKED, draw
from support.fuzz import fuzz, main

pytestmark = pytest.mark.usefixtures("one_thread")


def test_attention_against_float64(backend: str, request: pytest.FixtureRequest) -> None:
    """Outputs, lse and gradients are within the bound, dead rows exact, bits equal in two runs.

    The forced backend must run.
    """
    cases, seed = request.config.getoption("--fuzz-cases"), request.config.getoption("--fuzz-seed")
    if backend == "reference":
        cases //= 4  # plain PyTorch: a fault there shows early
    report = fuzz("attention", [backend], seed, range(cases), stop_after=10)
    print(report.table(), f"\n{report.cases} cases, seed {seed}, {report.seconds:.0f} s")
    assert not report.failures, "\n".join(report.failures)
    taken = report.cases - report.declined[backend]
    assert taken >= (0.1 if backend == "torch" else 1.0) * report.cases, (
        f"{backend} took {taken} of {report.cases} problems"
    )


@pytest.fixture(scope="module")
def drawn(one_thread: None) -> list[Problem]:
    return [draw(0, case) for case in range(600)]


def test_every_pair_is_drawn(drawn: list[Problem]) -> None:
    """Each pair of compatible keywords occurs in some case."""
    for pair in itertools.combinations(sorted(CHANCES), 2):
        assert any(p.features.issuperset(pair) for p in drawn), f"{pair} never come together"
    for pair in itertools.combinations(PACKED, 2):
        assert any(p.packed and p.features.issuperset(pair) for p in drawn), (
            f"{pair} never come together in packed form"
        )


def test_every_layout_is_drawn(drawn: list[Problem]) -> None:
    names = {name for p in drawn for name in p.layouts.values()}
    assert {
        "contiguous",
        "rows_first",
        "fused",
        "columns_first",
        "step",
        "offset",
        "expanded0",
        "expanded1",
    } <= names
    grads = {p.layouts["grad_out"] for p in drawn}
    assert {"rows_first", "fused", "step", "offset", "expanded3"} <= grads


def test_cases_are_a_function_of_seed_and_number() -> None:
    first, second = draw(3, 17), draw(3, 17)
    assert str(first) == str(second)
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor.nan_to_num(5.0), second.tensors[name].nan_to_num(5.0)), name
    assert str(draw(3, 18)) != str(first)


def test_command_line_reproduces_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attention", "--seed", "3", "--case", "17"]) == 0
    assert "out[" in capsys.readouterr().out
