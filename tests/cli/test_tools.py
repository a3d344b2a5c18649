# SPDX-License-Identifier: Apache-2.0
"""The tools of bench/tools: documents that are made of committed results are current, and the tools say what is so."""

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


def test_performance_document_is_made_of_the_committed_results(tool) -> None:
    performance = tool("performance")
    again = "run: python bench/tools/performance.py --write"
    for name, page in performance.MACHINES.items():
        assert performance.text(performance.RESULTS / name) == (performance.DOCS / page).read_text(), again
    old = performance.README.read_text()
    assert performance.readme(old) == old, again


def test_every_committed_results_file_fits_its_schema() -> None:
    for path in (ROOT / "bench" / "results").rglob("results.json"):
        assert results.validate(json.loads(path.read_text())) == [], path


def test_a_report_is_made_of_committed_results(tool, tmp_path: Path) -> None:
    folder = next((ROOT / "bench" / "results").glob("*/isa-avx2"))
    tool("redraw").main([str(folder), "--out", str(tmp_path)])
    assert (tmp_path / "results.json").read_bytes() == (folder / "results.json").read_bytes()
    rows = json.loads((folder / "results.json").read_text())["rows"]
    report_text = (tmp_path / "report.md").read_text()
    assert report_text.count("\n| ") > len(rows) > 10 and (tmp_path / "results.csv").stat().st_size > 1000


def _rows(ours: dict[str, float], peer: dict[str, float], **more) -> list[dict]:
    shape = {"B": 1, "Hq": 1, "Hkv": 1, "Lq": 1024, "Lk": 1024, "D": 64}
    base = {"op": "attention", "case": "full", "shape": shape, "dtype": "bfloat16", "device": "cpu", "note": "", **more}
    return [
        {
            **base,
            "mode": mode,
            "backend": backend,
            "median_ms": ms[mode],
            "samples": 7,
            "speedup_torch": peer[mode] / ms[mode],
            "speedup_naive": None,
        }
        for backend, ms in (("cpu", ours), ("torch", peer))
        for mode in ms
    ]


def test_backward_is_the_difference_and_losses_are_told(tool) -> None:
    performance = tool("performance")
    found = performance.pairs({"rows": _rows({"fwd": 1.0, "fwd+bwd": 3.0}, {"fwd": 5.0, "fwd+bwd": 11.0})})
    (modes,) = performance.by_mode(found).values()
    assert [performance.ratio_of(modes, mode) for mode in ("fwd", "bwd", "fwd+bwd")] == [5.0, 3.0, 11 / 3]
    told = performance.aims({}, found, None)
    assert "| attention, every case, over PyTorch | 1 | 3.67 | 4.33 | 5.00 | 2 of 2 |" in told
    assert "| decoding, of read bandwidth | 85% | – | – | – | – |" in told, "what was not measured is not claimed"
    rates = _rows({"fwd": 1.0}, {"fwd": 5.0}, tflops=0.8)
    for isa, aim in (("avx512_bf16", "90% | 80% | 80% | 80% | 0 of 1"), ("amx_bf16", "75% | 80% | 80% | 80% | 1 of 1")):
        document = {"peaks": {"tflops": {"bfloat16": 1.0}}, "environment": {"isa": isa}}
        assert f"matrix product's rate | {aim} |" in performance.aims(document, performance.pairs({"rows": rates}), None)
    assert performance.losses(found) == "0 of 2 measurements are slower than PyTorch's own."
    slow = performance.pairs({"rows": _rows({"fwd": 2.0}, {"fwd": 1.0})})
    told = performance.losses(slow)
    assert told.startswith("1 of 1 measurements are slower") and "| **0.50** | 7 |" in told
    assert performance.times(0.999) == "1.00" and performance.times(0.99) == "**0.99**" and performance.times(None) == "–"


def test_what_was_not_run_is_told_as_missing(tool, tmp_path: Path) -> None:
    performance = tool("performance")
    folder = performance.ROOT / "bench" / "results"  # a path below the root, where links start
    lone = tmp_path / "results.json"
    lone.write_text((performance.RESULTS / next(iter(performance.MACHINES)) / "results.json").read_text())
    shown = [performance.models(None), performance.held(None), performance.step(None)]
    assert shown == [performance.MISSING] * 3
    assert performance.images(folder, ["none.png"], performance.DOCS) == ""


def test_the_whole_run_fills_the_folder_with_what_the_document_reads(
    tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    performance, ran = tool("performance"), []

    def run(command: list[str], cwd: str, env: dict[str, str]) -> SimpleNamespace:
        ran.append(command[1:])
        assert env["PYTHONSAFEPATH"] == "1" and Path(cwd) != ROOT
        out = Path(cwd) / command[command.index("--out") + 1]
        out.mkdir(exist_ok=True) if out.suffix == "" else out.write_text("{}")
        return SimpleNamespace(returncode=1)

    (tmp_path / "speed_by_old.png").touch()
    (tmp_path / "patterns.png").touch()  # another tool's
    monkeypatch.setattr(performance.subprocess, "run", run)
    performance.run_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"isa-avx2", "step-time.json", "patterns.png"}, "and no old picture"
    for words in ran:
        assert words[0] == "-m" or Path(words[0]).is_file()
        if words[0] == "-m":
            assert words[:3] == ["-m", "pytransformer", "bench"]
    monkeypatch.setattr(performance.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    with pytest.raises(SystemExit, match="exit code 2"):
        performance.run_all(tmp_path)


# ---- attention_phases


def test_the_phases_page_is_made_of_the_committed_runs(tool) -> None:
    phases = tool("attention_phases")
    page = phases.PAGE.read_text()
    assert phases.written(page) == page, "run: python bench/tools/attention_phases.py --write"
    header = (ROOT / "csrc" / "cpu" / "core" / "phases.h").read_text()
    (names,) = re.findall(r"enum class Phase : int \{ (.*), count \};", header)
    assert tuple(names.split(", ")) == phases.PHASES
    assert {name for part in phases.DIRECTIONS.values() for name in part} == set(phases.PHASES)


@pytest.mark.slow
def test_every_phase_is_noted(tmp_path: Path) -> None:
    """On the generic set; the tool itself refuses wrong results and phases without a note."""
    out = tmp_path / "phases.json"
    script = ROOT / "bench" / "tools" / "attention_phases.py"
    options = ["--isa", "generic", "--lengths", "256", "--dims", "64", "--threads", "1", "--rounds", "3", "--out", str(out)]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(out.read_text())
    assert document["isa"] == "generic" and [row["dtype"] for row in document["rows"]] == ["bfloat16", "float32"]
    for row in document["rows"]:
        for direction in ("forward", "backward"):
            shares, products = row[direction]["shares"], row[direction]["rates"]
            assert 0.7 < sum(shares.values()) <= 1.0001 and sum(shares[phase] for phase in products) > 0.5, shares


# ---- golden


def test_accuracy_document_is_made_of_the_committed_errors(tool) -> None:
    golden = tool("golden")
    document = json.loads(golden.RESULTS.read_text())
    old = golden.DOCUMENT.read_text()
    assert golden.written(old, document) == old, "run: python bench/tools/golden.py --write"
    measured = {(row["op"], row["case"], row["dtype"]) for row in document["rows"]}
    assert measured == {(case.op, case.name, dtype) for case, dtype in golden.problems()}


def test_errors_are_of_every_tensor_and_backend(tool) -> None:
    golden = tool("golden")
    found = golden.errors(plan.case("bias", "small"), "float32")
    assert {"naive", "torch"} <= set(found)
    assert all(set(errors) == {"out", "query", "key", "value", "bias"} for errors in found.values())
    assert all(0 < error < 1e-5 for errors in found.values() for error in errors.values())
    assert "torch" not in golden.errors(plan.case("dropout", "small"), "float32"), "whose mask is its own"
    row = {"errors": {"cpu": {"out": 2.0, "key": 1.0}, "torch": {"out": 1.0, "key": 0.0}}, "op": "attention"}
    assert golden.ratios(row, "torch") == [2.0] and golden.ratios(row, "naive") == []
    assert golden._norms(row, "cpu") == "2.0e+00 / 1.0e+00"


# ---- pytest-benchmark


def test_the_cases_run_under_pytest_benchmark(tmp_path: Path) -> None:
    if importlib.util.find_spec("pytest_benchmark") is None:
        pytest.skip("pytest-benchmark is not installed")
    out = tmp_path / "timed.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / "bench" / "ops" / "layer_norm.py")]
    command += ["--size", "small", "-k", "rms_norm and fwd and (reference or naive or torch)", f"--benchmark-json={out}"]
    command += ["--benchmark-max-time=0.01", "--benchmark-min-rounds=1"]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # under which the plugin times nothing
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    timed = json.loads(out.read_text())["benchmarks"]
    assert {(b["params"]["backend"], "bwd" in b["name"]) for b in timed} == {
        (backend, backwards) for backend in ("reference", "naive", "torch") for backwards in (False, True)
    }
    assert all(b["extra_info"]["error"] <= b["extra_info"]["error_bound"] for b in timed)


# ---- test_then_time, inspect, ab, overhead


def test_the_tests_run_first_and_stops_at_a_failure(tool, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, ran = tool("test_then_time"), []

    def run(command: list[str], **_) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=int(len(ran) == 2))

    monkeypatch.setattr(verify.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["test_then_time", "add_norm", "--size", "small"])
    assert verify.main() == 1 and len(ran) == 2
    assert "tests/ops/test_layer_norm.py" in ran[0] and "tests/test_fuzz_ops.py" in ran[1]
    assert verify.commands("attention", ["--size", "small"])[2][-3:] == ["attention", "--size", "small"]
    assert all((ROOT / word).exists() for word in ran[0] + ran[1] if word.startswith("tests/"))
    with pytest.raises(SystemExit, match="no op 'softmax'"):
        verify.stem_of("softmax")


def test_inspect_shows_the_committed_tables(tool) -> None:
    inspect = tool("inspect_kernels")
    script = ROOT / "bench" / "tools" / "inspect_kernels.py"

    def shown(*arguments: str) -> str:
        done = subprocess.run([sys.executable, str(script), "--table", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    everything = shown()
    for backend in inspect.BACKENDS:
        kernels = json.loads((ROOT / "tests" / backend / "resources.json").read_text())["kernels"]
        assert all(key.partition(" ")[2] in everything for key in kernels)
    few = shown("--op", "layer_norm", "--arch", "80", "--backend", "cuda")
    assert "norm_fwd_kernel" in few and "sm_90a" not in few and "registers" in few
    assert [inspect.stem_of(k) for k in ("feed_forward relu 3 rows", "add_norm N4096", "cross_entropy 200 classes", "causal D64 fwd")] == [
        "feed_forward", "layer_norm", "cross_entropy", "attention",
    ]  # fmt: skip


def test_ab_takes_turns_and_compares(tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ab, ran = tool("ab"), []
    monkeypatch.setattr(ab, "pytransformer", lambda checkout, *words: ran.append((checkout.name, words)) or 0)
    for name in ("old", "new"):
        (tmp_path / name / "pytransformer").mkdir(parents=True)
        (tmp_path / name / "pytransformer" / "__init__.py").touch()
    ends = [str(tmp_path / "old"), str(tmp_path / "new")]
    monkeypatch.setattr(
        sys, "argv", ["ab", *ends, "--repeat", "2", "--out", str(tmp_path / "runs"), "--", "attention", "--size", "small"]
    )
    assert ab.main() == 0
    assert [name for name, words in ran if words[1] == "attention"] == ["old", "new", "new", "old"]
    assert ran[-1][1][:4] == ("bench", "compare", str(tmp_path / "runs" / "old"), str(tmp_path / "runs" / "new"))


def test_overhead_writes_what_it_measured(tool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    overhead = tool("overhead")
    file = tmp_path / "overhead.json"
    monkeypatch.setattr(sys, "argv", ["overhead", "--rounds", "2", "--repeat", "1", "--out", str(file)])
    overhead.main()
    document = json.loads(file.read_text())
    assert {(r["op"], r["mode"]) for r in document["rows"]} == {
        (op, m) for op in overhead.problems() for m in overhead.modes(op)
    }
    assert all(r[f"{who}_us"] > 0 for r in document["rows"] for who in ("ours", "python", "torch"))
    shown = overhead.tables(document)
    assert all(f"| {op} |" in shown for op in overhead.problems())


def test_call_cost_says_what_the_committed_run_measured(tool) -> None:
    overhead = tool("overhead")
    text = overhead.DOCUMENT.read_text()
    assert overhead.written(json.loads(overhead.COMMITTED.read_text()), text) == text


def test_a_step_is_taken_apart(tool) -> None:
    """Every part of an attention module's step is found where it is, and the parts are the whole."""
    parts = tool("step_parts")
    subject = parts.modules()["MultiHeadAttention"]
    ours = parts.shares(parts.runner(subject.ours, subject.call, "forward + backward"), 20)
    theirs = parts.shares(parts.runner(subject.theirs, subject.their_call, "forward"), 20)
    assert abs(sum(ours.values()) - 1.0) < 1e-6 and all(ours[part] > 0 for part in parts.PARTS)
    assert theirs["our Python"] == theirs["our ops"] == theirs["backward pass"] == 0
    assert parts.part_of(("~", 0, "<built-in method pytransformer._lane.attention>")) == "our ops"
    assert parts.part_of(("~", 0, "<method 'run_backward' of 'torch._C._EngineBase' objects>")) == "backward pass"


def test_curves_of_small_lengths(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has its share and its figures, or a reason; the pictures are drawn; the page says what the committed runs measured."""
    pytest.importorskip("matplotlib")
    curves = tool("curves")
    for name in curves.WHAT:
        committed = json.loads((curves.FOLDER / f"{name}.json").read_text())
        text = curves.PAGE.read_text()
        assert curves.written(name, committed, text) == text
    monkeypatch.setattr(curves, "LENGTHS", (64, 128, 256))
    monkeypatch.setattr(curves, "WIDTHS", (64, 128, 192))
    monkeypatch.setitem(curves.LONGEST, "FlexAttention", 0)  # compiling takes minutes
    for name, (measure, draw) in curves.WHAT.items():
        document = {"environment": {"cpu": "a CPU"}, "rows": measure()}
        draw(document, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert all(row.get("reason") or row["ms"] > 0 for row in document["rows"])
        assert "| GRU |" in curves.table(document) or "| local 256 | ours |" in curves.table(document)
    assert curves.exponent({1: 1.0, 2: 3.0, 4: 12.0, 8: 48.0}) == 2.0


def test_local_patterns_are_linear_in_the_committed_run(tool) -> None:
    curves = tool("curves")
    rows = json.loads((curves.FOLDER / "patterns.json").read_text())["rows"]
    for direction in (curves.FORWARD, curves.BACKWARD):
        points = {
            r["length"]: r["ms"]
            for r in rows
            if (r["pattern"], r["how"], r.get("direction")) == (curves.FIRST, "ours", direction)
        }
        assert max(points) == 65536 and curves.exponent(points) < 1.25


def test_steps_run_apart_and_none_takes_another_with_it(tool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What bench/gpu.sh calls; one that fails, one that takes too long, and one after them."""
    common = "--no-verify --no-memory --no-plots --no-peaks --dtype float32 --mode fwd --shape"
    (tmp_path / "steps").write_text(f"""\
wrong 60 PYTRANSFORMER_CPU_ISA=generic attention --no-such-option
long 5 layer_norm --case layer_norm {common} rows=64,d=64 --backends torch --min-time 0.01 --sustained 600
right 60 layer_norm --case layer_norm {common} rows=64,d=64 --backends torch --min-time 0.01
""")
    assert tool("steps").main([str(tmp_path / "steps"), "--seconds", "100", "--out", str(tmp_path / "out")]) == 1
    said = capfd.readouterr().out
    assert (
        "wrong: exit code 2" in said
        and "--no-such-option" in said
        and "long: stopped" in said
        and "right: exit code 0" in said
    )
    assert "layer_norm layer_norm fwd: torch 0.0" in said
    assert tool("steps").main([str(tmp_path / "steps"), "--seconds", "1", "--out", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().out.count("left out, no time") == 3
