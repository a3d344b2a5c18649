# SPDX-License-Identifier: Apache-2.0
"""Shifts every seed of a test run by the same amount.

Tests set seeds so that a failure repeats. Their claims must hold for any seed, and a run with
another shift checks that. Equal seeds stay equal and different ones stay different.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

# Odd, because the CPU's generator reads only the lower 32 bits of a seed; larger than hand-picked
# seeds.
STEP = 1_000_003
_manual_seed = torch.manual_seed
_Generator: TypeAlias = torch.Generator  # the C++ class, unaffected by the replacement below


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # its base is computed
    """isinstance(x, torch.Generator) must hold for generators created in C++."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


def shift_seeds(shift: int) -> None:
    """Make ``torch.manual_seed`` and generators use ``seed + STEP * shift``; 0 undoes it."""

    def shifted(seed: int) -> int:
        return (int(seed) + STEP * shift) % 2**63

    def manual_seed(seed: int) -> torch.Generator:
        return _manual_seed(shifted(seed))

    class Generator(_Generator, metaclass=_AnyGenerator):
        def manual_seed(self, seed: int) -> Any:
            return super().manual_seed(shifted(seed))

    setting = (manual_seed, Generator) if shift else (_manual_seed, _Generator)
    torch.manual_seed, torch.random.manual_seed = setting[0], setting[0]
    torch.Generator = setting[1]  # type: ignore[misc]  # replaces a C++ class by its child
