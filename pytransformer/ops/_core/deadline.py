# SPDX-License-Identifier: Apache-2.0
"""Time limits that adapt to the machine.

They count the seconds of an idle core of known speed, which pass more slowly on a slow or busy
machine.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import dataclass, field

NOMINAL = 0.0045  # seconds of loop_time on an idle AMD EPYC (Zen 5) under Python 3.11
MOST = 6.0  # maximum slowdown: a hang must end on a busy machine too
EVERY = 5.0  # seconds; nine loops are 1 % of that


def loop_time() -> float:
    """Return the seconds of a loop of known cost, which grow on a slow or shared core."""
    start, total = time.monotonic(), 0
    for i in range(100_000):
        total += i * i % 7
    return time.monotonic() - start


def slowness() -> float:
    """Return how many times slower than an idle nominal core this machine is, from 1 to MOST."""
    return min(max(1.0, statistics.mean(loop_time() for _ in range(9)) / NOMINAL), MOST)


class Stopwatch:
    """Seconds since creation, each divided by the slowness measured at its end unless ``exact``."""

    def __init__(self, exact: bool = False) -> None:
        self.exact, self._counted, self._until, self._lock = (
            exact,
            0.0,
            time.monotonic(),
            threading.Lock(),
        )

    def count(self, limit: float = math.inf) -> float:
        """Return the seconds.

        The slowness is measured every EVERY seconds, and before the limit counts as reached.
        """
        with self._lock:
            now = time.monotonic()
            passed = now - self._until
            if (
                self.exact
                or self._counted >= limit
                or (passed < EVERY and self._counted + passed < limit)
            ):
                return self._counted + passed
            self._counted, self._until = self._counted + passed / slowness(), now
            return self._counted


@dataclass
class Deadline:
    """A limit of seconds on a stopwatch, by default a new one."""

    seconds: float
    watch: Stopwatch = field(default_factory=Stopwatch)

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.seconds - self.watch.count(self.seconds))
