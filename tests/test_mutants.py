"""The fuzzer finds every one of the known faults, and none in the faithful copy."""

from __future__ import annotations

import pytest

from pytransformer.testing import fuzz_attention
from pytransformer.testing.mutants import BACKWARD_FAULTS, FAULTS, mutant_backends

CASES = 600
SEED = 3


@pytest.fixture(scope="module")
def found(one_thread: None) -> dict[str, tuple[int, str]]:
    """For each mutant that fails: the number of its first failing case, and how it failed."""
    first: dict[str, tuple[int, str]] = {}
    with mutant_backends() as names:
        for case in range(CASES):
            alive = [n for n in names if n not in first]
            if alive == ["faithful"] and case >= 200:
                break
            if fuzz_attention.draw(SEED, case).packed:
                continue  # mutants are backends of the padded op
            _, verdicts = fuzz_attention.examine(SEED, case, alive, case % 8 == 0)
            first |= {n: (case, wrong[0]) for n, (_, wrong) in verdicts.items() if wrong}
    return first


def test_there_are_enough_mutants() -> None:
    assert len(FAULTS) + len(BACKWARD_FAULTS) - 1 >= 25


def test_the_faithful_copy_passes(found: dict[str, tuple[int, str]]) -> None:
    assert "faithful" not in found, found.get("faithful")


@pytest.mark.parametrize("mutant", [*(n for n in FAULTS if n != "faithful"), *BACKWARD_FAULTS])
def test_the_fuzzer_finds(mutant: str, found: dict[str, tuple[int, str]]) -> None:
    """By a wrong number or unequal bits: a mutant that merely crashes would prove nothing."""
    assert mutant in found, f"{mutant} survived {CASES} cases"
    case, reason = found[mutant]
    assert "WRONG" in reason or "rows that take part in no pair" in reason or "two runs differ" in reason, (
        case,
        reason,
    )
