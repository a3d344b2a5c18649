# SPDX-License-Identifier: Apache-2.0
"""tests/run_parts.py: parts by name, counts of a report, and the table of a run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("run_parts.py")


@pytest.fixture(scope="module")
def run_parts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_parts", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_belong_to_exactly_one_part(run_parts: ModuleType) -> None:
    entries = [path for part in run_parts.PARTS for path in run_parts.paths(part)]
    assert len(entries) == len(set(entries))
    covered = [run_parts.ROOT / entry for entry in entries]
    tests = run_parts.TESTS.rglob("test_*.py")
    assert [
        path for path in tests if not any(path.is_relative_to(entry) for entry in covered)
    ] == []


def test_parts_of_the_full_run_find_their_tests(run_parts: ModuleType) -> None:
    names = [part.name for part in (*run_parts.PARTS, *run_parts.SAMPLES, *run_parts.FULL_PARTS)]
    assert len(names) == len(set(names))
    assert all(
        run_parts.paths(part)
        for part in (*run_parts.SAMPLES, *run_parts.FULL_PARTS)
        if part.name != run_parts.BENCH
    )


def test_ops_run_with_and_without_the_fast_path(run_parts, monkeypatch) -> None:
    """A fast path that does not compile fails the installation; the sanitizer build has none."""
    built = []
    monkeypatch.delenv("PYTRANSFORMER_FAST_PATH", raising=False)
    monkeypatch.setattr(
        run_parts,
        "timed",
        lambda command, limit, environment=(): (
            built.append(dict(environment)) or (1, run_parts.Spent(1.0))
        ),
    )
    run_parts.install(False)
    (sanitized,) = [part for part in run_parts.FULL_PARTS if part.name == run_parts.SANITIZE]
    run_parts.run(sanitized, True)
    assert [environment["PYTRANSFORMER_FAST_PATH"] for environment in built] == ["1", "0"]
    for parts in (run_parts.SAMPLES, run_parts.FULL_PARTS):
        (part,) = [part for part in parts if ("PYTRANSFORMER_FAST_PATH", "0") in part.environment]
        assert any("ops" in path for path in run_parts.paths(part))


def test_benchmark_part_counts_rows_and_errors(run_parts, tmp_path, monkeypatch) -> None:
    not_run = [
        {"backend": b, "status": s, "reason": r}
        for b, s, r in (("cpu", "wrong", "off"), ("triton", "unsupported", "no GPU"))
    ]

    def timed(command, limit):
        folder = run_parts.RESULTS / "bench"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps({"rows": [{}, {}], "not_run": not_run}))
        assert "bench" in command and limit is None
        return 1, run_parts.Spent(7.0)

    monkeypatch.setattr(run_parts, "RESULTS", tmp_path)
    monkeypatch.setattr(run_parts, "timed", timed)
    (part,) = [part for part in run_parts.FULL_PARTS if part.name == run_parts.BENCH]
    result = run_parts.run(part, True)
    assert (result.passed, result.failed, result.skipped, result.problem) == (
        2,
        1,
        1,
        "exit code 1",
    )
    assert set(run_parts.told(result.reasons)) == {"cpu: off", "triton: no GPU"}


def test_budgets_count_processor_time(run_parts, monkeypatch) -> None:
    """Waiting does not count, computing does; two processes may compute twice as long."""
    second = run_parts.Part("a", "a", 1 / 60)
    python = [run_parts.sys.executable, "-c"]
    code, waited = run_parts.timed([*python, "import time; time.sleep(1.5)"], None)
    assert code == 0 and waited.seconds > 1.5 and waited.processor < 1
    loop = "import time\nwhile time.process_time() < 1.5: pass"
    _, computed = run_parts.timed(
        [*python, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loop!r}])"], None
    )
    assert computed.processor >= 1.5, "of a process that a process waited for"
    for factor, slow in ((1.0, False), (5.0, True)):
        monkeypatch.setattr(
            run_parts, "loop_time", lambda factor=factor: factor * run_parts.NOMINAL
        )
        assert run_parts.over_budget(second, waited, False) is None
        assert (run_parts.over_budget(second, run_parts.Spent(1.5, 2.9), False) is None) is slow
        assert (
            run_parts.over_budget(second._replace(jobs=2), run_parts.Spent(9.0, 1.9), False) is None
        )
        assert (
            run_parts.over_budget(second._replace(jobs=2), run_parts.Spent(9.0, 2.9), False) is None
        ) is slow
        assert run_parts.over_budget(second, run_parts.Spent(9.0, 9.0), True) is None
    # A fast machine gets no smaller budget.
    monkeypatch.setattr(run_parts, "loop_time", lambda: 0.01)
    assert run_parts.over_budget(second, run_parts.Spent(0.9, 0.9), False) is None


def test_threads_of_parallel_processes_yield(run_parts, tmp_path, monkeypatch) -> None:
    seen = {}
    monkeypatch.setattr(run_parts, "RESULTS", tmp_path)  # a part removes earlier reports there

    def timed(command, limit, environment=()):
        return 0, seen.update({part.name: dict(environment)}) or run_parts.Spent(1.0)

    monkeypatch.setattr(run_parts, "timed", timed)
    for part in run_parts.PARTS:
        run_parts.test(part, False)
    assert {name for name, given in seen.items() if given.get("OMP_WAIT_POLICY") == "passive"} == {
        part.name for part in run_parts.PARTS if part.jobs == 2
    }
    assert seen["triton"]["TRITON_INTERPRET"] == "1"


def test_counts_have_skip_reasons(run_parts: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    skipped = "".join(
        f'<testcase name="t{i}"><skipped message="no GPU"/></testcase>' for i in range(2)
    )
    report.write_text(
        f'<testsuites><testsuite tests="6" failures="1" errors="1" skipped="3">{skipped}'
        '<testcase name="u"><skipped message="slow"/></testcase></testsuite></testsuites>'
    )
    assert run_parts.counts(report) == (1, 2, 3, (("no GPU", 2), ("slow", 1)))
    assert run_parts.counts(tmp_path / "none.xml") == (0, 0, 0, ())


def test_parts_without_their_packages_are_skipped_with_the_reason(
    run_parts, monkeypatch, capsys
) -> None:
    part = next(part for part in run_parts.FULL_PARTS if part.needs)
    monkeypatch.delenv(part.needs, raising=False)
    result = run_parts.run(part, True)
    assert (result.passed, result.problem, run_parts.verdict(result)) == (0, None, "skipped")
    assert part.needs in result.reasons[0][0] and part.needs in capsys.readouterr().out


def test_unsupported_instruction_sets_are_skipped_with_the_reason(
    run_parts, monkeypatch, capsys
) -> None:
    part = next(part for part in run_parts.FULL_PARTS if part.name == "avx512")
    monkeypatch.setattr(run_parts.subprocess, "check_output", lambda *_, **__: "avx2 generic\n")
    result = run_parts.run(part, True)
    assert (result.passed, run_parts.verdict(result)) == (0, "skipped")
    assert "avx2, generic" in result.reasons[0][0] and "avx2, generic" in capsys.readouterr().out


def test_settings_cover_every_value(run_parts, monkeypatch) -> None:
    """Each instruction set occurs once, PyTorch's two with one and two threads, three new seeds."""
    parts = importlib.import_module("parts")
    settings = [dict(part.environment) for part in parts.SETTINGS]
    monkeypatch.syspath_prepend(str(run_parts.ROOT / "csrc"))
    assert [s[run_parts.ISA_VARIABLE] for s in settings] == [
        isa.name for isa in importlib.import_module("toolchain").ISAS
    ]
    assert {(s["ATEN_CPU_CAPABILITY"], s["OMP_NUM_THREADS"]) for s in settings} == {
        (i, t) for i in parts.HELD for t in "12"
    }
    seeds = {
        option
        for part in parts.SETTINGS
        for option in part.options
        if option.startswith("--torch-seed=")
    }
    assert len(seeds - {"--torch-seed=0"}) >= 3
    result = run_parts.Result(parts.SETTINGS[0], 1.0, None, 5)
    line = run_parts.recorded(f"{run_parts.START}\n{run_parts.END}", [result], True, "a", "b")
    assert "| ok | no | a | b |" in line, "slow tests are left out"


def test_summary_keeps_the_lines_of_other_parts(run_parts: ModuleType) -> None:
    cpu, triton = run_parts.PARTS[:2]
    text = f"# Results\n\n{run_parts.START}\n{run_parts.END}\n\nMore.\n"
    text = run_parts.recorded(
        text, [run_parts.Result(triton, 61.0, None, 5)], False, "abc", "2026-01-01"
    )
    slower = run_parts.Result(cpu, 9.6, "pytest exit code 1", 7, 1, 6)
    text = run_parts.recorded(text, [slower], True, "def", "2026-01-02")
    lines = text.splitlines()
    assert lines[0] == "# Results" and lines[-1] == "More."
    assert (
        f"| {cpu.title} | 7 | 1 | 6 | 10 | pytest exit code 1 | yes | def | 2026-01-02 |" in lines
    )
    assert f"| {triton.title} | 5 | 0 | 0 | 61 | ok | no | abc | 2026-01-01 |" in lines
    again = run_parts.recorded(
        text, [slower._replace(failed=0, problem=None)], True, "def", "2026-01-03"
    )
    assert len(again.splitlines()) == len(lines) and "exit code" not in again
    with pytest.raises(ValueError, match="no table to write to"):
        run_parts.recorded("nothing", [], False, "abc", "2026-01-01")
