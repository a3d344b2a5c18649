# SPDX-License-Identifier: Apache-2.0
"""Runs the check, the clock and the memory probe on a problem and builds its rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pytransformer.cli.benchmark import check, clock, exact, limits, memory, plan
from pytransformer.cli.benchmark.plan import Step
from pytransformer.cli.providers import (
    NAIVE,
    ON_REQUEST,
    ORACLE,
    PEERS,
    TORCH,
    Prepared,
    Problem,
    Provider,
    Unsupported,
    providers,
)
from pytransformer.cli.providers.contender import contenders

SEED = 20
REFERENCE, CPU = "reference", "cpu"
ALONE = "kernels alone of "  # a contender that makes only a row's native calls
FLOOR_ROUNDS = 4
# Before the timed graph: on a GPU the first call runs from Python and the second records, likewise
# for backward.
WARM_FORWARDS = 2
LONGEST_REASON = 300  # characters


@dataclass(frozen=True)
class Options:
    """Settings of a measurement."""

    device: str = "cpu"
    backends: tuple[str, ...] | None = None  # None: all except those on request
    verify: bool = True
    memory: bool = True
    min_time: float = 0.3  # seconds of timing per contender
    budget: float | None = None  # seconds for the full run; shortens min_time as it runs out
    min_rounds: int = clock.MIN_ROUNDS
    sustained: float = 0.0  # seconds of calls without a rest, for every contender of every step
    cold: bool = False  # empty the caches before each call, in every step
    # Measure on the CPU what determines a row's limit: call floor and kernels alone.
    limits: bool = False
    contenders: Sequence[Path] = ()  # files of the user's; always take part


@dataclass
class _Entry:
    """One implementation at one step."""

    provider: Provider
    prepared: Prepared
    verdict: check.Verdict | None = None


@dataclass
class Runner:
    """A run of steps, one by one, that fills `rows` and `not_run`, which survive an early stop."""

    options: Options
    probe: memory.MemoryProbe
    find: Callable[[str], Sequence[Provider]] = providers
    backward: bool = True  # some step has gradients, so solve for them at once
    rows: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[dict[str, Any]] = field(default_factory=list)
    _memory_seconds: float = 0.3  # average time of one measurement so far
    _exact: dict[Any, Any] = field(default_factory=dict)

    def run(self, step: Step, seconds: float | None = None) -> None:
        """Check, time and record every implementation of one step, in about `seconds` if given."""
        start, options = time.monotonic(), self.options
        late = seconds is not None and seconds <= 0
        device = options.device
        problem = Problem.make(
            step.case, step.dtype, device, seed=SEED, grad=step.mode != "fwd",
            on_device=not options.verify,
        )  # fmt: skip
        entries = self._prepared(step, problem)
        if seconds is not None and REFERENCE not in (options.backends or ()):
            entries = self._without_reference(step, entries)
        if options.verify:
            entries = self._verified(step, problem, entries)
        if not entries:
            return
        contenders = {
            e.provider.name: clock.Contender(
                work(problem, e.prepared, step.mode), e.prepared.context
            )
            for e in entries
        }
        limited = options.limits and device == "cpu" and not late
        alone = {
            ALONE + name: c
            for name in contenders
            if limited and (c := self._alone(step, name, contenders[name]))
        }
        min_time, min_rounds, with_memory = options.min_time, options.min_rounds, options.memory
        if seconds is not None:
            # Late in the run every op still runs: long calls once each, without the memory probe.
            min_rounds, with_memory = (1, False) if late else (min_rounds, with_memory)
            probing = self._memory_seconds * len(entries) * options.memory
            left = seconds - (time.monotonic() - start) - probing
            min_time = min(min_time, max(0.0, left / (len(contenders) + len(alone))))
        cold = step.cold or options.cold
        timings = clock.interleaved(
            contenders | alone, min_time=min_time, min_rounds=min_rounds, device=device, cold=cold,
            patient=options.min_rounds >= clock.MIN_ROUNDS,
        )  # fmt: skip
        long = 0.0 if late else step.sustained or options.sustained
        regimes = (
            {name: clock.regimes(contender, long, device) for name, contender in contenders.items()}
            if long
            else {}
        )
        kernels = {
            name: self._kernel_ms(step, name, contender) for name, contender in contenders.items()
        }
        del contenders, alone
        floors = self._floors(step, entries) if limited else {}
        for entry in entries:
            name = entry.provider.name
            burst, sustained = regimes.get(name, (None, None))
            self.rows.append(self._row(step, entry, timings, entries) | {
                "peak_bytes": self._peak(step, entry) if with_memory else None,
                "saved_bytes": saved_bytes(problem, entry.prepared) if problem.grad else None,
                "burst_ms": burst, "sustained_ms": sustained, "kernel_ms": kernels[name],
                "floor_ms": floors.get(name),
                "alone_ms": getattr(timings.get(ALONE + name), "median_ms", None),
                "share": getattr(problem.named.get("attn_mask"), "share", None),
                "cache": "cold" if cold or device == "cuda" else "warm",
            })  # fmt: skip

    # ---- the limit

    def _alone(self, step: Step, name: str, contender: clock.Contender) -> clock.Contender | None:
        if name != CPU:
            return None
        with contender.context():
            call = limits.kernels_alone(step.case.op, name, contender.call)
        return call and clock.Contender(call, contender.context)

    def _floors(self, step: Step, entries: list[_Entry]) -> dict[str, float]:
        """Return milliseconds of a call at a tiny shape, per implementation."""
        case, device, grad = plan.tiny(step.case), self.options.device, step.mode != "fwd"
        problem = Problem.make(case, step.dtype, device, seed=SEED, grad=grad)
        contenders = {}
        for entry in entries:
            try:
                prepared = entry.provider.prepare(problem)
            except Unsupported:
                continue
            contenders[entry.provider.name] = clock.Contender(
                work(problem, prepared, step.mode), prepared.context
            )
        timings = clock.interleaved(contenders, min_time=0.0, min_rounds=FLOOR_ROUNDS)
        return {name: timing.p20_ms for name, timing in timings.items()}

    # ---- before the clock

    def _prepared(self, step: Step, problem: Problem) -> list[_Entry]:
        entries = []
        op = step.case.op
        for provider in (*self.find(op), *contenders(op, self.options.contenders)):
            if provider.file is None and not self._takes_part(provider.name):
                continue
            named = self.options.backends is not None and provider.name in self.options.backends
            if provider.name in step.left_out and not named:
                self._refuse(step, provider.name, "skipped", step.left_out[provider.name])
                continue
            try:
                entries.append(_Entry(provider, provider.prepare(problem)))
            except Unsupported as reason:
                self._refuse(step, provider.name, "unsupported", str(reason))
            except Exception as error:
                if provider.file is None:
                    raise
                self._fail(step, provider.name, error)
        return entries

    def _fail(self, step: Step, name: str, error: Exception) -> None:
        self._refuse(step, name, "failed", f"{type(error).__name__}: {error}")

    def _takes_part(self, name: str) -> bool:
        chosen = self.options.backends
        return name not in ON_REQUEST if chosen is None else name in chosen

    def _without_reference(self, step: Step, entries: list[_Entry]) -> list[_Entry]:
        """Drop the slow reference if a fused backend supports the problem."""
        if all(e.provider.name in (REFERENCE, *PEERS) for e in entries):
            return entries
        if any(e.provider.name == REFERENCE for e in entries):
            self._refuse(step, REFERENCE, "skipped", ORACLE)
        return [e for e in entries if e.provider.name != REFERENCE]

    def _verified(self, step: Step, problem: Problem, entries: list[_Entry]) -> list[_Entry]:
        right = []
        for entry in entries:
            # An implementation with its own dropout mask is checked without dropout.
            checked, prepared = problem, entry.prepared
            try:
                if prepared.own_dropout:
                    checked = problem.without_dropout()
                    prepared = entry.provider.prepare(checked)
                entry.verdict = self._judge(step, checked, prepared, peer=entry.provider.peer)
            except Exception as error:  # report a crash of one implementation and go on
                self._fail(step, entry.provider.name, error)
                continue
            if entry.verdict.wrong is None:
                right.append(entry)
            else:
                self._refuse(step, entry.provider.name, "wrong", entry.verdict.wrong, entry.verdict)
        return right

    def _judge(
        self, step: Step, problem: Problem, prepared: Prepared, *, peer: bool
    ) -> check.Verdict:
        rows = exact.rows_of(problem)
        grads = exact.upstream_of(rows, check.upstream(problem, SEED))
        found = exact.excerpt(
            problem, rows, check.compute(problem, prepared, grads if problem.grad else None)
        )
        # The exact result is the slowest part and is shared by every implementation and mode.
        key = (step.case.name, tuple(step.case.shape.items()), step.dtype, problem.dropout)
        if key not in self._exact:
            for old in [k for k in self._exact if k[:3] != key[:3]]:
                del self._exact[old]
            self._exact[key] = exact.solve(problem, grads if self.backward else None, rows)
        return check.judge(problem, found, self._exact[key], peer=peer)

    def _refuse(
        self,
        step: Step,
        backend: str,
        status: str,
        reason: str,
        verdict: check.Verdict | None = None,
    ) -> None:
        self.not_run.append(self._about(step) | {
            "backend": backend, "status": status, "reason": _short(reason),
            "error": verdict and _finite(verdict.error),
            "error_bound": verdict and _finite(verdict.bound),
        })  # fmt: skip

    @staticmethod
    def _about(step: Step) -> dict[str, Any]:
        """Return the fields that name the problem."""
        return {
            "op": step.case.op, "case": step.case.name, "shape": dict(step.case.shape),
            "dtype": plan.dtype_name(step.dtype), "mode": step.mode,
        }  # fmt: skip

    # ---- after the clock

    def _kernel_ms(self, step: Step, name: str, contender: clock.Contender) -> float | None:
        if self.options.device != "cuda":
            return None
        try:
            return clock.kernel_ms(contender)
        except RuntimeError as error:  # the profiler may lack permission on this machine
            self._refuse(step, name, "failed", f"kernel time: {error}")
            return None

    def _peak(self, step: Step, entry: _Entry) -> int | None:
        if memory.why_not() is not None:
            return None
        start = time.monotonic()
        try:
            return self.probe.measure(
                memory_request(step, entry.provider.name, self.options.device, entry.provider.file)
            )
        except memory.Unmeasured as reason:
            self._refuse(step, entry.provider.name, "failed", f"peak memory: {reason}")
            return None
        finally:
            self._memory_seconds += 0.2 * (time.monotonic() - start - self._memory_seconds)

    def _row(
        self, step: Step, entry: _Entry, timings: Any, entries: list[_Entry]
    ) -> dict[str, Any]:
        name, timing, verdict = entry.provider.name, timings[entry.provider.name], entry.verdict
        seconds, own_dropout = timing.median_ms * 1e-3, entry.prepared.own_dropout
        direction = plan.DIRECTIONS[step.mode]
        naive = next((e for e in entries if e.provider.name == NAIVE), None)
        ratio = None
        # Errors with and without dropout belong to different problems, so no ratio.
        if verdict and naive and naive.verdict and naive.prepared.own_dropout == own_dropout:
            ratio = _ratio(verdict, naive.verdict)
        return self._about(step) | {
            "backend": name, "provider": entry.prepared.label, "device": self.options.device,
            **timing.figures(),
            "tflops": step.case.flops(direction) / seconds / 1e12,
            "gbps": step.case.bytes(step.dtype, direction) / seconds / 1e9,
            "error": verdict and verdict.error, "error_bound": verdict and verdict.bound,
            "bound_used": verdict and _finite(verdict.bound_used),
            "errors": verdict and dict(verdict.errors), "error_ratio_naive": ratio,
            "speedup_naive": _speedup(timings, NAIVE, timing),
            "speedup_torch": _speedup(timings, TORCH, timing),
            "time_over_torch": timing.over(timings[TORCH]) if TORCH in timings else None,
            "note": "checked without dropout, its own mask being random" * own_dropout,
        }  # fmt: skip


def work(problem: Problem, prepared: Prepared, mode: str) -> Callable[[], object]:
    """Return one call of `mode` with all setup done; `prepared.context` is active around it."""
    forward = prepared.forward
    if mode == "fwd":

        def inference() -> object:
            with torch.no_grad():
                return forward()

        return inference
    grads = check.upstream(problem, SEED, on_device=True)
    if mode == "fwd+bwd":
        return lambda: check.gradients(problem, forward(), grads)
    with prepared.context():
        for _ in range(1 + WARM_FORWARDS if problem.device == "cuda" else 1):
            outputs = forward()
    return lambda: check.gradients(problem, outputs, grads, retain_graph=True)


def saved_bytes(problem: Problem, prepared: Prepared) -> int:
    """Return the bytes of activations: saved for backward and not inputs."""
    given = {
        t.untyped_storage().data_ptr()
        for t in (*problem.named.values(), *problem.leaves.values())
        if torch.is_tensor(t)
    }
    kept: dict[int, torch.UntypedStorage] = {}  # holds references, so that no address is reused

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage
        return tensor

    with prepared.context(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = prepared.forward()
    del outputs
    return sum(storage.nbytes() for storage in kept.values())


def _speedup(timings: Any, peer: str, timing: clock.Timing) -> float | None:
    return timings[peer].median_ms / timing.median_ms if peer in timings else None


def _ratio(ours: check.Verdict, naive: check.Verdict) -> float | None:
    """Return the worst tensor's error over naive code's; None if naive code is exact."""
    theirs = max(naive.errors.values())
    return max(ours.errors.values()) / theirs if theirs else None


def _short(reason: str) -> str:
    """Shorten a reason, because a compiler's error can have pages."""
    first = reason.strip().split("\n", 1)[0]
    return first if len(first) <= LONGEST_REASON else f"{first[:LONGEST_REASON]} ..."


def _finite(value: float) -> float | None:
    return value if value - value == 0 else None


# ---- in the memory probe's process


def memory_request(
    step: Step, backend: str, device: str, file: Path | None = None
) -> dict[str, Any]:
    """Return the request from which the probe's process makes the same call."""
    return Runner._about(step) | {
        "backend": backend, "file": file and str(file), "device": device,
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def memory_calls(request: dict[str, Any]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the call at a tiny shape and the call, with their inputs created."""
    torch.set_num_threads(request["threads"])
    case = plan.case(request["case"]).resize(**request["shape"])
    return _memory_call(plan.tiny(case), request), _memory_call(case, request)


def _memory_call(case: plan.Case, request: dict[str, Any]) -> Callable[[], object]:
    dtype, grad = plan.DTYPES[request["dtype"]], request["mode"] != "fwd"
    problem = Problem.make(case, dtype, request["device"], seed=SEED, grad=grad)
    files = [Path(request["file"])] if request["file"] else []
    everyone = (*providers(case.op), *contenders(case.op, files))
    provider = next(p for p in everyone if p.name == request["backend"])
    prepared = provider.prepare(problem)
    call = work(problem, prepared, request["mode"])

    def inside() -> object:
        with prepared.context():
            return call()

    return inside
