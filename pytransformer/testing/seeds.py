# SPDX-License-Identifier: Apache-2.0
"""Other random numbers for a whole test run: every seed that a test sets is shifted by the same amount.

Tests seed themselves so that a failure repeats. What they claim must hold for any seed, and a run with another shift asks that. It leaves
equal seeds equal and different ones different.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

# An odd step, since the CPU's generator reads the lower 32 bits of a seed alone, and larger than the seeds that tests choose by hand.
STEP = 1_000_003
_manual_seed = torch.manual_seed
_Generator: TypeAlias = torch.Generator  # C++'s, whatever stands in its place later


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]  # its base is computed
    """isinstance(x, torch.Generator) must hold for generators that C++ made."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


def shift_seeds(shift: int) -> None:
    """From now on ``torch.manual_seed`` and generators take ``seed + STEP * shift`` for ``seed``; a shift of 0 undoes it."""

    def shifted(seed: int) -> int:
        return (int(seed) + STEP * shift) % 2**63

    def manual_seed(seed: int) -> torch.Generator:
        return _manual_seed(shifted(seed))

    class Generator(_Generator, metaclass=_AnyGenerator):
        def manual_seed(self, seed: int) -> Any:
            return super().manual_seed(shifted(seed))

    setting = (manual_seed, Generator) if shift else (_manual_seed, _Generator)
    torch.manual_seed, torch.random.manual_seed = setting[0], setting[0]
    torch.Generator = setting[1]  # type: ignore[misc]  # a class of C++'s is replaced by its child
