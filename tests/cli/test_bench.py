# SPDX-License-Identifier: Apache-2.0
"""The bench command: its files, the results that it refuses to time, and interruption."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from pytransformer.cli import INTERRUPTED, OK, WRONG, main, providers
from pytransformer.cli.benchmark import command, memory, plan, report, results
from pytransformer.cli.benchmark.runner import Options, Runner

# Measurements would include the time to fill memory with NaN. One thread is fastest for these
# sizes.
pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "nvidia-h100-80gb-hbm3"
SMALL = ("--size", "small", "--min-time", "0", "--threads", "1", "--no-peaks")  # takes seconds


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Run one small benchmark without a terminal and return its folder."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = [
        "bench",
        "attention",
        "--case",
        "full,dropout",
        *SMALL,
        "--dtype",
        "f32,bf16",
        "--out",
        str(folder),
    ]
    assert main([*arguments, "--mode", "fwd,bwd,fwd+bwd"]) == OK
    return folder


def test_results_match_the_schema_and_the_request(written):
    document = report.load(written / "results.json")
    assert document["complete"] is True
    rows = document["rows"]
    found = {(r["case"], r["dtype"], r["mode"], r["backend"]) for r in rows}
    for case in ("full", "dropout"):
        for dtype in ("float32", "bfloat16"):
            for mode in results.MODES:
                for backend in ("reference", "naive", "torch"):
                    assert (case, dtype, mode, backend) in found
    for row in rows:
        assert row["error"] <= row["error_bound"]
        assert row["backend"] in ("naive", "torch") or row["bound_used"] <= 1
        assert row["tflops"] > 0 and row["gbps"] > 0
        if row["backend"] == "torch":
            assert row["speedup_torch"] == 1
        if row["backend"] == "naive":
            assert row["speedup_naive"] == 1 and row["error_ratio_naive"] == 1
    noted = {(r["case"], r["backend"]) for r in rows if r["note"]}
    assert noted == {
        ("dropout", "naive"),
        ("dropout", "torch"),
    }, "whose mask is random must be said"


def test_peak_memory_is_measured(written):
    if memory.why_not() is not None:
        pytest.skip(memory.why_not())
    rows = report.load(written / "results.json")["rows"]
    assert all(row["peak_bytes"] is not None for row in rows)


def test_csv_has_the_columns_of_liger(written):
    with open(written / "results.csv", newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == (
        "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,"
        "y_value_50,y_value_20,y_value_80,extra_benchmark_config_str,gpu_name,timestamp,liger_version"
    ).split(",")
    cells = [dict(zip(lines[0], line)) for line in lines[1:]]
    assert {c["kernel_operation_mode"] for c in cells} == {"forward", "backward", "full"}
    for cell in cells:
        assert float(cell["y_value_20"]) <= float(cell["y_value_50"]) <= float(cell["y_value_80"])
        assert json.loads(cell["extra_benchmark_config_str"])["case"] in ("full", "dropout")


def test_report_and_plots_are_written(written):
    text = (written / "report.md").read_text()
    for name in ("speedup.png", "speed.png", "memory.png", "accuracy.png"):
        assert f"![{name}]({name})" in text
        assert (written / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "| case | shape | dtype |" in text


def test_html_report_is_one_file_with_every_row(tmp_path, html_problems):
    document = report.load(RESULTS / "terms" / "results.json")
    document["not_run"].append({**document["not_run"][0], "reason": "<b>", "status": "wrong"})
    document["rows"][0] |= {"speedup_torch": 2.0}
    (text,) = (p for p in report.write_all(tmp_path, document, []) if p.suffix == ".html")
    text = text.read_text()
    assert html_problems(text) == []
    assert text.count("<tr>") >= len(document["rows"]) and "WRONG, not timed" in text
    assert "Speed-up over PyTorch: pytransformer (cuda), fwd" in text and "<svg" in text
    shown = document._repr_html_()
    assert html_problems(shown) == [] and "bound used, max" in shown


# ---- schema


def test_validation_detects_each_fault(written):
    document = json.loads((written / "results.json").read_text())
    assert results.validate(document) == []

    def faults(change) -> str:
        broken = json.loads(json.dumps(document))
        change(broken)
        return "; ".join(results.validate(broken))

    assert "schema_version is 99" in faults(lambda d: d.update(schema_version=99))
    assert "rows[0].median_ms is missing" in faults(lambda d: d["rows"][0].pop("median_ms"))
    assert "rows[0].op is null" in faults(lambda d: d["rows"][0].update(op=None))
    assert "of the wrong type" in faults(lambda d: d["rows"][0].update(median_ms="fast"))
    assert "of the wrong type" in faults(lambda d: d["rows"][0].update(samples=True))
    assert "unknown field speed" in faults(lambda d: d["rows"][0].update(speed=1))
    assert "p20_ms <= median_ms" in faults(lambda d: d["rows"][0].update(p20_ms=1e9))
    assert "above its bound" in faults(lambda d: d["rows"][0].update(error=1e9))
    assert "repeats attention" in faults(lambda d: d["rows"].append(d["rows"][0]))
    assert "environment.cores is missing" in faults(lambda d: d["environment"].pop("cores"))
    assert "rows is missing" in faults(lambda d: d.pop("rows"))
    assert "JSON cannot hold" in "; ".join(
        results.validate({**document, "rows": [{**document["rows"][0], "tflops": float("nan")}]})
    )


# ---- refused measurements


def _with(*extra: providers.Provider):
    return lambda op: (*providers.providers(op), *extra)


def _runner(*extra: providers.Provider) -> Runner:
    return Runner(Options(memory=False, min_time=0.0), memory.MemoryProbe(), find=_with(*extra))


def _step(mode: str) -> plan.Step:
    return plan.Step(plan.case("causal", "small"), torch.float32, mode)


def _off_by(factor: float, gradient_factor: float = 1.0) -> providers.Provider:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * factor

        @staticmethod
        def backward(ctx, g):
            return g * gradient_factor

    def prepare(problem: providers.Problem) -> providers.Prepared:
        right = providers.ours("attention")[-1].prepare(problem)
        return providers.Prepared(
            "planted", lambda: tuple(Scale.apply(o) for o in right.forward()), right.context
        )

    return providers.Provider("planted", prepare)


@pytest.mark.parametrize(
    ("fault", "mode", "where"),
    [
        (_off_by(1.001), "fwd", "out"),
        (_off_by(float("nan")), "fwd", "out"),
        (_off_by(1.0, 0.999), "fwd+bwd", "query"),
        (_off_by(1.0, 0.0), "bwd", "query"),
    ],
)
def test_wrong_kernels_are_never_timed(fault, mode, where):
    runner = _runner(fault)
    runner.run(_step(mode))
    assert "planted" not in {row["backend"] for row in runner.rows}
    (entry,) = [e for e in runner.not_run if e["backend"] == "planted"]
    assert entry["status"] == "wrong"
    assert where in entry["reason"]
    assert "WRONG, not timed" in report.verdict(entry)
    assert entry["error"] is None or entry["error"] > 1e-4


def test_only_planted_faults_are_refused():
    runner = _runner(_off_by(1.0))
    runner.run(_step("fwd+bwd"))
    assert "planted" in {row["backend"] for row in runner.rows}


def test_wrong_masks_of_peers_are_detected():
    def acausal(problem):
        query, key, value = (problem.named[n] for n in ("query", "key", "value"))
        return providers.Prepared(
            "no mask",
            lambda: (torch.nn.functional.scaled_dot_product_attention(query, key, value),),
        )

    runner = Runner(
        Options(memory=False, min_time=0.0),
        memory.MemoryProbe(),
        find=lambda op: (providers.Provider("torch", acausal),),
    )
    runner.run(_step("fwd"))
    assert runner.rows == []
    assert runner.not_run[0]["status"] == "wrong" and "off by" in runner.not_run[0]["reason"]


def test_crashes_affect_only_their_implementation():
    def crash(problem):
        def forward():
            raise RuntimeError("boom |<b>\x1b[31m")

        return providers.Prepared("crash", forward)

    runner = _runner(providers.Provider("crash", crash))
    runner.run(_step("fwd"))
    assert {"reference", "naive", "torch"} <= {row["backend"] for row in runner.rows}
    (entry,) = [e for e in runner.not_run if e["backend"] == "crash"]
    assert entry["status"] == "failed"


def test_wrong_results_exit_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "Runner", partial(Runner, find=_with(_off_by(1.01))))
    arguments = [
        "bench",
        "attention",
        "--case",
        "causal",
        *SMALL,
        "--mode",
        "fwd",
        "--no-memory",
        "--no-plots",
    ]
    assert main([*arguments, "--out", str(tmp_path)]) == WRONG
    assert "WRONG, not timed: out[" in capsys.readouterr().out
    assert "WRONG, not timed" in (tmp_path / "report.md").read_text()


# ---- as a process


def test_plain_output_without_a_terminal(cli, tmp_path):
    text = cli(
        "bench", "attention", "--case", "window", *SMALL, "--mode", "fwd", "--out", "here"
    ).stdout
    assert "[1/1] attention window float32 fwd" in text
    assert "\x1b" not in text and "\r" not in text
    assert "Written to here: results.json, results.csv, report.md" in text
    assert report.load(tmp_path / "here" / "results.json")["rows"]


def test_default_folder_is_named_after_the_date(cli, tmp_path):
    cli(
        "bench",
        "attention",
        "--case",
        "full",
        *SMALL,
        "--mode",
        "fwd",
        "--no-memory",
        "--no-plots",
        "--no-verify",
    )
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name.startswith("bench-20")
    rows = report.load(folder / "results.json")["rows"]
    assert rows and all(row["error"] is None for row in rows), "--no-verify must not claim an error"


def test_bench_runs_without_matplotlib(cli, hide, tmp_path):
    text = cli(
        "bench", "attention", "--case", "full", *SMALL, "--mode", "fwd", "--no-memory", "--out",
        "here",
        **hide("matplotlib"),
    ).stdout  # fmt: skip
    assert "no plots: matplotlib is not installed. pip install matplotlib" in text
    assert report.load(tmp_path / "here" / "results.json")["rows"]
    assert not list((tmp_path / "here").glob("*.png"))


def test_ctrl_c_leaves_partial_results(tmp_path, environment):
    """The signal arrives in a later step; finished steps are written and marked incomplete."""
    bench = [
        sys.executable,
        "-m",
        "pytransformer",
        "bench",
        "attention",
        "--size",
        "small",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [*bench, "--out", "here", "--no-memory"], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, text=True,
        # a background process ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("[3/"):
            process.send_signal(signal.SIGINT)
            break
    output += process.stdout.readlines()
    assert process.wait(timeout=120) == INTERRUPTED
    document = report.load(tmp_path / "here" / "results.json")
    assert document["complete"] is False
    assert document["rows"], "the steps before the signal are kept"
    assert f"Interrupted: {len(document['rows'])} rows are in here" in "".join(output)
    assert "partial results" in (tmp_path / "here" / "report.md").read_text()


def test_progress_bar_appears_on_a_terminal(tmp_path, environment):
    """A pseudo-terminal shows a bar with the remaining time, which is removed at the end."""
    master, slave = pty.openpty()
    bench = [
        sys.executable,
        "-m",
        "pytransformer",
        "bench",
        "attention",
        "--case",
        "full",
        *SMALL,
        "--no-memory",
    ]
    process = subprocess.Popen(
        [*bench, "--out", "here"], cwd=tmp_path,
        env={**environment, "TERM": "xterm", "COLUMNS": "200"},
        stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    output = b""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            part = os.read(master, 65536)
        except OSError:  # closed at the other end: the process has finished
            break
        output += part
    assert process.wait(timeout=60) == OK, output.decode()
    assert b"s left" in output or b"nearly done" in output
    assert b"attention full float32 fwd+bwd" in output
    assert b"[1/2]" not in output, "a line per step is for logs"
