# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: every contender takes one sample in each round.

Noise from a busy machine therefore affects all contenders. One sample is `repeats` calls, enough to
last SAMPLE_SECONDS, and gives seconds per call. The result of a contender is the median and the 20
% and 80 % quantiles.

Each contender is called until it stops getting faster, and once more before every sample, so that
caches and allocator are in the state of its own calls. Long calls reach that state by themselves
and skip this. On CUDA, events enclose each sample and a buffer larger than L2 is overwritten before
it, so inputs start uncached; `kernel_ms` measures the kernels alone. On the CPU the caches stay
warm. With `cold`, a buffer larger than the last-level cache is overwritten before each call.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

SAMPLE_SECONDS = 2e-3
SLOW_SECONDS = 0.05  # a call this long needs one warm-up call, and none before its samples
# A call this short gets this many samples, because page faults come and go.
SHORT_SECONDS, SHORT_ROUNDS = 0.01, 15
# Max warm-up calls; stop if one takes more than this share of the fastest.
WARM_UP_CALLS, SETTLED = 8, 0.9
MIN_ROUNDS, MAX_ROUNDS = 5, 200
MAX_COLD_ROUNDS = 20  # emptying the caches takes longer than most calls
FLUSH_BYTES = 256 << 20
PATIENCE = 20.0  # stop timing a contender after this many seconds, however few its samples
# Multiple of the fastest: one sample is enough for long calls. PyTorch's bf16 products without
# AVX-512 are 100 times slower.
HOPELESS = 5.0
REST_SECONDS, BURSTS = 0.1, 5  # rest before each call of a burst; number of bursts


@dataclass(frozen=True)
class Contender:
    """A contender: `call` does all the work once, `context()` wraps each sample off the clock."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    # Samples by round, in seconds.
    rounds: Mapping[int, float] = field(default_factory=dict, repr=False)

    def figures(self) -> dict[str, float | int]:
        """Return the fields of a results row."""
        return {
            "median_ms": self.median_ms,
            "p20_ms": self.p20_ms,
            "p80_ms": self.p80_ms,
            "samples": self.samples,
        }

    def over(self, peer: Timing) -> list[float] | None:
        """Return [p20, median, p80] of our time over the peer's by round; None below three rounds.

        A slow round slows both, so these quantiles are closer together than those of the times.
        """
        ratios = sorted(
            ours / peer.rounds[turn] for turn, ours in self.rounds.items() if turn in peer.rounds
        )
        return [quantile(ratios, q) for q in (0.2, 0.5, 0.8)] if len(ratios) >= 3 else None


def quantile(sorted_values: list[float], q: float) -> float:
    """Interpolate linearly between the two nearest of `sorted_values`."""
    at = q * (len(sorted_values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (at - low) * (sorted_values[high] - sorted_values[low])


class _CpuClock:
    def __init__(self, cold: bool, cpu_time: bool = False) -> None:
        self.now = time.process_time if cpu_time else time.perf_counter
        self.flush = torch.empty(evicting_bytes(), dtype=torch.int8) if cold else None

    def sample(self, call: Callable[[], object], repeats: int) -> float:
        if self.flush is not None:
            repeats = 1  # further calls would find the caches filled by the first
            self.flush.add_(1)
        start = self.now()
        for _ in range(repeats):
            call()
        return (self.now() - start) / repeats


@functools.cache
def evicting_bytes() -> int:
    """Return a buffer size that evicts the largest cache of this machine's first core."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = [
        int(text[:-1]) * units[text[-1]]
        for path in sizes
        if (text := path.read_text().strip())[-1:] in units
    ]
    return max([FLUSH_BYTES, *(size * 5 // 4 for size in found)])


class _CudaClock:
    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sample(self, call: Callable[[], object], repeats: int) -> float:
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for start, end in pairs:
            self.flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in pairs) / repeats * 1e-3


def _clock(device: str, cold: bool, cpu_time: bool = False) -> _CpuClock | _CudaClock:
    return _CudaClock() if device == "cuda" else _CpuClock(cold, cpu_time)


def interleaved(
    contenders: Mapping[str, Contender],
    *,
    min_time: float,
    min_rounds: int = MIN_ROUNDS,
    device: str = "cpu",
    cold: bool = False,
    patient: bool | None = None,
    cpu_time: bool = False,
) -> dict[str, Timing]:
    """Time all contenders, each for about `min_time` seconds and at least `min_rounds` samples.

    Sampling stops early after PATIENCE seconds, or if one call takes more than HOPELESS times the
    fastest contender's (PyTorch's bf16 products on AVX2: half a minute per call).

    If the clock is `patient` (the default unless `min_rounds` is below MIN_ROUNDS), CPU calls under
    SLOW_SECONDS still get MIN_ROUNDS samples and those under SHORT_SECONDS get SHORT_ROUNDS, which
    cost a fraction of a second.

    With ``cpu_time`` a sample is the CPU time of the process, which other processes on the machine
    affect less. It means something only if every contender runs on one thread.

    The order rotates, and every other round runs backwards, because a contender that always follows
    the same neighbor inherits its caches and clock frequency.
    """
    clock = _clock(device, cold, cpu_time)
    settles = device == "cpu" and not cold
    patient = min_rounds >= MIN_ROUNDS if patient is None else patient
    repeats, untimed, least, rounds, warm = {}, {}, {}, min_rounds, {}
    for name, contender in contenders.items():
        with contender.context():
            seconds = warm[name] = _warmed_up(clock, contender.call)
        repeats[name] = max(1, round(SAMPLE_SECONDS / seconds))
        untimed[name] = int(settles and seconds < SLOW_SECONDS)
        enough = (
            SHORT_ROUNDS if seconds < SHORT_SECONDS else MIN_ROUNDS if seconds < SLOW_SECONDS else 1
        )
        least[name] = max(min_rounds, enough) if settles and patient else min_rounds
        rounds = max(
            rounds, least[name], math.ceil(min_time / (seconds * (repeats[name] + untimed[name])))
        )
    for name, seconds in warm.items():
        if seconds > max(SLOW_SECONDS, HOPELESS * min(warm.values())):
            least[name] = 1
    rounds = min(rounds, MAX_COLD_ROUNDS if cold else MAX_ROUNDS)
    # The slowest contender needs the fewest rounds to fill its time, so it skips some.
    names = list(contenders)
    samples: dict[str, dict[int, float]] = {name: {} for name in names}
    spent = dict.fromkeys(names, 0.0)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order if turn % 2 == 0 else reversed(order):
                if spent[name] >= (
                    min_time if len(samples[name]) >= least[name] else max(min_time, PATIENCE)
                ):
                    continue
                with contenders[name].context():
                    for _ in range(untimed[name]):
                        contenders[name].call()
                    seconds = clock.sample(contenders[name].call, repeats[name])
                samples[name][turn] = seconds
                spent[name] += seconds * (repeats[name] + untimed[name])
    finally:
        if collecting:
            gc.enable()
    return {name: _summary(values) for name, values in samples.items()}


def _warmed_up(clock: _CpuClock | _CudaClock, call: Callable[[], object]) -> float:
    """Return the seconds of the last warm-up call.

    The first call of a shape pays for lazy setup and the next for allocator growth.
    """
    seconds = clock.sample(call, 1)
    for _ in range(WARM_UP_CALLS if seconds < SLOW_SECONDS else 0):
        last, seconds = seconds, max(clock.sample(call, 1), 1e-7)
        if seconds > SETTLED * last:
            break
    return seconds


def _summary(rounds: dict[int, float]) -> Timing:
    ordered = sorted(1e3 * s for s in rounds.values())
    return Timing(
        quantile(ordered, 0.5), quantile(ordered, 0.2), quantile(ordered, 0.8), len(ordered), rounds
    )


def kernel_ms(contender: Contender, calls: int = 5) -> float:
    """Return the kernels' milliseconds per call from torch's profiler, without launch gaps."""
    with contender.context():
        contender.call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                contender.call()
            torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / calls * 1e-3


def regimes(contender: Contender, seconds: float, device: str = "cpu") -> tuple[float, float]:
    """Return milliseconds per call in a burst (after a rest) and sustained.

    Sustained is the later half of `seconds` of calls without a rest. CPUs and GPUs run faster after
    a rest, because clock frequency and power limits adapt to the load.
    """
    clock = _clock(device, False)
    bursts: list[float] = []
    calls: list[float] = []
    with contender.context():
        clock.sample(contender.call, 1)
        for _ in range(BURSTS):
            time.sleep(REST_SECONDS)
            bursts.append(clock.sample(contender.call, 1))
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(calls) < 2:
            calls.append(clock.sample(contender.call, 1))
    return 1e3 * quantile(sorted(bursts), 0.5), 1e3 * quantile(
        sorted(calls[len(calls) // 2 :]), 0.5
    )
