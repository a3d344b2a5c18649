# SPDX-License-Identifier: Apache-2.0
"""The fuzzers detect every known fault and report none in faithful copies."""

from __future__ import annotations

import pytest

from support.checks import families
from support.faults import mutant_backends

CASES = 600
FAITHFUL_CASES = 200
SEED = 3
MUTANTS = {family: entry.mutants for family, entry in families().items()}
Found = dict[str, dict[str, tuple[int, str]]]


@pytest.fixture(scope="module")
def found(one_thread: None) -> Found:
    """Return each failing mutant's first failing case and its failure."""
    first: Found = {family: {} for family in MUTANTS}
    for family, mutants in MUTANTS.items():
        fuzzer = families()[family].fuzzer
        assert fuzzer is not None
        with mutant_backends(mutants.ops, mutants.faults, mutants.backward_faults) as names:
            for case in range(CASES):
                alive = [n for n in names if n not in first[family]]
                if alive == ["faithful"] and case >= FAITHFUL_CASES:
                    break
                if mutants.applies(fuzzer.draw(SEED, case)):
                    _, verdicts = fuzzer.examine(SEED, case, alive, case % 8 == 0)
                    first[family] |= {
                        n: (case, wrong[0]) for n, (_, wrong) in verdicts.items() if wrong
                    }
    return first


def test_there_are_enough_mutants() -> None:
    counts = {family: len(m.faults) + len(m.backward_faults) - 1 for family, m in MUTANTS.items()}
    assert min(counts.values()) >= 15 and max(counts.values()) >= 50, counts


@pytest.mark.parametrize("family", MUTANTS)
def test_faithful_copies_pass(family: str, found: Found) -> None:
    assert "faithful" not in found[family], found[family].get("faithful")


@pytest.mark.parametrize(
    ("family", "mutant"),
    [
        (s, n)
        for s, m in MUTANTS.items()
        for n in (*m.faults, *m.backward_faults)
        if n != "faithful"
    ],
)
def test_fuzzer_detects_the_mutant(family: str, mutant: str, found: Found) -> None:
    """A wrong number or unequal bits must reveal the mutant; a crash would prove nothing."""
    assert mutant in found[family], f"{mutant} survived {CASES} cases"
    case, reason = found[family][mutant]
    assert (
        "WRONG" in reason
        or "rows that take part in no pair" in reason
        or "two runs differ" in reason
    ), (case, reason)
