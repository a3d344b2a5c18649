# SPDX-License-Identifier: Apache-2.0
"""A check at first use detects planted failures, and the next backend computes.

The tests cover the process that checks and the processes that wait.
"""

from __future__ import annotations

import runpy
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import checking, fast_path, verification
from pytransformer.ops._core.checking import Deadline
from pytransformer.ops._core.registry import OPS
from support.planted_backend import BACKEND, FAULTS, check_told_once, inputs, planted
from support.verification_support import CPU, backend_of, cache, line, write
from support.way_down import WAYS

pytestmark = [pytest.mark.falls_back, pytest.mark.usefixtures("one_thread")]
__all__ = ["cache"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_backend_is_detected_and_reported_once(
    fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each failure gives a right result and one message.

    Signals and hangs of the worker do not reach the parent.
    """
    want = {name: way() for name, way in WAYS.items()}
    for name, way in WAYS.items():
        with planted(fault, tmp_path, seconds=4 if fault == "hang" else 60) as ran:
            check_told_once(way, want[name], BACKEND, FAULTS[fault][1])
        assert not ran, f"{name} ran on the broken backend"
    assert list(tmp_path.glob("verification-*.json"))
    assert "in a child process, once per machine" in capfd.readouterr().err


def test_right_backend_is_checked_once_and_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    q, k, v = inputs()
    with planted("", tmp_path) as ran:
        pt.attention(q, k, v)
        pt.attention(q[:, :, :20], k, v)  # another length is the same class
        assert ran == ["forward"] * 2 and not pt.fallbacks()
        assert capfd.readouterr().err.count("checking attention") == 1
        verification.forget()  # the result is on disk for another process
        pt.attention(q, k, v)
        assert len(ran) == 3 and "checking" not in capfd.readouterr().err
        pt.attention(q, k, v, causal="top_left", window=(3, 0))
        assert len(ran) == 4 and "checking" not in capfd.readouterr().err
        wide = [torch.randn(1, 2, 30, 100) for _ in "qkv"]  # another size class
        pt.attention(*wide)
        assert len(ran) == 5 and capfd.readouterr().err.count("checking attention") == 1


def test_modes_select_the_checked_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    with planted("hang", tmp_path) as ran:
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "strict")
        with pytest.warns(RuntimeWarning, match="no result shows that it is right here"):
            pt.attention(q, k, v)
        with pytest.raises(pt.BackendError, match="strict mode"):
            pt.attention(q, k, v, strict=True)
        assert not ran
        pt.attention(q, k, v, backend=BACKEND)  # a forced backend is not checked
        assert len(ran) == 1
        assert pt.explain("attention", q, k, v, causal="top_left").reasons["cpu"] is None
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "off")
        pt.attention(q, k, v)
        assert len(ran) == 2
        monkeypatch.setenv("PYTRANSFORMER_VERIFY", "first")  # explain does not check
        assert pt.explain("attention", q, k, v).backend == BACKEND and not list(
            tmp_path.glob("verification-*")
        )


def test_cpu_needs_no_result_but_a_failure_excludes_it(cache: Path) -> None:
    assert backend_of() == "cpu"
    write(cache, [line("wrong"), line("right")])
    assert backend_of() == "torch"
    assert backend_of(dropout_p=0.1) == "reference"
    assert backend_of(dtype=torch.bfloat16) == "cpu", "another dtype"
    q = torch.zeros(1, 1, 4, 16)
    reasons = pt.explain("attention", q, q, q, causal="top_left").reasons
    assert "verify: wrong here: full: out[0] = 1" in str(reasons["cpu"])


def test_a_failing_size_excludes_unverified_sizes(cache: Path) -> None:
    write(cache, [line("wrong"), line("right", size=128)])
    assert (backend_of(), backend_of(last=100), backend_of(last=200)) == ("torch", "cpu", "torch")


def test_measured_order_is_used_on_the_cpu(cache: Path) -> None:
    write(cache, [line("right")], order={"attention": ["torch", "cpu"]})
    assert backend_of() == "torch" and backend_of(dropout_p=0.1) == "cpu"
    assert list(pt.explain("attention", *inputs()).reasons)[:2] == ["torch", "cpu"]


# ---- the check at first use


@pytest.fixture
def checks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Count checks; each takes no time and passes."""
    jobs: list[Any] = []

    def run_jobs(several: list[Any], **_: Any) -> list[Any]:
        jobs.extend(several)
        return [job | {"outcome": "right", "detail": None} for job in several]

    monkeypatch.setattr(checking, "run_jobs", run_jobs)
    return jobs


def ask(backend: str = "triton", dtype: torch.dtype = torch.float32) -> str | None:
    q = torch.zeros(1, 1, 4, 16, dtype=dtype)
    op = OPS["attention"]
    a = op.prepare(q, q, q)[0]
    return verification.why_not(op, backend, a, ("attention", backend, q.device, dtype))


def test_check_happens_once_per_node_and_size(checks: list[Any]) -> None:
    assert ask() is None and ask() is None and len(checks) == 1
    verification.forget()  # another process
    assert ask() is None and len(checks) == 1
    assert ask(dtype=torch.bfloat16) is None and len(checks) == 2


def test_no_cache_directory_means_one_check_per_process(
    checks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "cache_folder", lambda: None)
    assert ask() is None and ask(dtype=torch.bfloat16) is None and ask() is None
    assert len(checks) == 2


def test_time_of_checks_is_bounded(checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_seconds", [verification.CHECK_SECONDS])
    assert "not checked here within 20 s" in str(ask()) and not checks


def test_late_check_is_stored(checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"outcome": "not checked", "detail": checking.TIME_UP}
    monkeypatch.setattr(checking, "run_jobs", lambda jobs, **_: [job | late for job in jobs])
    assert "verify: late here: the time was up" in str(ask())
    verification.forget()
    monkeypatch.setattr(checking, "run_jobs", lambda *_, **__: pytest.fail("checked again"))
    assert "verify: late here" in str(ask())


def test_other_local_ranks_wait_for_rank_0(
    checks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They use its result; without one they use the next backend. They never check."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(verification, "CHECK_SECONDS", 0.5)
    assert "not checked here within" in str(ask()) and not checks
    verification.forget()
    monkeypatch.setattr(verification, "CHECK_SECONDS", 30.0)
    found = line("right", backend="triton")
    timer = threading.Timer(0.5, verification.add_checks, (CPU, [found]))
    timer.start()
    assert ask() is None and not checks
    timer.join()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ask(dtype=torch.bfloat16) is None and len(checks) == 1


def test_processes_of_a_node_check_one_at_a_time(checks: list[Any]) -> None:
    """The process that gets the lock second reads the first one's result."""
    with verification.locked("check", 1) as held:
        assert held
        found: list[str | None] = []
        waiter = threading.Thread(target=lambda: found.append(ask()))
        waiter.start()
        verification.add_checks(CPU, [line("right", backend="triton")])
    waiter.join(timeout=30)
    assert found == [None] and not checks


# ---- results of the package


def test_shipped_results_need_equal_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capability, sources and Triton's version must match; driver and torch may differ."""
    gpu = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability[0])
    entry = verification.shipped()["sm_90"]
    digests = {n: {s: f["sources"] for s, f in e["families"].items()} for n, e in entry.items()}
    monkeypatch.setattr(verification, "kernel_sources", lambda backend: digests[backend])
    monkeypatch.setattr(verification, "triton_version", lambda: entry["triton"]["triton"])
    names = verification.shipped_names(gpu)
    assert {("layer_norm", b, d) for b in entry for d in ("bfloat16", "float16")} <= set(names)
    listed = entry["cuda"]["families"]
    assert {op for op, backend, _ in names if backend == "cuda"} == {
        name for name, op in OPS.items() if op.family in listed
    }
    monkeypatch.setattr(verification, "triton_version", lambda: "9.9")
    assert {backend for _, backend, _ in verification.shipped_names(gpu)} == {"cuda"}
    digests["cuda"] |= {"rotary": "another"}
    left = {op for op, *_ in verification.shipped_names(gpu)}
    assert "layer_norm" in left and not left & {"rotary", "append_kv"}
    capability[0] = (8, 0)
    assert verification.shipped_names(gpu) == [] == verification.shipped_names(CPU)


def test_shipped_results_match_the_sources(tmp_path: Path) -> None:
    """On failure, kernels changed after the GPU run in verified.json.

    bench/tools/verified.py lists them and carries a result over or drops it.
    """
    tool = runpy.run_path(str(ROOT / "bench" / "tools" / "verified.py"))
    assert tool["stale"](verification.shipped()) == []
    for part in ("csrc/cuda", "csrc/common", "kernels"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "csrc" / "interface.py", tmp_path / "csrc")
    assert tool["stale"](verification.shipped(), tmp_path) == []
    changed = {
        "csrc/cuda/feed_forward/sm90/fwd.cu": {("cuda", "feed_forward")},
        "csrc/cuda/layer_norm/fwd.cuh": {("cuda", "layer_norm"), ("cuda", "rotary")},
        "kernels/rotary/fwd.py": {("triton", "rotary")},
    }
    for name, stale in changed.items():
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + "\n")
        assert {pair[1:] for pair in tool["stale"](verification.shipped(), tmp_path)} == stale, name
        (tmp_path / name).write_text(text)
    (tmp_path / "csrc" / "cuda" / "launch.cuh").write_text("// another\n")
    stale = {
        family
        for _, backend, family in tool["stale"](verification.shipped(), tmp_path)
        if backend == "cuda"
    }
    assert stale == set(verification.shipped()["sm_90"]["cuda"]["families"])


# ---- the child process


def test_slowness_stays_between_one_and_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    for factor, expected in ((0.1, 1.0), (4.0, 4.0), (1e3, checking.MOST)):
        monkeypatch.setattr(checking, "loop_time", lambda f=factor: f * checking.NOMINAL)
        assert checking.slowness() == pytest.approx(expected)


def test_warm_calls_do_no_check(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    with fast_path.off():
        pt.attention(q, k, v)
        monkeypatch.setattr(verification, "why_not", lambda *_, **__: pytest.fail("asked again"))
        pt.attention(q, k, v)
        pt.attention(q, k, v, dropout_p=0.1)


def test_jobs_survive_crashed_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of five jobs crashes and the fourth hangs.

    A timeout leaves the remaining jobs unchecked.
    """
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
    output: list[dict[str, Any]] = []
    found = checking.run_jobs(jobs, seconds=5, told=output.append)
    assert [line["outcome"] for line in found] == [
        "right",
        "crashed",
        "right",
        "hung",
        "right",
    ] and output == found
    assert found[1]["detail"] == "the process ended by SIGABRT"
    wide = [{"do": "test", "device": "cpu", "n": n, "last": 128} for n in (5, 6, 7, 8)]
    same = checking.run_jobs(wide, seconds=60)
    processes = [line["process"] for line in same]
    assert processes[0] == processes[1] == processes[2] != processes[3], (
        "a wide problem does not end the process, a lost context does"
    )
    assert [line["outcome"] for line in same] == ["right", "right", "crashed", "right"]
    late = checking.run_jobs(jobs, seconds=5, until=Deadline(0))
    assert {line["outcome"] for line in late} == {"not checked"}
    monkeypatch.setattr(checking, "PREAMBLE", "raise SystemExit(3)")
    (line,) = checking.run_jobs(jobs[:1], seconds=5)
    assert (line["outcome"], line["detail"]) == (
        "not checked",
        "the process did not start: the process ended with code 3",
    )


@pytest.mark.unpoisoned
def test_tracing_checks_without_guards(tmp_path: Path) -> None:
    """Under activate() torch.compile traces the selection, which reads symbolic sizes unguarded."""
    attend = torch.nn.functional.scaled_dot_product_attention
    with planted("", tmp_path) as ran, pt.activate():
        compiled = torch.compile(
            lambda x: attend(x, x, x), backend="aot_eager", dynamic=True, fullgraph=True
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for length in (30, 40, 10):  # the last is another class in the same code
                x = torch.randn(2, 3, length, 16)
                torch.testing.assert_close(compiled(x), attend(x, x, x))
        assert len(ran) == 6
    torch._dynamo.reset()
