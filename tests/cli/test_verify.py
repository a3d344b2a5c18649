# SPDX-License-Identifier: Apache-2.0
"""`pytransformer verify` and `pt.verify`: checks, results, reports, broken backends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.cli import OK, USAGE, WRONG, doctor, verify
from pytransformer.cli.verify import plan, worker
from pytransformer.ops._core import checking, verification
from pytransformer.ops._core.registry import OPS, trace
from support.planted_backend import BACKEND, inputs, planted

# A check at first use.
JOB = {
    "do": "first", "op": "attention", "backend": "cpu", "dtype": "float32", "device": "cpu",
    "index": None, "size": 128, "last": 80, "seconds": 60.0,
}  # fmt: skip


def arguments(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"json": True, "backend": None, "op": None, "device": ["cpu"], "seconds": 60.0, **changes}
    )


def test_verify_writes_results_for_doctor(cli: Callable[..., Any], tmp_path: Path) -> None:
    keep = {"PYTRANSFORMER_CACHE": str(tmp_path / "cache"), "PYTRANSFORMER_VERIFY": "first"}
    (found,) = json.loads(
        cli("verify", "--op", "rms_norm", "--backend", "cpu", "--json", **keep).stdout
    )
    assert Path(found["path"]).is_file() and found["key"] == verification.file_key(
        torch.device("cpu")
    )
    assert [line["dtype"] for line in found["checks"]] == list(plan.DTYPES)
    assert all(line["outcome"] == "right" and line["bound_used"] <= 1 for line in found["checks"])
    assert found["complete"] == [["rms_norm", "cpu", dtype] for dtype in plan.DTYPES]
    text = cli(
        "verify", "--op", "layer_norm", "--backend", "cpu", **keep
    ).stdout  # a second run adds to the first
    assert "layer_norm" in text and "rms_norm" in text and found["path"] in text
    report = json.loads(cli("doctor", "--json", **keep).stdout)
    (results,) = report["verification"]
    assert {row["op"] for row in results["rows"]} == {"rms_norm", "layer_norm"}
    assert not any(row["bad"] for row in results["rows"])
    assert "unknown" not in cli("verify", "--help").stdout
    assert "'atention'" in cli("verify", "--op", "atention", expect=USAGE).stderr


def test_function_equals_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CACHE", str(tmp_path))
    (found,) = pt.verify(ops=["rms_norm"], backends=["cpu"], devices=["cpu"])
    assert found["checks"] and Path(found["path"]).parent == tmp_path
    with pytest.raises(ValueError, match="atention was not understood"):
        pt.verify(ops=["atention"])


@pytest.mark.falls_back
@pytest.mark.parametrize("fault", ["wrong numbers", "crash"])
def test_broken_backends_do_not_affect_others(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code is 1, the output names the failure, and calls use the next backend."""
    checks = plan.checks
    monkeypatch.setattr(
        plan,
        "checks",
        lambda *a: [job for job in checks(*a) if job["case"] == "full" and not job["last"]],
    )
    monkeypatch.setattr(plan, "timings", lambda *a: [])
    with planted(fault, tmp_path):
        assert (
            verify.run(arguments(op=["attention"], backend=[BACKEND, "cpu"], seconds=600.0))
            == WRONG
        )
        (found,) = json.loads(capsys.readouterr().out)
        outcomes = {(line["backend"], line["outcome"]) for line in found["checks"]}
        assert outcomes == {("cpu", "right"), (BACKEND, "crashed" if fault == "crash" else "wrong")}
        with (
            trace() as ran,
            pytest.warns(
                RuntimeWarning,
                match=f"runs on the backend cpu: {BACKEND}: verify: (wrong|crashed) here: full",
            ),
        ):
            pt.attention(*inputs())
        assert ran == [("attention_fwd", "cpu")]
        (shown,) = [
            row
            for row in doctor.verification_of(torch.device("cpu"))["rows"]
            if row["backend"] == BACKEND and row["dtype"] == "float32"
        ]
        assert shown["bad"]
        verify.show(verify.Console(), {**found})
        assert "Not right here" in capsys.readouterr().out


def test_verify_checks_everything() -> None:
    """Each backend, op, dtype and case; core cases have wide heads and a large mask.

    The most frequent cases come first.
    """
    for backend in ("cpu", "torch", "cuda"):
        jobs = plan.checks(backend, "cuda", OPS)
        assert {job["op"] for job in jobs} == {
            name for name, op in OPS.items() if backend in op.backends
        }
        for op in {job["op"] for job in jobs}:
            assert {job["case"] for job in jobs if job["op"] == op} == {
                c.name for c in plan.cases_of(op)
            }
            assert {job["dtype"] for job in jobs if job["op"] == op} == set(plan.DTYPES)
        assert {job["last"] for job in jobs if job["op"] == "attention"} == {
            None,
            plan.LARGE,
            *plan.WIDE,
        }
        assert jobs[0]["dtype"] == "bfloat16"


def test_interrupted_runs_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Passed checks are kept; missing and failed ones run again.

    After a complete run all run again.
    """
    monkeypatch.setenv("PYTRANSFORMER_CACHE", str(tmp_path))
    outcomes = ["right", "declined", "wrong", "not checked"]
    ran: list[int] = []

    def run_jobs(jobs: list[Any], **_: Any) -> list[Any]:
        ran.append(len(jobs))
        return [
            job | {"outcome": outcomes[place % len(outcomes)], "detail": None}
            for place, job in enumerate(jobs)
        ]

    def run() -> dict[str, Any]:
        verify.run(arguments(op=["rms_norm", "layer_norm"], backend=["cpu"], seconds=None))
        (found,) = json.loads(capsys.readouterr().out)
        return found

    monkeypatch.setattr(checking, "run_jobs", run_jobs)
    monkeypatch.setattr(plan, "timings", lambda *a: [])
    total = len(plan.checks("cpu", "cpu", ["rms_norm", "layer_norm"]))
    first = run()
    assert ran == [total] and len(first["complete"]) < 2 * len(plan.DTYPES)
    verify.show(verify.Console(), first)
    assert f"{total // 4} not checked: run it again" in capsys.readouterr().out
    outcomes[:] = ["right"]
    second = run()
    assert ran[1] == total - sum(x["outcome"] in ("right", "declined") for x in first["checks"])
    assert len(second["checks"]) == total and len(second["complete"]) == 2 * len(plan.DTYPES)
    run()
    assert ran[2] == total


def test_order_needs_a_clear_lead_in_every_case() -> None:
    def times(*rows: tuple[float, float]) -> list[dict[str, Any]]:
        return [{"op": "attention", "ms": {"cpu": cpu, "torch": theirs}} for cpu, theirs in rows]

    assert plan.order(times((2.0, 1.0), (1.5, 1.0))) == {"attention": ["torch", "cpu"]}
    assert plan.order(times((2.0, 1.0), (1.0, 1.2))) == {}  # slower in one case
    assert plan.order(times((1.05, 1.0), (1.05, 1.0))) == {}  # a lead below the threshold
    assert plan.order(times((1.0, 1.0))) == {} and plan.order([]) == {}


def test_first_check_covers_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses the call's last dimension: all core cases if time allows, else one.

    A failure ends it.
    """
    ran: list[tuple[str, int]] = []
    outcomes: dict[str, str] = {}

    def check_case(found: Any, *_: Any) -> dict[str, Any]:
        ran.append((found.name, found.shape["D"]))
        return {
            "case": found.name,
            "outcome": outcomes.get(found.name, "right"),
            "detail": "d",
            "size": 1,
        }

    monkeypatch.setattr(worker, "check_case", check_case)
    result = worker._check_first(JOB)
    names = [name for name, _ in ran]
    assert names[:2] == ["full", "everything"] and {"causal", "dropout", "decode"} <= set(names)
    assert {size for _, size in ran} == {80} and {line["size"] for line in result["lines"]} == {128}
    assert (result["outcome"], len(result["lines"])) == ("right", len(ran))
    ran.clear()
    assert worker._check_first(JOB | {"seconds": 0.0})["outcome"] == "right" and len(ran) == 1
    ran.clear()
    outcomes["everything"] = "wrong"
    result = worker._check_first(JOB)
    assert (result["outcome"], result["detail"]) == ("wrong", "everything: d") and len(ran) == 2
    outcomes |= dict.fromkeys(names, "declined")
    assert worker._check_first(JOB)["outcome"] == "not checked"


def test_first_check_runs_real_cases() -> None:
    result = worker._check_first(JOB | {"seconds": 0.0})
    assert result["outcome"] == "right" and result["lines"][0]["bound_used"] <= 1


def test_times_cover_only_passed_checks() -> None:
    line = {"op": "attention", "case": "full", "dtype": "float32", "outcome": "right"}
    found = [line | {"backend": b} for b in ("cpu", "torch", "reference")]
    (job,) = plan.timings(found, "cpu", ["attention"])
    assert job["backends"] == ["cpu", "torch"] and job["shape"]["Lq"] == 512
    assert plan.timings([*found[:1], found[1] | {"outcome": "wrong"}], "cpu", ["attention"]) == []
    small = worker._time(
        job | {"shape": {"B": 1, "Hq": 1, "Hkv": 1, "Lq": 8, "Lk": 8}, "threads": 1}
    )
    assert (
        small["outcome"] == "right"
        and set(small["ms"]) == {"cpu", "torch"}
        and min(small["ms"].values()) > 0
    )


def test_exit_code_when_all_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(plan, "checks", lambda *a: [])
    assert verify.run(arguments(json=False)) == OK
    assert "0 checks" in capsys.readouterr().out
