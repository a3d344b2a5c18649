# SPDX-License-Identifier: Apache-2.0
"""Fixed problem lists of `pytransformer bench --suite NAME` and `pytransformer bench`.

aims      every case with a performance target on CPUs, and the other ops beside
          them, in under 15 minutes on two cores; docs/performance.md shows its
          results
patterns  attention by length, 1,024 to 65,536 tokens, through block masks;
          `--providers` adds FlexAttention
isa       a subset for comparing instruction sets: `--isa avx2` pins PyTorch too

The reference is the oracle, not a contender. Naive code is left out if its (Lq, Lk) tensors alone
would dominate the time.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytransformer.cli.benchmark.plan import DTYPES, Step, resized
from pytransformer.cli.providers import NAIVE, ORACLE, TORCH, of_family
from pytransformer.testing.cases import Case, case
from pytransformer.testing.kits import kits

SUITE_SECONDS = 780.0  # for the steps; peaks, plots and startup take the rest of 15 minutes
MIN_TIME = 0.2
MOST_PAIRS = 1 << 24  # B * Hq * Lq * Lk, for naive code
DENSE = (NAIVE, TORCH)
LONGEST_DENSE = 4096  # tokens of a pattern as a dense mask, which peers do not skip
REFERENCE = "reference"


def _steps(suite: str) -> Iterator[Step]:
    for family in kits():
        for row in of_family(family, "SUITES", {}).get(suite, ()):
            found = resized(case(row.case, "medium"), dict(row.shape))
            for dtype in row.dtypes:
                for mode in row.modes:
                    long = row.sustained if mode == "fwd" else 0.0
                    yield Step(found, DTYPES[dtype], mode, row.cold, long, _left_out(found))


def _left_out(case: Case) -> dict[str, str]:
    shape = case.shape
    found = {REFERENCE: ORACLE}
    pairs = shape["B"] * shape["Hq"] * shape["Lq"] * shape["Lk"] if "Lk" in shape else 0
    if pairs > MOST_PAIRS:
        found["naive"] = (
            f"{pairs / 1e6:.0f} million scores at once take too long for a suite; --shape times it"
        )
    if "pattern" in case.tags and shape["Lk"] > LONGEST_DENSE:
        found |= dict.fromkeys(
            DENSE,
            f"a dense mask, in which it skips nothing: up to {LONGEST_DENSE} tokens in a suite;"
            " --shape times it",
        )
    return found


def aims() -> Iterator[Step]:
    return _steps("aims")


def isa() -> Iterator[Step]:
    return _steps("isa")


def patterns() -> Iterator[Step]:
    return _steps("patterns")


SUITES = {"aims": aims, "patterns": patterns, "isa": isa}
