# SPDX-License-Identifier: Apache-2.0
"""bench/gpu.sh and its tools, on a CPU: steps, turns of two builds, clocks and the last table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from pytransformer.cli import build_parser
from pytransformer.cli.benchmark import command

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "bench" / "gpu.sh")


def gpu_run(*calls: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this Python; without PYTHON a missing one stands for every failure."""
    variables = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(["bash", SCRIPT, *calls], env=variables, capture_output=True, text=True)


def steps(output: str) -> dict[str, int]:
    """Return the limits of a dry run's steps in seconds."""
    found = re.findall(r"^([\w=,]+) \((\d+) s\): ", output, re.MULTILINE)
    return {name: int(seconds) for name, seconds in found}


def test_bench_accepts_the_commands_of_the_gpu_run(tmp_path: Path) -> None:
    """This covers each `pytransformer bench` in bench/gpu.sh."""
    output = gpu_run(DRY_RUN="1", OUT=str(tmp_path), BASE=str(tmp_path)).stdout
    commands = [
        line.partition("-m pytransformer ")[2].split()
        for line in output.splitlines()
        if " -m pytransformer bench" in line
    ]
    assert len(commands) >= 30
    for words in commands:
        arguments = build_parser().parse_args(words)
        chosen = command._steps(arguments, command._ops(arguments.ops))
        assert chosen and arguments.device == "cuda", words


def test_gpu_calls_take_less_than_ten_minutes(tmp_path: Path) -> None:
    """Benchmarks run within `turns` and `times`; the last steps of `tests` use the time left."""
    common = {"DRY_RUN": "1", "OUT": str(tmp_path), "BASE": str(tmp_path), "PREBUILT": str(ROOT)}
    limits, peers, tests = (
        steps(gpu_run(call, **common).stdout) for call in ("limits", "peers", "tests")
    )
    assert sum(limits[n] for n in ("conformance", "test_paths", "turns", "clocks")) + 90 + 40 <= 560
    assert sum(limits[n] for n in ("bwd64", "bwd128_2048", "fwd64", "mask")) <= limits["turns"]
    assert peers["times"] <= 560 and {"terms", "cross_entropy", "decode_16"} <= set(peers)
    assert sum(s for name, s in tests.items() if name not in ("test_random", "tune")) <= 560
    assert not set(peers) & set(tests) and "test_cuda" not in limits


def test_gpu_run_refuses_unknown_calls(tmp_path: Path) -> None:
    done = gpu_run("speed", DRY_RUN="1", OUT=str(tmp_path))
    assert done.returncode == 2 and "speed is not limits, peers or tests" in done.stderr


def test_gpu_run_writes_its_logs_after_failures(tmp_path: Path) -> None:
    """It writes few files, and a later run can run selected steps."""
    assert gpu_run(OUT=str(tmp_path), PYTHON="false").returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "facts.txt",
        "results.tar.gz",
        "steps.txt",
    ]
    # expected times, and slow kernels
    assert (tmp_path / "steps.txt").read_text().count("exit code 1") == 2
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert "logs/install.log" in archive.getnames()
    output = gpu_run(OUT=str(tmp_path), PYTHON="false", DRY_RUN="1", ONLY="portable|decode").stdout
    names = list(steps(output))
    assert [name for name in names if not name.startswith("decode_")] == [
        "install",
        "attention_portable",
        "test_cuda_portable",
    ]
    assert len(names) == 3 + 4


@pytest.mark.parametrize(
    ("call", "step", "file"),
    [
        ("limits", "turns", "bench/turns.json"),
        pytest.param("peers", "times", "bench/fwd128/results.json", marks=pytest.mark.slow),
    ],
)
def test_gpu_run_works_on_a_cpu(call: str, step: str, file: str, tmp_path: Path) -> None:
    """ON_CPU=1 runs turns of two builds, benchmarks and the last table with tiny problems."""
    done = gpu_run(call, ON_CPU="1", ONLY=f"^(fwd128|{step})$", OUT=str(tmp_path), BASE=str(ROOT),
                   PREBUILT=str(ROOT))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "cells.md").read_text()
    for case in ("full", "causal"):
        row = next(line for line in table.splitlines() if f"attention {case} bf16 fwd" in line)
        *_, speed, change = (cell.strip() for cell in row.strip("|").split("|"))
        assert float(speed) > 0 and (float(change) > 0 if step == "turns" else not change), row
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert file in archive.getnames()


class FakeWorker:
    """A worker that records its samples in `order`."""

    def __init__(self, who: str, order: list[str], seconds: float) -> None:
        self.who, self.order, self.seconds = who, order, seconds

    def request(self, request: str, backend: str = "", **_: object) -> float:
        if request == "sample":
            self.order.append(f"{self.who} {backend}")
        return self.seconds


def test_builds_take_turns(tool) -> None:
    turns, order = tool("turns"), []
    workers = {
        who: FakeWorker(who, order, seconds)
        for who, seconds in (("base", 0.003), ("candidate", 0.002))
    }
    samples, reasons = turns.timed(workers, 0, ["cuda", "torch_cudnn"], {"torch_cudnn"}, 0.0)
    assert not reasons
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys(
        ("base cuda", "candidate cuda", "torch_cudnn"), turns.MIN_ROUNDS
    )
    rounds = [order[n : n + 3] for n in range(0, len(order), 3)]
    assert all(len(set(members)) == 3 for members in rounds)
    assert len({tuple(members) for members in rounds}) > 2, "the order rotates"
    assert "base torch_cudnn" not in order
    row = turns.row_of({"op": "attention"}, samples, {"flex": "absent"})
    assert row["base_over_candidate"] == {"cuda": pytest.approx([1.5] * 3)}


def test_lost_workers_are_named(tool) -> None:
    turns = tool("turns")
    worker = turns.Worker(ROOT)
    worker.process.kill()
    with pytest.raises(turns.WorkerError, match=r"exit code|ended"):
        worker.request("open", arguments=[])


def test_clocks_relate_time_to_cycles(tool, tmp_path: Path, monkeypatch) -> None:
    """The fake nvidia-smi reports 1,500 MHz and 600 W; a partial last line is left out."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nfor n in 1 2 3 4; do echo '1500, 600.5, 60'; done\n"
                    "printf '1500, 6'\nexec sleep 60\n")  # fmt: skip
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    clocks = tool("clocks")
    monkeypatch.setattr(clocks, "REST", 0.0)
    arguments = "attention --case full --size small --shape L=16 --dtype f32 --mode fwd"
    (tmp_path / "steps").write_text(f"tiny 0 {arguments} --device cpu --backends torch,flash_attn")
    output = []
    monkeypatch.setattr("builtins.print", lambda *words, **_: output.append(" ".join(words)))
    assert clocks.main([str(tmp_path / "steps"), "--seconds", "0.3", "--out", str(tmp_path)]) == 0
    figures = dict(re.findall(r"(\w+) ([\d.e+]+)", output[0].partition("torch: ")[2]))
    assert float(figures["mhz"]) == 1500 and float(figures["watts"]) == 600.5
    assert float(figures["kilocycles"]) == pytest.approx(
        1500 * float(figures["sustained_ms"]), rel=1e-2
    )
    assert "GPUs only" in output[1]
    assert (tmp_path / "clocks.csv").read_text().splitlines()[1].endswith("1500.0,600.5,60.0")


def result(backend: str, ms: float, kernel_ms: float | None = None, length: int = 8) -> dict:
    return {"op": "attention", "case": "full", "dtype": "bfloat16", "mode": "fwd",
            "shape": {"L": length}, "backend": backend, "median_ms": ms,
            "kernel_ms": kernel_ms}  # fmt: skip


def test_cells_compare_with_the_best_peer(tool, tmp_path: Path) -> None:
    cells = tool("cells")
    rows = [
        result("cuda", 2.0, 1.0), result("triton", 3.0, 2.5), result("cuda_any_order", 1.0, 0.5),
        result("torch_cudnn", 1.9, 0.9), result("torch", 4.0, 3.0), result("reference", 0.1, 0.1),
        result("cuda", 1.0, length=9), result("torch", 2.0, 1.0, length=9),
        result("cuda", 1.0, length=10),
    ]  # fmt: skip
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "results.json").write_text(json.dumps({"rows": rows}))
    turn = result("", 0.0) | {"base_over_candidate": {"cuda": [1.0, 1.1, 1.2]}, "contenders": {}}
    (tmp_path / "turns.json").write_text(json.dumps([turn]))
    found = list(cells.cells(*cells.load(tmp_path)))
    assert [(c.ours, c.peer, round(c.speed, 2), c.base) for c in found] == [
        ("cuda", "torch_cudnn", 0.9, 1.1),  # times of kernels
        ("cuda_any_order", "torch_cudnn", 1.8, None),
        ("cuda", "torch", 2.0, None),  # times of calls: the kernels of ours were not measured
    ]
    lines = cells.table(found).splitlines()
    assert lines[2].startswith(
        "| attention full bf16 fwd L8 | cuda 1 | torch_cudnn 0.9 | 0.90 | 1.100"
    )
    assert lines[-1] == "2 of 3 cells at 1.03 or more"


def test_table_of_cells_fits_the_limit(tool) -> None:
    cells = tool("cells")
    many = [cells.Cell(f"problem {n}", "cuda", 1.0, "torch", 1 + n / 100, None) for n in range(500)]
    text = cells.table(many)
    assert 11_000 < len(text) <= cells.LIMIT
    kept = len(text.splitlines()) - 3
    assert text.endswith(f"cells at 1.03 or more; {500 - kept} faster cells left out")
    assert "problem 0 " in text and "problem 499" not in text
