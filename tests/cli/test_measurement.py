# SPDX-License-Identifier: Apache-2.0
"""Measurement: exact references, the clock, the memory probe."""

from __future__ import annotations

import contextlib

import pytest
import torch

from pytransformer import console
from pytransformer.cli import providers
from pytransformer.cli.benchmark import check, clock, exact, memory, plan, report, runner, suites
from pytransformer.ops._core.registry import OPS
from pytransformer.testing import bounds

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]

CASES = [case for op in plan.OPS for case in plan.cases(op, "small") if "core" in case.tags]


def _found(case, dtype):
    problem = providers.Problem.make(case, dtype, "cpu", seed=3, grad=True)
    grads = check.upstream(problem, seed=4)
    reference = next(p for p in providers.ours(case.op) if p.name == "reference")
    return (
        problem,
        check.compute(problem, reference.prepare(problem), grads),
        exact.solve(problem, grads),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=plan.dtype_name)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_detects_each_planted_error(case, dtype):
    problem, found, solution = _found(case, dtype)
    assert set(found) == {
        *OPS[case.op].returned,
        *OPS[case.op].written(problem.named),
        *problem.leaves,
    }
    assert check.judge(problem, found, solution, peer=False).wrong is None
    # Change the largest element by about ten times its bound.
    for name, value in found.items():
        result = solution.results[name]
        largest = value.abs().argmax()
        unit = torch.finfo(bounds.rounding(result, dtype)).eps
        step = 100 * unit * float(result.S.flatten()[largest] + value.abs().max())
        spoilt = value.clone()
        spoilt.view(-1)[largest] += step
        verdict = check.judge(problem, {**found, name: spoilt}, solution, peer=False)
        assert verdict.wrong is not None and verdict.wrong.startswith(name), (
            f"{name} off by {step} was not found"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_peer_is_right_or_gives_a_reason(case):
    problem = providers.Problem.make(case, torch.float32, "cpu", seed=3, grad=True)
    grads = check.upstream(problem, seed=4)
    for provider in providers.providers(case.op):
        if provider.name not in (providers.NAIVE, providers.TORCH):  # test_peers has the others
            continue
        checked = problem
        if provider.prepare(problem).own_dropout:
            checked = problem.without_dropout()
        found = check.compute(checked, provider.prepare(checked), grads)
        assert check.judge(checked, found, exact.solve(checked, grads), peer=True).wrong is None, (
            provider.name
        )


def test_cross_entropy_bound_holds_for_many_classes():
    """The log of the sum grows with the classes, and its rounding changes every probability."""
    case = plan.resized(
        plan.case("linear_cross_entropy", "small"), {"rows": 256, "d": 256, "classes": 8192}
    )
    problem, found, solution = _found(case, torch.float32)
    verdict = check.judge(problem, found, solution, peer=False)
    assert verdict.wrong is None
    assert verdict.bound_used > 0.02, "so loose a bound finds nothing"


def test_every_public_op_can_be_checked():
    assert set(plan.OPS) == set(OPS)


def test_suites_request_no_missing_gradient():
    steps = [*plan.quick(plan.OPS, plan.QUICK_MODES), *suites.aims()]
    assert any(step.case.forward_only for step in steps)
    assert all(step.mode == "fwd" or not step.case.forward_only for step in steps)
    shown = {report.shape_text(step.case.shape) for step in steps if "Lk" not in step.case.shape}
    assert "B8 H32/8 L1 D128" in shown


def test_missing_gradients_of_peers_are_detected():
    problem, found, solution = _found(plan.case("bias", "small"), torch.float32)
    verdict = check.judge(problem, {**found, "bias": None}, solution, peer=True)
    assert verdict.wrong is not None and verdict.wrong.startswith("bias is off by 1 ")


# ---- clock


def _sleeper(seconds: float) -> clock.Contender:
    return clock.Contender(lambda: clock.time.sleep(seconds), contextlib.nullcontext)


@pytest.mark.usefixtures("watch")
def test_clock_orders_contenders_and_quantiles():
    timings = clock.interleaved({"slow": _sleeper(0.02), "fast": _sleeper(0.005)}, min_time=0.05)
    assert timings["fast"].median_ms == pytest.approx(5) and timings[
        "slow"
    ].median_ms == pytest.approx(20)
    for timing in timings.values():
        assert timing.p20_ms <= timing.median_ms <= timing.p80_ms
        assert timing.samples >= clock.MIN_ROUNDS


@pytest.mark.usefixtures("watch")
def test_clock_interleaves_contenders():
    """Each contender runs in every round, and the first one rotates."""
    turns: list[str] = []

    def contender(name: str) -> clock.Contender:
        def call() -> None:
            turns.append(name)
            clock.time.sleep(0.06)  # long enough for one warm-up call and one call per sample

        return clock.Contender(call, contextlib.nullcontext)

    clock.interleaved({name: contender(name) for name in "abc"}, min_time=0.0, min_rounds=4)
    rounds = [turns[3 + 3 * i : 6 + 3 * i] for i in range(4)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len({turn[0] for turn in rounds}) > 1


@pytest.mark.usefixtures("watch")
def test_clock_limits_samples_of_slow_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "PATIENCE", 0.07)  # seconds of calls, untimed ones included
    timings = clock.interleaved({"slow": _sleeper(0.02), "fast": _sleeper(0.005)}, min_time=0.0)
    assert timings["slow"].samples == 2 < clock.MIN_ROUNDS <= timings["fast"].samples


@pytest.mark.usefixtures("watch")
def test_much_slower_long_calls_get_one_sample() -> None:
    seconds = {"hopeless": 0.4, "slow": 0.2, "fast": 0.06, "short": 0.004, "many times": 0.04}
    timings = clock.interleaved(
        {name: _sleeper(seconds[name]) for name in ("hopeless", "slow", "fast")}, min_time=0.0
    )
    assert (
        timings["hopeless"].samples == 1
        and timings["slow"].samples == timings["fast"].samples == clock.MIN_ROUNDS
    )
    timings = clock.interleaved(
        {name: _sleeper(seconds[name]) for name in ("short", "many times")}, min_time=0.0
    )
    assert timings["many times"].samples >= clock.MIN_ROUNDS, "a short call costs nobody's time"


@pytest.mark.usefixtures("watch")
def test_short_calls_get_their_samples_after_the_time_limit() -> None:
    called = {"slow": 0.06, "brief": 0.02, "short": 0.004}

    def samples(patient: bool | None) -> dict[str, int]:
        contenders = {name: _sleeper(seconds) for name, seconds in called.items()}
        timings = clock.interleaved(contenders, min_time=0.0, min_rounds=1, patient=patient)
        return {name: timing.samples for name, timing in timings.items()}

    assert samples(True) == {"slow": 1, "brief": clock.MIN_ROUNDS, "short": clock.SHORT_ROUNDS}
    assert samples(None) == samples(False) == dict.fromkeys(called, 1), "--quick keeps its minute"


def test_quantiles_are_interpolated():
    assert clock.quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.5) == 3.0
    assert clock.quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.2) == pytest.approx(1.8)
    assert clock.quantile([7.0], 0.8) == 7.0


@pytest.mark.parametrize("rounds", [3, clock.MIN_ROUNDS])
def test_every_step_runs_after_the_time_limit(rounds: int, monkeypatch: pytest.MonkeyPatch):
    """--quick runs a step once, a suite with the samples of short calls.

    On a busy machine every call counts as short.
    """
    monkeypatch.setattr(clock, "SHORT_SECONDS", 10.0)

    def run(name: str, size: int) -> runner.Runner:
        late = runner.Runner(runner.Options(min_time=10.0, min_rounds=rounds), memory.MemoryProbe())
        step = plan.Step(plan.resized(plan.case(name, "small"), {"D": size}), torch.float32, "fwd")
        late.run(step, seconds=0.0)
        samples = [row["samples"] for row in late.rows]
        assert (
            max(samples) <= 2 if rounds < clock.MIN_ROUNDS else max(samples) == clock.SHORT_ROUNDS
        )
        assert all(row["peak_bytes"] is None for row in late.rows)
        return late

    # No fused backend supports head dim 1000, so only the reference runs.
    assert {row["backend"] for row in run("full", 1000).rows} == {"reference", "naive", "torch"}
    late = run("full", 32)
    fused = {row["backend"] for row in late.rows} - {"reference", "naive", "torch"}
    skipped = {entry["backend"] for entry in late.not_run if entry["status"] == "skipped"}
    assert skipped == ({"reference"} if fused else set())


def _timed(backend: str, samples: int, speedup: float) -> dict:
    numbers = ("peak_bytes", "error", "error_ratio_naive", "bound_used", "speedup_naive")
    row = dict.fromkeys(numbers) | {"op": "attention", "backend": backend, "case": "full"}
    row |= {"shape": {"rows": 2, "d": 4}, "dtype": "float32", "mode": "fwd", "device": "cpu"}
    row |= {"median_ms": 3.0, "p20_ms": 2.0, "p80_ms": 4.0, "tflops": 1.0, "gbps": 1.0}
    return row | {"samples": samples, "speedup_torch": speedup}


def test_rows_of_one_sample_are_marked_and_not_compared() -> None:
    once, often = _timed("cpu", 1, 0.01), _timed("cpu", 5, 2.0)
    assert report.table_row(once)[5:7] == ["3.00*", "one sample"]
    assert report.table_row(often)[5:7] == ["3.00", "2.00-4.00"]
    (line,) = report.summary([once, often])
    assert line[3:6] == ["2", "2.00", "2.00 (full)"]
    assert "`*`: a\nsingle sample" in report.LEGEND


# ---- memory


def test_naive_attention_peaks_at_its_score_matrices():
    if memory.why_not() is not None:
        pytest.skip(memory.why_not())
    case = plan.resized(
        plan.case("full", "small"), {"B": 1, "Hq": 2, "Hkv": 2, "Lq": 1024, "Lk": 1024}
    )
    score = 2 * 1024 * 1024 * 4
    step = plan.Step(case, torch.float32, "fwd")
    with memory.MemoryProbe() as probe:
        first, again = (
            probe.measure(runner.memory_request(step, "naive", "cpu")) for _ in range(2)
        )
        with pytest.raises(memory.Unmeasured, match="StopIteration"):
            probe.measure({**runner.memory_request(step, "naive", "cpu"), "backend": "nobody"})
        assert probe.measure(runner.memory_request(step, "torch", "cpu")) < score, (
            "the probe survives a failed request"
        )
    assert 2 * score <= first <= 2.5 * score, "scores and their softmax at once"
    assert abs(first - again) < 2**19


# ---- names in reports


def test_narrow_terminals_get_fewer_columns():
    row = [f"{name} value" for name in report.COLUMNS]
    columns, cells = report.fitting([row], None)
    assert columns == report.COLUMNS and cells == [row]
    columns, cells = report.fitting([row], 110)
    assert "p20-p80" not in columns and {"case", "backend", "ms", "x torch", "error"} <= set(
        columns
    )
    assert console.table_width(columns, cells) <= 110
    assert cells == [[f"{name} value" for name in columns]]


def test_names_are_escaped_in_every_report():
    evil = "a|b`c`<script>\x1b[31m\n# h *x* [l](u) $m$ \u202e"
    assert (
        "\x1b" not in console.clean(evil)
        and "\n" not in console.clean(evil)
        and "\u202e" not in console.clean(evil)
    )
    cell = console.escape_markdown(evil)
    assert "<script>" not in cell and "&lt;script&gt;" in cell
    assert r"a\|b" in cell and r"\`c\`" in cell and r"\[l\]" in cell
    assert console.escape_csv("=1+1") == "'=1+1"
    assert console.escape_plot("$x$") == r"\$x\$"
    assert (
        report.figure(0.000123) == "1.2e-04"
        and report.figure(12.345) == "12.3"
        and report.figure(None) == "-"
    )


def test_reports_have_measured_kernel_times_and_regimes():
    step = plan.Step(plan.case("full", "small"), torch.float32, "fwd")
    runs = runner.Runner(
        runner.Options(memory=False, min_time=0.0, sustained=0.01, backends=("naive",)),
        memory.MemoryProbe(),
    )
    runs.run(step)
    (row,) = runs.rows
    assert (
        row["kernel_ms"] is None
        and row["burst_ms"] > 0
        and row["sustained_ms"] > 0
        and row["cache"] == "warm"
    )
    assert report.kernel_rows(runs.rows) == [] and len(report.regime_rows(runs.rows)) == 1
    (line,) = report.kernel_rows([{**row, "kernel_ms": row["median_ms"] / 2}])
    assert line[:5] == report.table_row(row)[:5] and line[-1] == "0.500"
