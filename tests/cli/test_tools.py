# SPDX-License-Identifier: Apache-2.0
"""bench/tools: generated documents match the committed results, and the tools report facts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytransformer.cli.benchmark import plan, results

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parents[2]


# ---- performance


def test_performance_tables_match_the_committed_medians(tool) -> None:
    performance = tool("performance")
    runs = performance.load()
    pages = {
        performance.PAGE: performance.section(runs),
        performance.README: performance.readme_section(runs),
    }
    for page, text in pages.items():
        old = page.read_text(encoding="utf-8")
        assert performance.replaced(old, text) == old, (
            "run: python bench/tools/performance.py --write"
        )
    assert performance.GPU_TABLE.read_text(encoding="utf-8") == performance.gpu_table()


def test_engine_tables_match_the_committed_runs(tool) -> None:
    inference = tool("inference_table")
    page = inference.PAGE.read_text(encoding="utf-8")
    assert inference.replaced(page, inference.section()) == page, (
        "run: python bench/tools/inference_table.py --write"
    )
    for path in inference.RESULTS.glob("*/inference.csv"):
        for row in inference.load(path)[1]:
            assert bool(row["median_ms"]) != bool(row["reason"]), (path.parent.name, row)


def test_committed_medians_are_complete_and_consistent(tool) -> None:
    """Ratios, quantiles and shares agree with the times in the file."""
    performance = tool("performance")
    for name, run in performance.load().items():
        assert len(run.rows) <= 550, name
        seen = {}
        for row in run.rows:
            assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"]), (
                name,
                row,
            )
            problem = tuple(
                row[key] for key in ("suite", "op", "case", "dtype", "direction", "cache", "shape")
            )
            assert seen.setdefault((problem, row["implementation"]), row) is row, (name, row)
        for (problem, implementation), row in seen.items():
            peer = seen.get((problem, "sdpa" if row["suite"] == "models" else "torch"))
            if row["torch_over_this"] and peer and implementation == "cpu":
                ratio = float(peer["median_ms"]) / float(row["median_ms"])
                assert float(row["torch_over_this"]) == pytest.approx(ratio, rel=1e-3), (name, row)


def _document(ours: dict[str, float], peer: dict[str, float], **more) -> dict:
    """Return a results file with one case of plain attention."""
    shape = {"B": 1, "Hq": 1, "Hkv": 1, "Lq": 1024, "Lk": 1024, "D": 64}
    base = {
        "op": "attention",
        "case": "full",
        "shape": shape,
        "dtype": "bfloat16",
        "cache": "warm",
        **more,
    }
    rows = [
        {
            **base,
            "mode": mode,
            "backend": backend,
            **dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), ms[mode]),
            **dict.fromkeys(("tflops", "gbps"), 0.8),
            "speedup_torch": peer[mode] / ms[mode],
            "error": 1e-3,
            "peak_bytes": None,
        }
        for backend, ms in (("cpu", ours), ("torch", peer), ("naive", peer))
        for mode in ms
    ]
    environment = {"isa": "avx512_bf16", "threads": 2}
    return {
        "environment": environment,
        "peaks": {"tflops": {"bfloat16": 1.0}, "copy_gbps": {}},
        "rows": rows,
    }


def test_medians_round_trip(tool, tmp_path: Path) -> None:
    medians = tool("medians")
    run, file = tmp_path / "run", tmp_path / "medians.csv"
    run.mkdir()
    (run / "results.json").write_text(json.dumps(_document({"fwd": 1.0}, {"fwd": 5.0})))
    medians.main([str(run), str(file)])
    written = medians.read(file)
    assert [row["implementation"] for row in written.rows] == ["cpu", "torch"]
    assert written == medians.collect(run) and written.peaks == {"tflops": {"bfloat16": 1.0}}
    assert written.rows[0]["torch_over_this"] == "5.0" and written.rows[0]["peak_bytes"] == ""
    with pytest.raises(SystemExit, match="must be a benchmark's folder"):
        medians.main([str(tmp_path / "nothing"), str(file)])


def test_performance_marks_slower_rows_and_counts_reached_targets(tool, tmp_path: Path) -> None:
    performance, medians = tool("performance"), tool("medians")
    (tmp_path / "results.json").write_text(
        json.dumps(_document({"fwd": 1.0, "fwd+bwd": 3.0}, {"fwd": 5.0, "fwd+bwd": 2.7}))
    )
    run = medians.collect(tmp_path)
    assert performance.by_op(run) == {
        "attention, full and causal, bf16": "5.00 / **0.90**",
        "rows slower than PyTorch": "1 of 2",
    }
    title = "attention bf16, L >= 1024, share of the matrix product's rate"
    assert performance.aims(run) == {title: "80%; 0 of 2 reach 90%"}
    run.environment["isa"] = performance.TILES
    assert performance.aims(run) == {title: "80%; 2 of 2 reach 75%"}
    assert performance.times(0.999) == "1.00" and performance.times(None) == "–"


def test_performance_run_executes_every_command_in_its_folder(
    tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    performance, ran = tool("performance"), []

    def run(command: list[str], cwd: Path, env: dict[str, str]) -> SimpleNamespace:
        ran.append(command[1:])
        assert env["PYTHONSAFEPATH"] == "1" and cwd == tmp_path / "run"
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(performance.subprocess, "run", run)
    performance.run_all(tmp_path / "run")
    assert len(ran) == len(performance.COMMANDS)
    for words in ran:
        assert words[:3] == ["-m", "pytransformer", "bench"] or Path(words[0]).is_file()
    monkeypatch.setattr(
        performance.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2)
    )
    with pytest.raises(SystemExit, match="exit code 2"):
        performance.run_all(tmp_path / "run")


def test_committed_results_match_their_schema() -> None:
    for path in (ROOT / "bench" / "results").rglob("results.json"):
        assert results.validate(json.loads(path.read_text())) == [], path


# ---- attention_phases


def test_phases_match_the_header(tool) -> None:
    phases = tool("attention_phases")
    header = (ROOT / "csrc" / "cpu" / "core" / "phases.h").read_text()
    (names,) = re.findall(r"enum class Phase : int \{ (.*), count \};", header)
    assert tuple(names.split(", ")) == phases.PHASES
    assert {name for part in phases.DIRECTIONS.values() for name in part} == set(phases.PHASES)


@pytest.mark.slow
def test_every_phase_has_a_note(tmp_path: Path) -> None:
    """It uses the generic set; the tool refuses wrong results and phases without a note."""
    out = tmp_path / "phases.json"
    script = ROOT / "bench" / "tools" / "attention_phases.py"
    options = [
        "--isa",
        "generic",
        "--lengths",
        "256",
        "--dims",
        "64",
        "--threads",
        "1",
        "--rounds",
        "3",
        "--out",
        str(out),
    ]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(out.read_text())
    assert document["isa"] == "generic" and [row["dtype"] for row in document["rows"]] == [
        "bfloat16",
        "float32",
    ]
    for row in document["rows"]:
        for direction in ("forward", "backward"):
            shares, products = row[direction]["shares"], row[direction]["rates"]
            assert (
                0.7 < sum(shares.values()) <= 1.0001
                and sum(shares[phase] for phase in products) > 0.5
            ), shares


# ---- golden


def test_accuracy_table_matches_the_committed_errors(tool, tmp_path: Path) -> None:
    golden = tool("golden")
    document, text = golden.load(golden.RESULTS), golden.DOCUMENT.read_text()
    assert golden.written(text, document) == text, "run: python bench/tools/golden.py --write"
    measured = {(row["op"], row["case"], row["dtype"]) for row in document["rows"]}
    assert measured == {(case.op, case.name, dtype) for case, dtype in golden.problems()}
    golden.save(document, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == golden.RESULTS.read_bytes()


def test_errors_cover_every_tensor_and_backend(tool) -> None:
    golden = tool("golden")
    found = golden.errors(plan.case("bias", "small"), "float32")
    assert {"naive", "torch"} <= set(found)
    assert all(set(errors) == {"out", "query", "key", "value", "bias"} for errors in found.values())
    assert all(0 < error < 1e-5 for errors in found.values() for error in errors.values())
    assert "torch" not in golden.errors(plan.case("dropout", "small"), "float32"), (
        "whose mask is its own"
    )
    row = {
        "errors": {"cpu": {"out": 2.0, "key": 1.0}, "torch": {"out": 1.0, "key": 0.0}},
        "op": "attention",
    }
    assert golden.ratios(row, "torch") == [2.0] and golden.ratios(row, "naive") == []


# ---- pytest-benchmark


def test_cases_run_under_pytest_benchmark(tmp_path: Path) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        pytest.skip("pytest-benchmark is not installed")
    out = tmp_path / "timed.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(ROOT / "bench" / "ops" / "layer_norm.py"),
    ]
    command += [
        "--size",
        "small",
        "-k",
        "rms_norm and fwd and (reference or naive or torch)",
        f"--benchmark-json={out}",
    ]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1"]
    alone = {
        k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")
    }  # the plugin times nothing with it
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    timed = json.loads(out.read_text())["benchmarks"]
    assert {(b["params"]["backend"], "bwd" in b["name"]) for b in timed} == {
        (backend, backwards)
        for backend in ("reference", "naive", "torch")
        for backwards in (False, True)
    }
    assert all(b["extra_info"]["error"] <= b["extra_info"]["error_bound"] for b in timed)


# ---- test_then_time, inspect, ab, overhead


def test_tests_run_first_and_stop_at_a_failure(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, ran = tool("test_then_time"), []

    def run(command: list[str], **_) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=int(len(ran) == 2))

    monkeypatch.setattr(verify.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["test_then_time", "add_norm", "--size", "small"])
    assert verify.main() == 1 and len(ran) == 2
    assert "tests/ops/test_layer_norm.py" in ran[0] and "tests/test_fuzz_ops.py" in ran[1]
    assert verify.commands("attention", ["--size", "small"])[2][-3:] == [
        "attention",
        "--size",
        "small",
    ]
    assert all((ROOT / word).exists() for word in ran[0] + ran[1] if word.startswith("tests/"))
    with pytest.raises(SystemExit, match="no op 'softmax'"):
        verify.family_of("softmax")


def test_inspect_prints_the_committed_tables(tool) -> None:
    inspect = tool("inspect_kernels")
    script = ROOT / "bench" / "tools" / "inspect_kernels.py"

    def shown(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(script), "--table", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    everything = shown()
    for backend in inspect.BACKENDS:
        kernels = json.loads((ROOT / "tests" / backend / "resources.json").read_text())["kernels"]
        assert all(key.partition(" ")[2] in everything for key in kernels)
    few = shown("--op", "layer_norm", "--arch", "80", "--backend", "cuda")
    assert "norm_fwd_kernel" in few and "sm_90a" not in few and "registers" in few
    kernels = {
        "feed_forward relu 3 rows": "feed_forward",
        "add_norm N4096": "layer_norm",
        "cross_entropy 200 classes": "cross_entropy",
        "causal D64 fwd": "attention",
    }
    assert {kernel: inspect.family_of(kernel) for kernel in kernels} == kernels


def test_ab_interleaves_and_compares(tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ab, ran = tool("ab"), []
    monkeypatch.setattr(
        ab, "python", lambda checkout, *words: ran.append((checkout.name, words)) or 0
    )
    for name in ("old", "new"):
        (tmp_path / name / "pytransformer").mkdir(parents=True)
        (tmp_path / name / "pytransformer" / "__init__.py").touch()
    ends = [str(tmp_path / "old"), str(tmp_path / "new")]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "ab",
            *ends,
            "--repeat",
            "2",
            "--out",
            str(tmp_path / "runs"),
            "--",
            "attention",
            "--size",
            "small",
        ],
    )
    assert ab.main() == 0
    bench = ("-m", "pytransformer", "bench", "attention")
    assert [name for name, words in ran if words[:4] == bench] == ["old", "new", "new", "old"]
    ends = (str(tmp_path / "runs" / "old"), str(tmp_path / "runs" / "new"))
    assert ran[-1][1][:3] == (str(ROOT / "bench" / "tools" / "compare.py"), *ends)


def test_overhead_writes_its_measurements(
    tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overhead = tool("overhead")
    file = tmp_path / "overhead.json"
    monkeypatch.setattr(
        sys, "argv", ["overhead", "--rounds", "2", "--repeat", "1", "--out", str(file)]
    )
    overhead.main()
    document = json.loads(file.read_text())
    assert {(r["op"], r["mode"]) for r in document["rows"]} == {
        (op, m) for op in overhead.problems() for m in overhead.modes(op)
    }
    assert all(r[f"{who}_us"] > 0 for r in document["rows"] for who in ("ours", "python", "torch"))


def test_steps_fail_independently(tool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """bench/gpu.sh calls this tool.

    One step fails, one exceeds its time, one follows them.
    """
    common = "--no-verify --no-memory --no-plots --no-peaks --dtype float32 --mode fwd"
    torch_case = f"layer_norm --case layer_norm {common} --shape rows=64,d=64 --backends torch"
    (tmp_path / "steps").write_text(f"""\
wrong 60 PYTRANSFORMER_CPU_ISA=generic attention --no-such-option
long 5 {torch_case} --min-time 0.01 --sustained 600
right 60 {torch_case} --min-time 0.01
""")
    assert (
        tool("steps").main(
            [str(tmp_path / "steps"), "--seconds", "100", "--out", str(tmp_path / "out")]
        )
        == 1
    )
    output = capfd.readouterr().out
    assert (
        "wrong: exit code 2" in output
        and "--no-such-option" in output
        and "long: stopped" in output
        and "right: exit code 0" in output
    )
    assert "layer_norm layer_norm fwd: torch 0.0" in output
    assert (
        tool("steps").main(
            [str(tmp_path / "steps"), "--seconds", "1", "--out", str(tmp_path / "out")]
        )
        == 0
    )
    assert capfd.readouterr().out.count("left out, no time") == 3


def test_h100_figure_shows_the_committed_runs(tool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")
    pictures = tool("pictures")
    rows = pictures.rows_of("fwd") | pictures.rows_of("bwd")
    assert len(pictures.rows_of("fwd")) == 8 and len(pictures.rows_of("bwd")) == 6
    assert all({"cuda", "torch_cudnn"} <= set(systems) for systems in rows.values())
    monkeypatch.setattr("sys.argv", ["pictures.py", "--out", str(tmp_path)])
    pictures.main()
    drawn = (tmp_path / pictures.NAME).read_bytes()
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n" and (pictures.IMAGES / pictures.NAME).is_file()
