# SPDX-License-Identifier: Apache-2.0
"""Rows of the problem lists of `bench --quick` and the suites.

The files of `cli/providers/` hold the lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOTH = ("float32", "bfloat16")
ORACLE = "the oracle, not a contender; --providers reference times it"
MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """A named case at a shape, in each dtype and mode."""

    case: str
    shape: Mapping[str, int]
    dtypes: tuple[str, ...] = BOTH
    modes: tuple[str, ...] = MODES
    cold: bool = False  # empty the caches before each call
    sustained: float = 0.0  # seconds of forward calls without a rest, after the bursts
