# SPDX-License-Identifier: Apache-2.0
"""Limits of time that hold on every machine: they count the seconds of an idle core of known speed, which pass more slowly on a slow or
busy one."""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import dataclass, field

NOMINAL = 0.0045  # seconds of loop_time on an idle AMD EPYC (Zen 5) under Python 3.11
MOST = 6.0  # times as slow, however busy: what hangs has to end
EVERY = 5.0  # seconds; nine loops are 1 % of that


def loop_time() -> float:
    """Seconds that pass during a loop of known cost. A core that others use as well takes longer, as a slow one does."""
    start, total = time.monotonic(), 0
    for i in range(100_000):
        total += i * i % 7
    return time.monotonic() - start


def slowness() -> float:
    """How many times as long as an idle core of nominal speed this machine takes now, from 1 to MOST."""
    return min(max(1.0, statistics.mean(loop_time() for _ in range(9)) / NOMINAL), MOST)


class Stopwatch:
    """The seconds since it was made, each divided by the slowness that was measured at its end; as they pass if ``exact``."""

    def __init__(self, exact: bool = False) -> None:
        self.exact, self._counted, self._until, self._lock = exact, 0.0, time.monotonic(), threading.Lock()

    def count(self, limit: float = math.inf) -> float:
        """Seconds. Every EVERY, and before the limit counts as reached, the machine is looked at."""
        with self._lock:
            now = time.monotonic()
            passed = now - self._until
            if self.exact or self._counted >= limit or (passed < EVERY and self._counted + passed < limit):
                return self._counted + passed
            self._counted, self._until = self._counted + passed / slowness(), now
            return self._counted


@dataclass
class Deadline:
    """What is left of so many seconds of a watch, a new one if none is given."""

    seconds: float
    watch: Stopwatch = field(default_factory=Stopwatch)

    def left(self) -> float:
        """Seconds, 0 when they are up."""
        return max(0.0, self.seconds - self.watch.count(self.seconds))
