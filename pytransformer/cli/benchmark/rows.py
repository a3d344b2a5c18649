# SPDX-License-Identifier: Apache-2.0
"""Rows of the lists of problems that `bench --quick` and the suites run; the files of `cli/providers/` hold the lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOTH = ("float32", "bfloat16")
MODES = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Row:
    """A named case at a shape, in each dtype and mode."""

    case: str
    shape: Mapping[str, int]
    dtypes: tuple[str, ...] = BOTH
    modes: tuple[str, ...] = MODES
    cold: bool = False  # caches emptied before each call
    sustained: float = 0.0  # seconds of forward calls without a rest, after those of bursts
