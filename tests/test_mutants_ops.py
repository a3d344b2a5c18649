"""The fuzzer finds every known fault of norms, feed-forward networks and cross entropies, and none in the faithful copy."""

from __future__ import annotations

import pytest

from pytransformer.testing.fuzz import OPS
from pytransformer.testing.mutants_ops import FAULTS, backward_faults, mutant_backends

CASES = 400
SEED = 5
Found = dict[str, dict[str, tuple[int, str]]]


@pytest.fixture(scope="module")
def found(one_thread: None) -> Found:
    """For each mutant that fails: the number of its first failing case, and how it failed."""
    first: Found = {kind: {} for kind in FAULTS}
    for kind in FAULTS:
        with mutant_backends(kind) as names:
            for case in range(CASES):
                alive = [n for n in names if n not in first[kind]]
                if alive == ["faithful"] and case >= 150:
                    break
                _, verdicts = OPS[kind](SEED, case, alive, case % 8 == 0)
                first[kind] |= {n: (case, wrong[0]) for n, (_, wrong) in verdicts.items() if wrong}
    return first


@pytest.mark.parametrize("kind", list(FAULTS))
def test_the_faithful_copy_passes(kind: str, found: Found) -> None:
    assert "faithful" not in found[kind], found[kind].get("faithful")


@pytest.mark.parametrize(
    ("kind", "mutant"), [(k, n) for k, faults in FAULTS.items() for n in (*faults, *backward_faults(k)) if n != "faithful"]
)
def test_the_fuzzer_finds(kind: str, mutant: str, found: Found) -> None:
    """By a wrong number or unequal bits: a mutant that merely crashes would prove nothing."""
    assert mutant in found[kind], f"{mutant} survived {CASES} cases"
    case, reason = found[kind][mutant]
    assert "WRONG" in reason or "two runs differ" in reason, (case, reason)
