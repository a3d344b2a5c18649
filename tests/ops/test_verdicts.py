# SPDX-License-Identifier: Apache-2.0
"""Kernels earn their place: planted failures of a guarded tier are found in a process of their own, and the next backend computes."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import checking, deadline, lane, verdict_file, verdicts
from pytransformer.ops._core.deadline import Deadline, Stopwatch
from pytransformer.ops._core.registry import OPS, trace
from pytransformer.testing.planted_tier import FAULTS, TIER, check_told_once, inputs, planted
from pytransformer.testing.way_down import WAYS

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("one_thread")]
CPU = torch.device("cpu")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_tier_is_found_first_and_told_once(fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By every way: a right result, and one message with what was found. The worker's signal or silence does not reach us."""
    want = {name: way() for name, way in WAYS.items()}
    for name, way in WAYS.items():
        with planted(fault, tmp_path, seconds=4 if fault == "hang" else 60) as ran:
            check_told_once(way, want[name], TIER, FAULTS[fault][1])
        assert not ran, f"{name} ran on the broken tier"
    assert list(tmp_path.glob("verdict-*.json"))
    assert "in a process of its own, once" in capfd.readouterr().err


def test_a_right_tier_is_checked_once_and_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    q, k, v = inputs()
    with planted("", tmp_path) as ran:
        pt.attention(q, k, v)
        pt.attention(q[:, :, :20], k, v)  # another length is no other kind
        assert ran == ["forward"] * 2 and not pt.fallbacks()
        assert capfd.readouterr().err.count("checks attention") == 1
        verdicts.forget()  # as in another process: the verdict is on disk
        pt.attention(q, k, v)
        assert len(ran) == 3 and "checks" not in capfd.readouterr().err
        pt.attention(q, k, v, causal="top_left", window=(3, 0))  # another kind
        assert len(ran) == 4 and capfd.readouterr().err.count("checks attention") == 1


def test_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    with planted("hang", tmp_path) as ran:
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "strict")
        with pytest.warns(RuntimeWarning, match="no verdict says that it is right here"):
            pt.attention(q, k, v)
        with pytest.raises(pt.BackendError, match="strict mode"):
            pt.attention(q, k, v, strict=True)
        assert not ran
        pt.attention(q, k, v, backend=TIER)  # forced means forced
        assert len(ran) == 1
        assert pt.explain("attention", q, k, v, causal="top_left").reasons["cpu"] is None
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "off")
        pt.attention(q, k, v)
        assert len(ran) == 2
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")  # explain does not check
        assert pt.explain("attention", q, k, v).backend == TIER and not list(tmp_path.glob("verdict-*"))


def write(folder: Path, checks: list[dict[str, Any]], **more: Any) -> None:
    verdict_file.save(CPU, {"checks": checks, **more})
    assert list(folder.glob("verdict-*.json"))


def line(
    outcome: str, names: str = "", *, backend: str = "cpu", dtype: str = "float32", op: str = "attention", size: int = 64
) -> dict[str, Any]:
    plain = ["key=float", "query=float", "scale=yes", "value=float"]
    return {
        "op": op, "backend": backend, "dtype": dtype, "case": "full", "features": sorted([*plain, *names.split()]), "size": size,
        "outcome": outcome, "detail": "out[0] = 1",
    }  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache of verdicts that take part."""
    monkeypatch.setenv("PYTRANSFORMER_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")
    verdicts.forget()
    yield tmp_path
    monkeypatch.undo()
    verdicts.forget()


def backend_of(**keywords: Any) -> str | None:
    dtype = keywords.pop("dtype", torch.float32)
    last = keywords.pop("last", 16)
    q, k, v = (torch.randn(1, 2, 30, last).to(dtype) for _ in "qkv")
    with trace() as ran, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pt.attention(q, k, v, **keywords)
    assert ran or not verdicts.watched, "the lane ran"
    return ran[0][1] if ran else "cpu"


def test_the_cpu_needs_no_verdict_but_bows_to_one(kept: Path) -> None:
    assert backend_of() == "cpu"
    write(kept, [line("wrong", "causal=top_left"), line("right")])
    verdicts.forget()
    verdicts.prepare_cpu()  # in a new process the lane does it at its first call
    assert backend_of() == "cpu"
    assert backend_of(causal="top_left") == "torch"
    assert backend_of(causal="top_left", dropout_p=0.1) == "reference", "what has the wrong problem's features and more"
    assert backend_of(causal="top_left", dtype=torch.bfloat16) == "cpu", "another dtype"
    q = torch.zeros(1, 1, 4, 16)
    assert "verify: wrong here: full: out[0] = 1" in str(pt.explain("attention", q, q, q, causal="top_left").reasons["cpu"])


def test_a_call_that_is_part_of_a_wrong_problem(kept: Path) -> None:
    """Out, unless a right problem has it all."""
    write(kept, [line("wrong", "causal=top_left left=yes softcap=yes"), line("right", "causal=top_left")])
    verdicts.forget()
    verdicts.prepare_cpu()
    assert backend_of() == backend_of(causal="top_left") == "cpu"
    assert backend_of(softcap=5.0) == "reference"


def test_sizes_stand_for_one_another_unless_checked(kept: Path) -> None:
    write(kept, [line("wrong"), line("right", size=128)])
    verdicts.forget()
    verdicts.prepare_cpu()
    assert (backend_of(), backend_of(last=100), backend_of(last=200)) == ("torch", "cpu", "torch")


def test_a_measured_order_is_used_and_keeps_the_lane_away(kept: Path) -> None:
    write(kept, [line("right")], order={"attention": ["torch", "cpu"]})
    verdicts.forget()
    verdicts.prepare_cpu()
    assert backend_of() == "torch" and backend_of(dropout_p=0.1) == "cpu"
    assert list(pt.explain("attention", *inputs()).reasons)[:2] == ["torch", "cpu"]


def test_a_verdict_of_another_build_or_a_damaged_one_counts_as_none(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kept, [line("wrong")])
    (path,) = kept.glob("verdict-*.json")
    own = path.read_text()
    for text in (own.replace('"sources": "', '"sources": "x'), own[:40], "[]", json.dumps({"schema": 99})):
        path.write_text(text)
        verdicts.forget()
        verdicts.prepare_cpu()
        assert backend_of() == "cpu", text[:60]
    monkeypatch.setenv("PYTRANSFORMER_VERIFY", "off")
    path.write_text(own)
    verdicts.forget()
    assert backend_of() == "cpu"


def test_a_shipped_verdict_is_used_without_asking(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shipped" / "verdicts"
    folder.mkdir(parents=True)
    write(kept, [line("wrong")])
    (path,) = kept.glob("verdict-*.json")
    verdict = json.loads(path.read_text())
    verdict["key"] |= {"driver": "another", "binaries": "another"}
    path.unlink()
    (folder / "epyc.json").write_text(json.dumps(verdict))
    monkeypatch.setattr(verdict_file, "shipped", lambda: [folder / "epyc.json"])
    verdicts.forget()
    verdicts.prepare_cpu()
    assert backend_of() == "torch"
    verdict["key"]["device"] = "another"
    (folder / "epyc.json").write_text(json.dumps(verdict))
    verdicts.forget()
    verdicts.prepare_cpu()
    assert backend_of() == "cpu"


@pytest.fixture
def imitated(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.device, Path]:
    """A GPU as far as a verdict's key goes, and the folder of shipped verdicts."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(verdict_file, "shipped", lambda: sorted(folder.glob("*.json")))
    return torch.device("cuda", 0), folder


def test_the_users_own_verdict_comes_before_shipped_ones_and_the_drivers_before_anothers(
    imitated: tuple[torch.device, Path],
) -> None:
    gpu, folder = imitated

    def ship(name: str, **parts: str) -> None:
        content = {
            "schema": verdict_file.SCHEMA,
            "key": verdict_file.key(gpu) | parts,
            "checks": [line("right")],
            "name": name,
        }
        (folder / f"{name}.json").write_text(json.dumps(content))

    def found() -> str | None:
        return (verdict_file.load(gpu) or {}).get("name")

    assert verdict_file.key(gpu)["device"] == "NVIDIA H200 (sm_90)" and found() is None
    for part in verdict_file.ALIKE:
        ship(f"0 another {part}", **{part: "another"})
    assert found() is None
    ship("1 another driver", driver="12080")
    assert found() == "1 another driver"
    ship("2 this driver", binaries="another")
    assert found() == "2 this driver"
    verdict_file.add_checks(
        gpu, [line("wrong", "causal=top_left", backend="cuda")]
    )  # of a first call: nothing shipped is lost
    assert [x["outcome"] for x in verdict_file.load(gpu)["checks"]] == ["right", "wrong"]  # type: ignore[index]
    verdict_file.save(gpu, {"checks": [], "name": "own"})
    assert found() == "own"


def test_seconds_pass_slowly_on_a_slow_machine_unless_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(deadline.time, "monotonic", lambda: now)
    monkeypatch.setattr(deadline, "loop_time", lambda: slow * deadline.NOMINAL)
    slow, exact, limits = 1.0, Deadline(100, Stopwatch(exact=True)), [Deadline(100), Deadline(2)]
    now = 50.0
    assert [limit.left() for limit in (exact, *limits)] == [50, 50, 0]
    slow = 4.0  # busy from now on
    now = 90.0
    assert [limit.left() for limit in (exact, *limits)] == [10, 40, 0]
    slow = 0.1  # a fast machine gets the seconds too
    now = 120.0
    assert [limit.left() for limit in (exact, *limits)] == [0, 10, 0]
    slow = 1e3  # what hangs has to end
    now += 10 * deadline.MOST - 1e-6
    assert limits[0].left() == pytest.approx(0, abs=1e-6) and limits[0].left() > 0
    now += 1e-3
    assert limits[0].left() == 0 == limits[0].left()


def test_a_warm_call_asks_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    with lane.off():
        pt.attention(q, k, v)
        monkeypatch.setattr(verdicts, "why_not", lambda *_, **__: pytest.fail("asked again"))
        pt.attention(q, k, v)
        pt.attention(q, k, v, dropout_p=0.1)


def test_jobs_outlive_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five jobs the second crashes and the fourth hangs; time that is up leaves the rest unchecked."""
    monkeypatch.setattr(
        checking,
        "PREAMBLE",
        """
import os, time
import pytransformer.cli.verify.worker as w
def do(job):
    if job["n"] == 1: os.abort()
    if job["n"] == 3: time.sleep(100)
    return {**job, "outcome": "right", "process": os.getpid()}
w._DO = {"test": do}
w._lost_context = lambda job: "the context is lost" if job["n"] == 7 else None""",
    )
    jobs = [{"do": "test", "device": "cpu", "n": n} for n in range(5)]
    told: list[dict[str, Any]] = []
    found = checking.run_jobs(jobs, seconds=1.5, told=told.append)
    assert [line["outcome"] for line in found] == ["right", "crashed", "right", "hung", "right"] and told == found
    assert found[1]["detail"] == "the process ended by SIGABRT"
    wide = [{"do": "test", "device": "cpu", "n": n, "last": 128} for n in (5, 6, 7, 8)]
    same = checking.run_jobs(wide, seconds=60)
    processes = [line["process"] for line in same]
    assert processes[0] == processes[1] == processes[2] != processes[3], (
        "a wide problem does not end the process, a lost context does"
    )
    assert [line["outcome"] for line in same] == ["right", "right", "crashed", "right"]
    late = checking.run_jobs(jobs, seconds=1.5, until=Deadline(0))
    assert {line["outcome"] for line in late} == {"not checked"}
    monkeypatch.setattr(checking, "PREAMBLE", "raise SystemExit(3)")
    (line,) = checking.run_jobs(jobs[:1], seconds=1.5)
    assert (line["outcome"], line["detail"]) == ("not checked", "the process did not start: the process ended with code 3")


@pytest.mark.unpoisoned
def test_tracing_checks_too_and_guards_nothing(tmp_path: Path) -> None:
    """Under activate() the choice is made while torch.compile traces: symbolic sizes are looked at without a guard."""
    attend = torch.nn.functional.scaled_dot_product_attention
    with planted("", tmp_path) as ran, pt.activate():
        compiled = torch.compile(lambda x: attend(x, x, x), backend="aot_eager", dynamic=True, fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for length in (30, 40, 10):  # the last is of another kind, in the same code
                x = torch.randn(2, 3, length, 16)
                torch.testing.assert_close(compiled(x), attend(x, x, x))
        assert len(ran) == 6
    torch._dynamo.reset()


def test_features_are_of_kinds_not_of_lengths() -> None:
    q, k, v = inputs()

    def of(q: torch.Tensor, **keywords: Any) -> verdicts.Features:
        return verdicts.features(OPS["attention"].prepare(q, k, v, **keywords)[0])

    assert of(q) == of(q[:, :, :20]) == of(q, deterministic=False) == dataclasses.replace(of(q), size=64)
    others = [
        of(q, causal="top_left"),
        of(q, dropout_p=0.1),
        of(q[:, :, :1]),
        of(q, attn_mask=torch.ones(30, 30, dtype=torch.bool)),
    ]
    assert len({o.names for o in others} | {of(q).names}) == 5
    assert all(of(q).names < o.names for o in others)
