# SPDX-License-Identifier: Apache-2.0
"""Learning rates by step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # step, from 1 on -> learning rate


def warmup_inverse_square_root(d_model: int, warmup: int = 4000, factor: float = 1.0) -> Schedule:
    """Return ``factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)``.

    Source: Vaswani et al. 2017, section 5.3, equation 3.
    """
    if warmup < 1 or d_model < 1:
        raise ValueError(
            f"warmup_inverse_square_root: d_model and warmup must be at least 1, got {d_model} and"
            f" {warmup}"
        )
    return lambda step: factor * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def cooled_down(schedule: Schedule, steps: int, share: float = 0.3) -> Schedule:
    """Return the schedule with a linear decay to zero over the last `share` of `steps`.

    The decay averages out the noise of a high rate.
    """
    begin = steps * (1 - share)
    return lambda step: (
        schedule(step) * min(1.0, max(0.0, (steps - step + 1) / (steps - begin + 1)))
    )


def warmup_cosine(peak: float, warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """Return a linear warmup to `peak`, then half a cosine to `floor` at step `steps`."""
    if not 0 <= warmup < steps:
        raise ValueError(
            f"warmup_cosine: warmup must be between 0 and steps - 1 = {steps - 1}, got {warmup}"
        )

    def rate(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        done = min(1.0, (step - warmup) / (steps - warmup))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return rate
