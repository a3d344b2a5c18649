# SPDX-License-Identifier: Apache-2.0
"""Peers that run on request, sweeps, and their plots."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytransformer.cli import OK, USAGE, main, providers
from pytransformer.cli.benchmark import curves, memory, peaks, plan, report
from pytransformer.cli.benchmark.runner import Options, Runner

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]


def run(case: str, *backends: str, mode: str = "fwd") -> Runner:
    runner = Runner(
        Options(memory=False, min_time=0.0, backends=backends or None), memory.MemoryProbe()
    )
    runner.run(plan.Step(plan.case(case, "small"), plan.DTYPES["float32"], mode))
    return runner


def test_peers_on_request_are_absent_by_default() -> None:
    runner = run("full")
    assert not {entry["backend"] for entry in (*runner.rows, *runner.not_run)} & set(
        providers.ON_REQUEST
    )


def test_pytorch_kernels_run_separately() -> None:
    runner = run("full", "torch_flash", "torch_math", "torch_cudnn")
    assert {row["backend"]: row["provider"] for row in runner.rows} == {
        "torch_flash": "scaled_dot_product_attention [flash]",
        "torch_math": "scaled_dot_product_attention [math]",
    }
    assert [(e["backend"], e["reason"]) for e in runner.not_run] == [
        ("torch_cudnn", "cudnn_attention does not run on cpu")
    ]


def test_gpu_only_peers_name_the_gpu_in_their_reason() -> None:
    reasons = {e["backend"]: e["reason"] for e in run("full", "flash_attn").not_run}
    reasons |= {e["backend"]: e["reason"] for e in run("rms_norm", "liger", "quack").not_run}
    assert set(reasons) == {"flash_attn", "liger", "quack"}
    assert all("GPU" in reason for reason in reasons.values())


@pytest.mark.slow  # the compiler needs 20 s per case
@pytest.mark.parametrize(
    "case",
    [
        "full",
        "causal",
        "window",
        "segments",
        "key_padding",
        "alibi",
        "t5_bias",
        "bias",
        "softcap",
        "gqa",
    ],
)
def test_flex_attention_runs_the_case(case: str) -> None:
    runner = run(case, "flex")
    assert [row["backend"] for row in runner.rows] == ["flex"], runner.not_run
    assert runner.rows[0]["error"] <= runner.rows[0]["error_bound"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["causal", "add_norm", "feed_forward_gelu", "linear_cross_entropy"]
)
def test_compiled_naive_code_runs(case: str) -> None:
    runner = run(case, "compile", mode="fwd+bwd")
    assert [row["provider"].split(":")[0] for row in runner.rows] == ["torch.compile"], (
        runner.not_run
    )


def test_sweeps_plot_curves(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [
        "bench",
        "attention",
        "--case",
        "causal",
        "--sweep",
        "L=16:64",
        "--mode",
        "fwd",
        "--providers",
        "cpu,torch,reference",
    ]
    assert (
        main(
            [*arguments, "--min-time", "0", "--threads", "1", "--size", "small", "--out", str(out)]
        )
        == OK
    )
    document = report.load(out / "results.json")
    assert {row["shape"]["Lk"] for row in document["rows"]} == {16, 32, 64}
    assert document["peaks"]["tflops"]["float32"] > 0
    assert document["peaks"]["gbps"] > 0
    text = (out / "report.md").read_text()
    for name in ("speed_by_l.png", "memory_by_l.png", "roofline.png"):
        assert (out / name).stat().st_size > 10_000
        assert f"({name})" in text


def test_sweeps_detect_the_varying_dimension() -> None:
    def row(**shape: int) -> dict[str, object]:
        return {
            "op": "attention",
            "case": "full",
            "dtype": "float32",
            "mode": "fwd",
            "shape": shape,
        }

    assert list(curves.sweeps([row(Lq=1, Lk=1, D=8), row(Lq=2, Lk=2, D=8)])) == ["L"]
    assert list(curves.sweeps([row(Lq=1, Lk=1, D=8), row(Lq=1, Lk=2, D=8)])) == ["Lk"]
    assert list(curves.sweeps([row(Lq=1, Lk=1, D=8), row(Lq=1, Lk=1, D=9)])) == ["D"]
    assert curves.sweeps([row(Lq=1, Lk=1, D=8)]) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sweep", "L=64:8"], "goes from 64 down to 8"),
        (["--sweep", "X=1,2"], "is not NAME=SIZE"),
        (["--sweep", "L=a:b"], "is not NAME=SIZE"),
        (["--sweep", "L="], "is not NAME=SIZE"),
        (["--providers", "fastest"], "fastest is not one of"),
        (
            ["--quick", "--sweep", "L=8:16"],
            "--quick chooses its own cases, so it does not go with --sweep",
        ),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:  # argparse's error
        code = stop.code
    assert code == USAGE
    assert said in capsys.readouterr().err


def test_gemm_peak_is_the_max_of_pytorch_and_ours() -> None:
    rates = {"mm": 2.0, "ours": 1.0}

    asked = []

    def fastest(call) -> float:
        asked.append("mm" if call.func is torch.mm else "ours")
        return 1 / rates[asked[-1]]

    assert peaks._product("cpu", torch.float32, fastest) == 2.0 * 2 * max(peaks.SIZES) ** 3 / 1e12
    rates["ours"] = 3.0
    assert peaks._product("cpu", torch.float32, fastest) == 3.0 * 2 * max(peaks.SIZES) ** 3 / 1e12
    assert asked == ["mm", "ours"] * 4
    rates["ours"] = 11.0
    assert peaks._product("cpu", torch.float32, fastest) == 11.0 * 2 * max(peaks.SIZES) ** 3 / 1e12
    assert asked[8:] == ["mm", "ours", "ours"], (
        "who is five times slower at one size is not waited for at the next"
    )
    x, w = torch.randn(3, 70), torch.randn(5, 70)
    torch.testing.assert_close(peaks.own_product(x, w, None), x @ w.t())
