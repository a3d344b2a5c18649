"""Interleaved timing: every contender takes one sample in each round, so that a noisy machine is noisy for
all alike.

One sample is `repeats` calls, enough to last SAMPLE_SECONDS, and gives one figure (seconds a call); the
figures of a contender are summed up by their median and their 20 % and 80 % quantiles. On CUDA the calls of a
sample are enclosed by events, and a buffer larger than the L2 cache is overwritten before each, so that no
contender finds its inputs there.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

SAMPLE_SECONDS = 2e-3
SLOW_SECONDS = 0.05  # a call this long needs no second one to warm up
MIN_ROUNDS, MAX_ROUNDS = 5, 200
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Contender:
    """`call` does the whole work once; `context()` is entered around each sample, outside the clock."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds a call."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int


def quantile(sorted_values: list[float], q: float) -> float:
    """Linear interpolation between the two nearest of `sorted_values`."""
    at = q * (len(sorted_values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (at - low) * (sorted_values[high] - sorted_values[low])


class _CpuClock:
    def sample(self, call: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


class _CudaClock:
    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sample(self, call: Callable[[], object], repeats: int) -> float:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / repeats * 1e-3


def interleaved(
    contenders: Mapping[str, Contender], *, min_time: float, min_rounds: int = MIN_ROUNDS, device: str = "cpu"
) -> dict[str, Timing]:
    """Times all contenders; each is called for about `min_time` seconds in all, and in at least `min_rounds`
    samples.

    The order changes from round to round (it rotates, and every other round runs backwards), because a
    contender that always follows the same neighbour inherits that neighbour's caches and clock frequency.
    """
    clock = _CudaClock() if device == "cuda" else _CpuClock()
    repeats, rounds = {}, min_rounds
    for name, contender in contenders.items():
        with contender.context():
            seconds = clock.sample(contender.call, 1)  # the first call of a shape pays for caches and lazy set-up
            if seconds < SLOW_SECONDS:
                seconds = max(clock.sample(contender.call, 1), 1e-7)
        repeats[name] = max(1, round(SAMPLE_SECONDS / seconds))
        rounds = max(rounds, math.ceil(min_time / (seconds * repeats[name])))
    rounds = min(rounds, MAX_ROUNDS)
    # The slowest contender needs the fewest rounds to fill its time; it need not take part in all of them.
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    spent = dict.fromkeys(names, 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order if turn % 2 == 0 else reversed(order):
                if spent[name] >= min_time and len(samples[name]) >= min_rounds:
                    continue
                with contenders[name].context():
                    seconds = clock.sample(contenders[name].call, repeats[name])
                samples[name].append(seconds)
                spent[name] += seconds * repeats[name]
    finally:
        if collecting:
            gc.enable()
    return {name: _summary(values) for name, values in samples.items()}


def _summary(seconds: list[float]) -> Timing:
    ordered = sorted(1e3 * s for s in seconds)
    return Timing(quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered))
