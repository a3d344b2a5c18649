# SPDX-License-Identifier: Apache-2.0
"""Benchmark suites, checks of parts of large problems, and the figures of a row."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytransformer.cli import OK, WRONG, main, providers
from pytransformer.cli.benchmark import (
    check,
    clock,
    command,
    curves,
    exact,
    memory,
    plan,
    plots,
    report,
    results,
    runner,
    suites,
)
from pytransformer.testing import exact_attention
from pytransformer.testing.patterns import PATTERNS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "tools"))
import compare

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]


# ---- contents


def test_suite_has_every_case_with_a_target() -> None:
    steps = list(suites.aims())
    assert len({(s.case.name, tuple(s.case.shape.items()), s.dtype, s.mode) for s in steps}) == len(
        steps
    )
    grid = {
        (
            s.case.name,
            s.case.shape["Lq"],
            s.case.shape["D"],
            s.case.shape["B"] * s.case.shape["Hq"] > 1,
            s.dtype,
            s.mode,
        )
        for s in steps
        if s.case.op == "attention"
    }
    for name in ("full", "causal"):
        for length in (512, 1024, 2048, 4096):
            for head_dim in (64, 128):
                for many in (False, True):
                    for dtype in (torch.float32, torch.bfloat16):
                        for mode in ("fwd", "fwd+bwd"):
                            assert (name, length, head_dim, many, dtype, mode) in grid
    names = {s.case.name for s in steps}
    assert {"key_padding", "bias", "dropout", "window", "add_norm", "feed_forward_gelu"} <= names
    assert [s.case.shape["Lk"] for s in steps if s.cold] == [8192, 8192], "decoding from memory"
    assert any(s.sustained for s in steps)
    ops = {s.case.op for s in steps}
    assert ops == set(plan.OPS)


def test_slow_naive_code_is_left_out_with_a_reason() -> None:
    large = next(
        s for s in suites.aims() if s.case.shape.get("Lq") == 4096 and s.case.shape["B"] == 2
    )
    assert set(large.left_out) == {"reference", "naive"}
    small = plan.Step(plan.case("full", "small"), torch.float32, "fwd", left_out=large.left_out)
    done = runner.Runner(runner.Options(memory=False, min_time=0.0), memory.MemoryProbe())
    done.run(small)
    assert not {"reference", "naive"} & {row["backend"] for row in done.rows}
    skipped = {e["backend"]: e["reason"] for e in done.not_run if e["status"] == "skipped"}
    assert set(skipped) == {"reference", "naive"} and "too long" in skipped["naive"]
    assert all(e["reason"].strip() for e in done.not_run)
    asked = runner.Runner(
        runner.Options(memory=False, min_time=0.0, backends=("naive",)), memory.MemoryProbe()
    )
    asked.run(small)
    assert [row["backend"] for row in asked.rows] == ["naive"], "who is named takes part"


def test_patterns_leave_out_dense_peers_at_long_lengths() -> None:
    steps = list(suites.patterns())
    assert {s.case.shape["Lk"] for s in steps} == {1024 << n for n in range(7)} and {
        s.case.name for s in steps
    } == set(PATTERNS)
    for step in steps:
        assert ("torch" in step.left_out) == (step.case.shape["Lk"] > suites.LONGEST_DENSE)
    local = steps[0].case.resize(Lq=1024, Lk=1024)
    assert local.flops("fwd") == pytest.approx(
        PATTERNS["local"].share(1024) * plan.case("full").resize(**local.shape).flops("fwd")
    )


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_attention_gets_the_same_pattern(name: str) -> None:
    mask = PATTERNS[name].make(1000, "cpu")
    i, j = torch.broadcast_tensors(torch.arange(1000)[:, None], torch.arange(1000))
    assert torch.equal(PATTERNS[name].mask_mod(mask)(0, 0, i, j), mask.to_dense()[0, 0])


def test_pattern_rows_have_the_block_share_and_short_reasons() -> None:
    done = runner.Runner(
        runner.Options(memory=False, min_time=0.0, backends=("reference", "torch")),
        memory.MemoryProbe(),
    )
    step = plan.Step(
        plan.case("strided", "small").resize(Lq=700, Lk=700),
        torch.float32,
        "fwd",
        left_out={"naive": "x"},
    )
    done.run(step)
    assert [row["share"] for row in done.rows] == [
        PATTERNS["strided"].share(700)
    ] * 2 and 0.5 < done.rows[0]["share"] < 0.9
    done.run(dataclasses.replace(step, case=plan.case("full", "small")))
    assert done.rows[-1]["share"] is None
    done._refuse(
        step, "flex", "failed", "CppCompileError: it did not compile\n" + "warning: \n" * 1000
    )
    done._refuse(step, "flex", "failed", "x" * 1000)
    assert (
        done.not_run[-2]["reason"] == "CppCompileError: it did not compile"
        and len(done.not_run[-1]["reason"]) < 310
    )


def test_blank_reasons_are_invalid() -> None:
    blank = {
        "op": "a",
        "backend": "b",
        "case": "c",
        "dtype": "float32",
        "mode": "fwd",
        "status": "skipped",
        "reason": " ",
    }
    document = {
        "schema_version": results.SCHEMA_VERSION,
        "complete": True,
        "rows": [],
        "environment": None,
    }
    document |= {
        "not_run": [blank | {"error": None, "error_bound": None}],
        "environment": results.environment("cpu", "x"),
    }
    assert results.validate(document) == ["not_run[0].reason must not be blank"]


def test_instruction_set_limits_every_library(environment: dict[str, str]) -> None:
    for isa in command.ISAS:
        names = {
            "PYTRANSFORMER_CPU_ISA",
            "ATEN_CPU_CAPABILITY",
            "MKL_ENABLE_INSTRUCTIONS",
            "ONEDNN_MAX_CPU_ISA",
        }
        assert set(command.held_to(isa)) == names
    code = (
        "import torch; from pytransformer.cli.benchmark.command import held_to; assert"
        " held_to('generic') == {}"
    )
    tell = "; print(torch.backends.cpu.get_cpu_capability())"
    held = {**environment, **command.held_to("generic")}
    done = subprocess.run(
        [sys.executable, "-c", code + tell], env=held, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DEFAULT"


# ---- large problems, checked in part


@pytest.fixture
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_attention, "PAIRS", 1 << 12)


def _verdict(case: str, change=lambda found: found) -> check.Verdict:
    problem = providers.Problem.make(
        plan.case(case, "small"), torch.float32, "cpu", seed=3, grad=True
    )
    reference = next(p for p in providers.ours("attention") if p.name == "reference")
    rows = exact.rows_of(problem)
    assert rows is not None and 1 < len(rows) < 67
    grads = exact.upstream_of(rows, check.upstream(problem, 4))
    found = check.compute(problem, reference.prepare(problem), grads)
    solution = exact.solve(problem, grads, rows)
    return check.judge(problem, exact.excerpt(problem, rows, change(found)), solution, peer=False)


@pytest.mark.parametrize(
    "case",
    [
        "full",
        "causal",
        "window",
        "key_padding",
        "padding",
        "softcap",
        "gqa",
        "cross",
        *PATTERNS,
        "blocks",
    ],
)
def test_partial_checks_accept_the_reference(case: str, few_pairs: None) -> None:
    assert _verdict(case).wrong is None


def _spoil(name: str, factor: float):
    return lambda found: {**found, name: found[name] * factor}


@pytest.mark.parametrize("name", ["out", "query", "key", "value"])
def test_partial_checks_detect_errors(name: str, few_pairs: None) -> None:
    verdict = _verdict("causal", _spoil(name, 1.001))
    assert verdict.wrong is not None and verdict.wrong.startswith(name)


def test_partial_checks_detect_unexpected_gradients(few_pairs: None) -> None:
    def leak(found):
        problem = providers.Problem.make(
            plan.case("causal", "small"), torch.float32, "cpu", seed=3, grad=True
        )
        other = next(i for i in range(67) if i not in exact.rows_of(problem).tolist())
        query = found["query"].clone()
        query[..., other, 0] = 0.1
        return {**found, "query": query}

    assert (_verdict("causal", leak).wrong or "").startswith("query")


def test_partial_checks_detect_wrong_masks(few_pairs: None) -> None:
    def acausal(found):
        problem = providers.Problem.make(
            plan.case("full", "small"), torch.float32, "cpu", seed=3, grad=True
        )
        return {
            **found,
            "out": torch.nn.functional.scaled_dot_product_attention(*problem.args).detach(),
        }

    assert (_verdict("causal", acausal).wrong or "").startswith("out")


def test_inseparable_problems_are_checked_in_full(few_pairs: None) -> None:
    for case in ("dropout", "bias", "t5_bias", "bool_mask", "layer_norm"):
        problem = providers.Problem.make(
            plan.case(case, "small"), torch.float32, "cpu", seed=3, grad=False
        )
        assert exact.rows_of(problem) is None, case


# ---- figures


def test_time_ratios_are_computed_per_round() -> None:
    ours = clock.Timing(2.0, 1.0, 3.0, 3, {0: 1.0, 1: 2.0, 2: 3.0})
    peer = clock.Timing(4.0, 2.0, 6.0, 4, {0: 2.0, 1: 4.0, 2: 6.0, 3: 1.0})
    assert ours.over(peer) == [0.5, 0.5, 0.5], "a round that is slow for both says nothing"
    assert ours.over(clock.Timing(1.0, 1.0, 1.0, 2, {0: 1.0, 1: 1.0})) is None


def test_cold_mode_flushes_caches_before_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "evicting_bytes", lambda: 64)
    cold, calls = clock._CpuClock(cold=True), []
    before = cold.flush.clone()
    cold.sample(lambda: calls.append(1), repeats=5)
    assert len(calls) == 1 and torch.equal(cold.flush, before + 1)
    assert clock._CpuClock(cold=False).flush is None


def test_burst_and_sustained_times_differ(watch) -> None:
    last = [watch.now]

    def tired() -> None:  # slow if called again immediately
        rested = watch.now - last[0] > clock.REST_SECONDS / 2
        watch.sleep(0.001 if rested else 0.01)
        last[0] = watch.now

    burst, sustained = clock.regimes(clock.Contender(tired, contextlib.nullcontext), 0.1)
    assert burst == pytest.approx(1) and sustained == pytest.approx(10)


def test_kernel_time_is_the_sum_of_profiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profile(contextlib.nullcontext):
        def __enter__(self):
            return self

        def key_averages(self):
            return [SimpleNamespace(self_device_time_total=us) for us in (1000.0, 4000.0)]

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls: list[int] = []
    assert (
        clock.kernel_ms(clock.Contender(lambda: calls.append(1), contextlib.nullcontext)) == 1.0
        and len(calls) == 6
    )


def test_saved_bytes_exclude_the_inputs() -> None:
    def saved(name: str, backend: str) -> int:
        case = plan.resized(plan.case(name, "small"), {"rows": 64, "d": 64, "hidden": 256})
        problem = providers.Problem.make(case, torch.float32, "cpu", seed=1, grad=True)
        provider = next(p for p in providers.providers(case.op) if p.name == backend)
        return runner.saved_bytes(problem, provider.prepare(problem))

    hidden = 64 * 256 * 4
    assert saved("feed_forward_relu", "torch") >= hidden
    assert saved("feed_forward_recompute", "reference") < hidden


# ---- compare, on real runs


def compared(*folders: str) -> int:
    return main(folders, compare.build_parser())


def _slowed(factor: float):
    """Return our implementations with the forward called several times."""

    def prepare(provider: providers.Provider, problem: providers.Problem) -> providers.Prepared:
        right = provider.prepare(problem)

        def forward() -> providers.Outputs:
            for _ in range(int(factor) - 1):
                right.forward()
            return right.forward()

        return providers.Prepared(right.label, forward, right.context)

    def find(op: str):
        own = {provider.name for provider in providers.ours(op)} - set(providers.PEERS)
        every = providers.providers(op)
        return tuple(
            providers.Provider(p.name, partial(prepare, p)) if p.name in own else p for p in every
        )

    return find


@pytest.mark.usefixtures("processor_time")
def test_compare_flags_only_a_slowed_kernel(tmp_path: Path, monkeypatch, capsys) -> None:
    what = [
        "bench",
        "attention",
        "--case",
        "full,causal",
        "--size",
        "small",
        "--mode",
        "fwd",
        "--min-time",
        "0.1",
    ]
    what += [
        "--backends",
        "cpu,reference,naive,torch",
        "--no-memory",
        "--no-plots",
        "--no-peaks",
        "--shape",
        "L=256",
    ]
    for name in ("a/0", "b/0", "a/1", "b/1"):  # in turns, so drift affects both
        assert main([*what, "--out", str(tmp_path / name)]) == OK
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert compared(a, b) == OK == compared(a, b), capsys.readouterr().out
    monkeypatch.setattr(command, "Runner", partial(runner.Runner, find=_slowed(12)))
    assert main([*what, "--out", str(tmp_path / "slow")]) == OK
    capsys.readouterr()
    for _ in range(2):
        assert compared(a, str(tmp_path / "slow")) == WRONG
        output = capsys.readouterr().out
        assert "slower" in output and "0 better" in output


# ---- plots


def test_cases_of_several_shapes_have_one_bar_and_a_curve(
    tmp_path: Path,
) -> None:
    document = None
    for length in (32, 64, 128):
        out = tmp_path / str(length)
        shape = f"L={length}"
        assert (
            main(
                [
                    "bench",
                    "attention",
                    "--case",
                    "full",
                    "--size",
                    "small",
                    "--mode",
                    "fwd",
                    "--min-time",
                    "0",
                    "--no-memory",
                    "--shape",
                    shape,
                    "--no-plots",
                    "--no-peaks",
                    "--out",
                    str(out),
                ]
            )
            == OK
        )
        new = report.load(out / "results.json")
        document = new if document is None else {**new, "rows": document["rows"] + new["rows"]}
    rows = document["rows"] + [{**r, "shape": {**r["shape"], "D": 64}} for r in document["rows"]]
    assert {row["shape"]["Lq"] for row in plots.one_shape_each(rows)} == {128}
    (groups,) = curves.sweeps(rows).values()
    assert len(groups) == 2 and all(
        {r["shape"]["Lq"] for r in group} == {32, 64, 128} for group in groups
    )
    many = [
        {**r, "case": f"c{i}", "mode": mode}
        for i in range(8)
        for mode in results.MODES
        for r in document["rows"]
    ]
    assert set(curves._figures(curves.sweeps(many)["L"])) == {
        "_f32_fwd",
        "_f32_bwd",
        "_f32_fwd_bwd",
    }
    assert "speed_by_l_f32_fwd.png" in curves.draw_all(tmp_path, {**document, "rows": many})


@pytest.mark.slow
def test_suite_runs_from_the_command_line_to_the_document(
    tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the suite runs at small shapes: checks, times, plots and the tool of the docs."""
    whole, steps = suites.aims, {}
    limits = {
        "B": 1,
        "Hq": 2,
        "Hkv": 2,
        "D": 64,
        "rows": 32,
        "d": 64,
        "hidden": 128,
        "classes": 100,
    }
    expected = (
        "full",
        "causal",
        "key_padding",
        "varlen",
        "add_norm",
        "feed_forward_gelu",
        "linear_cross_entropy",
        "decode",
    )

    def small() -> list[plan.Step]:
        for step in whole():
            shape = {
                name: min(size, limits.get(name, size)) for name, size in step.case.shape.items()
            }
            shape |= {
                name: max(1, step.case.shape[name] // 32) for name in ("Lq", "Lk") if name in shape
            }
            smaller = dataclasses.replace(
                step, case=plan.resized(step.case, shape), sustained=step.sustained / 100
            )
            if step.case.name in expected and step.dtype == torch.bfloat16:
                steps.setdefault(
                    (smaller.case.name, tuple(smaller.case.shape.items()), step.dtype, step.mode),
                    smaller,
                )
        return list(steps.values())

    monkeypatch.setitem(suites.SUITES, "aims", small)
    monkeypatch.setattr(clock, "evicting_bytes", lambda: 1 << 20)
    folder = tmp_path / "bench" / "results" / "here"
    assert (
        main(["bench", "--min-time", "0", "--threads", "1", "--no-memory", "--out", str(folder)])
        == OK
    )
    document = report.load(folder / "results.json")
    assert {"fwd", "fwd+bwd"} == {row["mode"] for row in document["rows"]} and {"warm", "cold"} == {
        row["cache"] for row in document["rows"]
    }
    run = {
        (r["case"], tuple(r["shape"].items()), plan.DTYPES[r["dtype"]], r["mode"])
        for r in document["rows"]
        if r["backend"] == "torch"
    }
    refused = {e["case"] for e in document["not_run"] if e["backend"] == "torch"}
    assert {key for key in steps if key[0] not in refused} <= run
    assert {"roofline.png", "speed.png", "speed_by_l.png"} <= {
        path.name for path in folder.iterdir()
    }
    performance, medians = tool("performance"), tool("medians")
    cells = performance.by_op(medians.collect(folder))
    assert "attention, decoding, bf16" in cells and "attention, full and causal, bf16" in cells
